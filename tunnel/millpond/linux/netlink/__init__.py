# SPDX-License-Identifier: Apache-2.0
"""Messages to the kernel's networking by netlink(7), without a library: routing rules, packet filters."""
