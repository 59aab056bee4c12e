"""Boards that this machine runs: emulated in namespaces, or in QEMU."""
