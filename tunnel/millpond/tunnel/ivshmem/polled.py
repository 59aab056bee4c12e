"""Edge: the ivshmem device without interrupts: a process looks at what the host writes, ever less often.

It looks again after a sixteenth of the time since the last change, at least 50 us and at most 10 ms. A link
at rest has 100 looks a second; the first packet after a rest waits up to 10 ms.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from millpond.linux.syscalls import die_with_parent
from millpond.tunnel import nvme
from millpond.tunnel.bells import Bell
from millpond.tunnel.ivshmem.registers import DoorbellRegisters
from millpond.tunnel.ivshmem.session import HOST_WORD
from millpond.tunnel.layout import ADMIN, PAGE, QUEUES, STRIDE
from millpond.wire.deadline import Deadline
from millpond.wire.errors import LocalError

_SHORTEST, _LONGEST = 50e-6, 10e-3
_SHARE = 1 / 16
_BUSY_SECONDS = 2.0


class PolledBoard:
    """The device in sysfs at ``device``, its BAR 2 as ``memory``. Only one process has it at a time.

    Raises OSError, and LocalError if another process still has it after 2 s.
    """

    news: tuple[int, ...] = ()
    lost = False

    def __init__(self, device: Path, memory: memoryview) -> None:
        self.memory = memory
        self._undo = ExitStack()
        try:
            (device / "enable").write_text("1")
            self._registers = DoorbellRegisters(self._map_registers(device / "resource0"))
            self.wakes = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(QUEUES))
            for wake in self.wakes:
                self._undo.callback(os.close, wake)
            self._undo.callback(_end, _start(memory, self.wakes))
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

    def bells(self, peer: int) -> tuple[Bell, ...] | None:
        """The doorbell register; nothing tells here who is there."""
        return self._registers.bells(peer)

    def refresh(self) -> None:
        """Nothing tells here who is there."""

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
    words, quads = memory[:PAGE].cast("I"), memory[:PAGE].cast("Q")
    tails = [(nvme.DOORBELLS + nvme.doorbell_offset(2 * queue, STRIDE)) // 4 for queue in range(QUEUES)]
    last: list[tuple[int, ...]] = [()] * QUEUES
    changed = time.monotonic()
    while True:
        now = time.monotonic()
        for queue, tail in enumerate(tails):
            seen: tuple[int, ...] = (words[tail],)
            if queue == ADMIN:
                seen += (words[nvme.CC // 4], quads[HOST_WORD // 8])
            if seen != last[queue]:
                last[queue], changed = seen, now
                with suppress(BlockingIOError):
                    os.eventfd_write(wakes[queue], 1)
        time.sleep(pause(now - changed))


def _start(memory: memoryview, wakes: tuple[int, ...]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() == parent:
            watch(memory, wakes)
    finally:
        os._exit(1)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
