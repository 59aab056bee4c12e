# SPDX-License-Identifier: Apache-2.0
"""Batches by the speeds of workers: curves, equal-time batches, the controller that re-tunes them."""
