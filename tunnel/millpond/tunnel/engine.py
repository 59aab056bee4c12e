"""Edge: which engine runs the pumps: the Python loops, or the same in C where a compiler built them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from millpond.tunnel import pump
from millpond.tunnel.pump import Station

ENGINES = ("auto", "python", "c")


def loops(engine: str, role: str) -> tuple[Callable[[Station], NoReturn], Callable[[Station], NoReturn]]:
    """The loops from the interface and to it, for ``host`` or ``device``. Raises LocalError."""
    return pump.LOOPS[role]
