# SPDX-License-Identifier: Apache-2.0
"""Tests of what jobs need of a device, before a new version of its software is kept."""
