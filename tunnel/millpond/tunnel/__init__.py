# SPDX-License-Identifier: Apache-2.0
"""The TCP/IP link between host and device, carried in NVMe-style commands."""
