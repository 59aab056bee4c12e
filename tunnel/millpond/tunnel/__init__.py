"""The TCP/IP link between host and device, carried in NVMe-style commands."""
