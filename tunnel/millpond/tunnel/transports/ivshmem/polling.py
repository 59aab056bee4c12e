"""Edge: the ivshmem device without interrupts: a process looks at what the host writes, ever less often.

It looks again after a sixteenth of the time since the last change, at least 50 us and at most 10 ms. A link
at rest has 100 looks a second; the first packet after a rest waits up to 10 ms.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.linux.child import fork
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.layout import PAGE, QUEUES, RECV, SEND, STRIDE
from millpond.tunnel.transports.ivshmem.bar0 import DoorbellRegisters

log = logging.getLogger(__name__)

_SHORTEST, _LONGEST = 50e-6, 10e-3
_SHARE = 1 / 16
_BUSY_SECONDS = 2.0


class PolledDevice:
    """The device in sysfs at ``device``, its BAR 2 as ``memory``. Only one process has it at a time.

    Raises OSError, and LocalError if another process still has it after 2 s.
    """

    news: tuple[int, ...] = ()
    """What the process that looks keeps open while it lives."""
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
        """BAR 0; the lock on it goes when no process of this end is left."""
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

    def bells(self, peer: int) -> tuple[Notifier, ...] | None:
        """The doorbell register; nothing tells here who is there."""
        return self._registers.bells(peer)

    def refresh(self) -> None:
        """Have another process look if the one that did was killed. Raises OSError if there can be none."""
        if not self.news or select.select(self.news, (), (), 0)[0]:
            log.warning("the process that looks at the device ended; another one begins")
            self._stop_watching()
            self._start_watching()

    def _start_watching(self) -> None:
        self._watcher, report = fork(lambda _report: watch(self.memory, self.wakes))
        self.news = (report,)

    def _stop_watching(self) -> None:
        if self.news:
            os.kill(self._watcher, signal.SIGKILL)
            os.waitpid(self._watcher, 0)
            os.close(self.news[0])
        self.news = ()

    def close(self) -> None:
        """End the process that looks, and give the device back."""
        self._undo.close()


def pause(quiet: float) -> float:
    """Seconds to the next look, ``quiet`` seconds after the last change."""
    return min(max(_SHARE * quiet, _SHORTEST), _LONGEST)


def watch(memory: memoryview, wakes: tuple[int, ...]) -> NoReturn:
    """Ring one of ``wakes`` whenever the host has written what its sleeper may wait for.

    The sleep words do not tell whether somebody sleeps: the host clears them when it rings in vain.
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
