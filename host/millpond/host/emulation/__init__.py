"""The emulated machine, and devices in QEMU."""
