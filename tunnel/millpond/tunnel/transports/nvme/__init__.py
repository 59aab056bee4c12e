"""The transport of real controllers: vendor commands through the kernel's NVMe driver."""
