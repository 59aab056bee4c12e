"""How the two ends get at the same memory or controller: memfd, ivshmem, NVMe."""
