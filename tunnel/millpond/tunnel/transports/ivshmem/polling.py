# SPDX-License-Identifier: Apache-2.0
"""Edge: use the ivshmem device without interrupts: a process polls the doorbells that the host writes.

It polls again after a sixteenth of the time since the last change, at least 50 us and at most 10 ms. A link
at rest has 100 polls a second; the first packet after a rest waits up to 10 ms.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.linux import child
from millpond.linux.child import fork
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.layout import PAGE, QUEUES, RECV, SEND, STRIDE
from millpond.tunnel.transports.ivshmem.bar0 import DoorbellRegisters

log = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 10e-3
_SHARE = 1 / 16
_BUSY_SECONDS = 2.0


class PolledDevice:
    """The device in sysfs at ``device``, its BAR 2 as ``memory``; an IvshmemDevice, for one process at a
    time.

    Raises OSError, and LocalError if another process still has it after 2 s.
    """

    events: tuple[int, ...] = ()
    """The report pipe of the polling process, readable once that has ended."""
    lost = False

    def __init__(self, device: Path, memory: memoryview, *, weakly_ordered: bool) -> None:
        self.memory, self.weakly_ordered = memory, weakly_ordered
        self._undo = ExitStack()
        try:
            (device / "enable").write_text("1")
            self._registers = DoorbellRegisters(self._map_registers(device / "resource0"))
            self.wakes = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(QUEUES))
            for wake in self.wakes:
                self._undo.callback(os.close, wake)
            self._undo.callback(self._stop_watching)
            self._start_watching()
        except BaseException:
            self.close()
            raise
        self.position = self._registers.position

    def _map_registers(self, path: Path) -> memoryview:
        """Map BAR 0; the lock on it goes when no process of this endpoint is left."""
        bar, lock = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2))
        self._undo.callback(os.close, lock)
        self._undo.callback(os.close, bar)
        deadline = Deadline.after(_BUSY_SECONDS)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return memoryview(mmap.mmap(bar, os.fstat(bar).st_size))
            except BlockingIOError:
                if deadline.passed:
                    raise LocalError(f"another process uses {path.parent.name}") from None
            time.sleep(0.01)

    def notifiers(self, peer: int) -> tuple[Notifier, ...] | None:
        """Return notifiers through the doorbell register; the device does not know whether the
        peer is there.
        """
        return self._registers.notifiers(peer)

    def refresh(self) -> None:
        """Replace the polling process if it was killed. Raises OSError if none can be started."""
        if not self.events or select.select(self.events, (), (), 0)[0]:
            log.warning("the process that polls the device ended: starting another")
            self._stop_watching()
            self._start_watching()

    def _start_watching(self) -> None:
        self._watcher, report = fork(lambda _report: watch(self.memory, self.wakes))
        self.events = (report,)

    def _stop_watching(self) -> None:
        if self.events:
            child.end(self._watcher)
            os.close(self.events[0])
        self.events = ()

    def close(self) -> None:
        """End the polling process and release the device."""
        self._undo.close()


def pause(quiet: float) -> float:
    """Return the seconds to the next poll, ``quiet`` seconds after the last change."""
    return min(max(_SHARE * quiet, _SHORTEST_PAUSE), _LONGEST_PAUSE)


def watch(memory: memoryview, wakes: tuple[int, ...]) -> NoReturn:
    """Signal one of ``wakes`` whenever the host has moved a doorbell that its pump may wait for.

    The sleep words do not tell whether a pump sleeps: the host clears them when it notifies in vain.
    """
    words = memory[:PAGE].cast("I")
    tails = {
        queue: (nvme_defs.DOORBELLS + nvme_defs.doorbell_offset(2 * queue, STRIDE)) // 4
        for queue in (SEND, RECV)
    }
    last = dict.fromkeys(tails, -1)
    changed = time.monotonic()
    while True:
        now = time.monotonic()
        for queue, tail in tails.items():
            seen = words[tail]
            if seen != last[queue]:
                last[queue], changed = seen, now
                with suppress(BlockingIOError):
                    os.eventfd_write(wakes[queue], 1)
        time.sleep(pause(now - changed))
