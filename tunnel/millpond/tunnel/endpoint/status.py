"""Edge: the state of an end, one JSON object per line, for whoever started it."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from millpond.tunnel.errors import Orphaned

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes each change to ``descriptor`` (None: only to the log). Raises Orphaned if nobody reads."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._last: dict[str, Any] = {}

    def down(self, reason: str, **fields: Any) -> None:
        """There is no link, because of ``reason``; says so once."""
        self._change("down", {"reason": reason}, fields)

    def up(self, *, generation: int, mtu: int, peer: str, **fields: Any) -> None:
        """A link carries packets of up to ``mtu`` bytes."""
        self._change("up", {"generation": generation, "mtu": mtu, "peer": peer}, fields)

    def _change(self, state: str, what: dict[str, Any], fields: dict[str, Any]) -> None:
        if what | {"state": state} == self._last:
            return
        self._last = what | {"state": state}
        details = ", ".join(f"{key} {value}" for key, value in what.items() if key != "reason")
        log.info("link %s: %s", state, what.get("reason", details))
        if self._descriptor is not None:
            line = json.dumps({"state": state} | what | fields) + "\n"
            try:
                os.write(self._descriptor, line.encode())
            except BrokenPipeError:
                raise Orphaned("nobody reads the status any more") from None
