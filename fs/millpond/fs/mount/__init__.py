"""The two mounts of a volume: on the device and on the host."""
