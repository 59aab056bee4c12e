# SPDX-License-Identifier: Apache-2.0
"""Pure: count commands and their bytes by opcode."""

from __future__ import annotations

from millpond.tunnel.ring.nvme_defs import Opcode
from nvmet.commands import Io


class CommandStats:
    """Counts the I/O commands that succeeded."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {code: [0, 0] for code in (*Io, Opcode.SEND, Opcode.RECV)}

    def count(self, opcode: int, size: int) -> None:
        """Count a command that moved ``size`` bytes."""
        entry = self._counts[opcode]
        entry[0] += 1
        entry[1] += size

    def figures(self) -> dict[str, dict[str, int]]:
        """Return commands and bytes by opcode, as in ``81h``."""
        return {
            f"{code:02X}h": {"commands": commands, "bytes": size}
            for code, (commands, size) in self._counts.items()
        }
