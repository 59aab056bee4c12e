# SPDX-License-Identifier: Apache-2.0
"""The emulated machine, and devices in QEMU."""
