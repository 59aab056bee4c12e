# SPDX-License-Identifier: Apache-2.0
"""The host: its daemon, its commands, and ``Fleet``, the way in for programs and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.host.program.fleet import FleetProgram

    Fleet = FleetProgram


def __getattr__(name: str) -> Any:
    """Load ``Fleet`` when it is used: the daemon and most commands do without it."""
    if name != "Fleet":
        raise AttributeError(f"module 'millpond.host' has no attribute '{name}'")
    from millpond.host.program.fleet import FleetProgram

    return FleetProgram
