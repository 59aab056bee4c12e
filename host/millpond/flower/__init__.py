# SPDX-License-Identifier: Apache-2.0
"""A fleet as a client of Flower: ``millpond.flower.client(job)`` is a ClientApp, ``serve`` runs a ServerApp's
rounds over fleets, ``DiLoCo`` is a strategy.

They need flwr, which lives in an environment of its own, and know the daemon by its socket alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.flower.client_app import client
    from millpond.flower.server_app import DiLoCo, serve

__all__ = ["DiLoCo", "client", "serve"]


def __getattr__(name: str) -> Any:
    """Load what is used: each end of a federation needs the other's modules not at all."""
    if name == "client":
        from millpond.flower.client_app import client

        return client
    if name not in __all__:
        raise AttributeError(f"module 'millpond.flower' has no attribute '{name}'")
    from millpond.flower import server_app

    return getattr(server_app, name)
