# SPDX-License-Identifier: Apache-2.0
"""Limits of what process trees take of the machine."""
