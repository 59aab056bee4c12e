# SPDX-License-Identifier: Apache-2.0
"""Launched scripts across host and devices."""
