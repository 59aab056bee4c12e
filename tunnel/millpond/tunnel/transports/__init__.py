"""Transports: the ways in which both endpoints reach the same memory or controller: memfd, ivshmem, NVMe."""
