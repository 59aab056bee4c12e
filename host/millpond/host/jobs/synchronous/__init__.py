# SPDX-License-Identifier: Apache-2.0
"""Synchronous training: one gradient exchange per step."""
