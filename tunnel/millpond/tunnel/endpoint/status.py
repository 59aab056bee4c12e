# SPDX-License-Identifier: Apache-2.0
"""Edge: report the state of an endpoint to the process that started it, one JSON object per line."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from millpond.tunnel.errors import Orphaned

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes each change of state to ``descriptor`` (None: to the log alone). Raises Orphaned if nobody
    reads.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._last: dict[str, Any] = {}

    def down(self, reason: str, **fields: Any) -> None:
        """Report that there is no link, because of ``reason``; an unchanged reason is reported once."""
        self._change("down", {"reason": reason}, fields)

    def up(self, *, generation: int, mtu: int, peer: str, **fields: Any) -> None:
        """Report a link that carries packets of up to ``mtu`` bytes to the endpoint called ``peer``."""
        self._change("up", {"generation": generation, "mtu": mtu, "peer": peer}, fields)

    def _change(self, state: str, summary: dict[str, Any], fields: dict[str, Any]) -> None:
        if summary | {"state": state} == self._last:
            return
        self._last = summary | {"state": state}
        details = ", ".join(f"{key} {value}" for key, value in summary.items() if key != "reason")
        log.info("link %s: %s", state, summary.get("reason", details))
        if self._descriptor is not None:
            line = json.dumps({"state": state} | summary | fields) + "\n"
            try:
                os.write(self._descriptor, line.encode())
            except BrokenPipeError:
                raise Orphaned("nobody reads the status any more") from None
