# SPDX-License-Identifier: Apache-2.0
"""The training engine that devices and the host's own worker run. ``fit`` trains a task in one process,
``simulate`` a fleet in one process; ``group`` is for scripts of one's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millpond.train.api.fit import fit as fit
    from millpond.train.api.simulate import simulate as simulate
    from millpond.train.distributed.group import group as group

_PLACES: Final = {"fit": "api.fit", "simulate": "api.simulate", "group": "distributed.group"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first asked for: it needs torch, which the daemons do without."""
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
