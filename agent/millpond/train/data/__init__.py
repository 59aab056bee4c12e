# SPDX-License-Identifier: Apache-2.0
"""Samples from files."""
