# SPDX-License-Identifier: Apache-2.0
"""Transports: the ways in which both endpoints reach the same memory or controller: memfd, ivshmem, NVMe."""
