# SPDX-License-Identifier: Apache-2.0
"""Entry: millpond for programs: ``from millpond import Fleet``.

The components' packages lie in one source root each; their folders are joined here.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.host.program.fleet import FleetProgram

    Fleet = FleetProgram

__all__ = ["Fleet"]
# In place, as the module's spec holds the same list: tools that search by spec find all components.
__path__ += [folder for folder in extend_path(__path__, __name__) if folder not in __path__]


def __getattr__(name: str) -> Any:
    """Load ``Fleet`` when it is used: the daemon and most commands do without it."""
    if name != "Fleet":
        raise AttributeError(f"module 'millpond' has no attribute '{name}'")
    from millpond.host.program.fleet import FleetProgram

    return FleetProgram
