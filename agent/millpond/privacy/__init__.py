# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: exact integer noise, and what it costs."""
