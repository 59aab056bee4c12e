# SPDX-License-Identifier: Apache-2.0
"""Edge: a device and its host, whose power can be cut, and whose parts can be killed one by one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conformance import places
from conformance.power import Power
from millpond.fs.fuse.mounts import unmount
from millpond.fs.store.layout import PUBLIC

DEVICE, SERVER, HOST = "the device's mount", "the host's server", "the host's mount"
PARTS = (DEVICE, SERVER, HOST)


@dataclass(slots=True)
class Machine:
    """The mounts of a volume on ``power``'s file system, and the processes that serve them."""

    power: Power
    scratch: Path
    _running: dict[str, int] = field(default_factory=dict)

    def mount_of(self, part: str) -> Path:
        """Where the public part is seen through the mount ``part``."""
        return self._point(part) / PUBLIC

    @property
    def below(self) -> Path:
        """The same, as the file system below has it."""
        return self.power.flash / PUBLIC

    def _point(self, part: str) -> Path:
        return self.scratch / ("device" if part == DEVICE else "host")

    @property
    def _listener(self) -> Path:
        return self.scratch / "socket"

    def start(self, part: str) -> None:
        """Start it, for the first time or again. Raises LocalError if it does not come up."""
        if part == SERVER:
            self._running[part] = places.start_server(self.power.flash, self._listener)
            return
        point = self._point(part)
        point.mkdir(exist_ok=True)
        if part == DEVICE:
            self._running[part], _ = places.start_device(self.power.flash, point, "auto")
        else:
            self._running[part] = places.start_host(self.power.flash, point, self._listener)

    def kill(self, *parts: str) -> None:
        """Kill them at once; what they had mounted is mounted no more."""
        pids = {part: self._running.pop(part) for part in parts if part in self._running}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            os.waitpid(pid, 0)
        for part in pids:
            if part != SERVER:
                unmount(self._point(part))


@contextlib.contextmanager
def machine(power: Power, scratch: Path) -> Iterator[Machine]:
    """All parts are up; in the end none is."""
    made = Machine(power, scratch)
    try:
        for part in PARTS:
            made.start(part)
        yield made
    finally:
        made.kill(*PARTS)
