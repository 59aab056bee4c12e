# SPDX-License-Identifier: Apache-2.0
"""Copies of files between volumes."""
