# SPDX-License-Identifier: Apache-2.0
"""Leases, credits and messages of streamed data, all pure."""
