# SPDX-License-Identifier: Apache-2.0
"""Samples streamed to those that train on them, from where the samples lie."""
