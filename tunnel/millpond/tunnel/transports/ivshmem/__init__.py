# SPDX-License-Identifier: Apache-2.0
"""The transport into a virtual machine: a BAR of QEMU's ivshmem device, its doorbells, and their server."""
