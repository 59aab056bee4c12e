# SPDX-License-Identifier: Apache-2.0
"""Builds the agent image: a flat list of steps over one context. ``python -m millpond.images.build``."""
