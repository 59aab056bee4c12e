# SPDX-License-Identifier: Apache-2.0
"""What the device tells of itself: its load, energy and drive."""
