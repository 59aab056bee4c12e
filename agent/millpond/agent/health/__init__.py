# SPDX-License-Identifier: Apache-2.0
"""The device's reports on itself: its load, energy and drive."""
