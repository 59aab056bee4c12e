# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: masks that cancel in the sum of a cohort's updates, and in no smaller sum."""
