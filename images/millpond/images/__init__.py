# SPDX-License-Identifier: Apache-2.0
"""Boards: what a device runs on, and how it is started."""
