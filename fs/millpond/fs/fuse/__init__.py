# SPDX-License-Identifier: Apache-2.0
"""The bindings to the kernel: raw /dev/fuse, and fuse-python."""
