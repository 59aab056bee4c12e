"""The bindings to the kernel: raw /dev/fuse, and fuse-python."""
