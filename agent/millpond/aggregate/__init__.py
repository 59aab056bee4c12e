# SPDX-License-Identifier: Apache-2.0
"""Aggregation: exact means of vectors, wherever they are summed and however they arrive."""
