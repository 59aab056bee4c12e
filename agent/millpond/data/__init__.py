# SPDX-License-Identifier: Apache-2.0
"""Training data that is larger than memory and lies elsewhere."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millpond.data.streaming.open import stream as stream
    from millpond.data.tier.mini_epochs import mini_epochs as mini_epochs

_PLACES: Final = {"mini_epochs": "tier.mini_epochs", "stream": "streaming.open"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first asked for: it needs torch, which the daemons do without."""
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
