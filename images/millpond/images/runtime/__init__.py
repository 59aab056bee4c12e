# SPDX-License-Identifier: Apache-2.0
"""Boards that this machine runs: emulated in namespaces, or in QEMU."""
