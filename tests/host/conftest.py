# SPDX-License-Identifier: Apache-2.0
"""Fixtures of many of the host's tests: a daemon whose jobs train nothing, and the command line."""

from __future__ import annotations

from .commands import command
from .copies import sides
from .daemon_rig import open_rig, rig

__all__ = ["command", "open_rig", "rig", "sides"]
