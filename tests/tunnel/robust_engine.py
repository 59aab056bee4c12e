# SPDX-License-Identifier: Apache-2.0
"""Runs one loop of either engine in a process of its own; a socket pair takes the interface's place."""

from __future__ import annotations

import mmap
import os
import platform
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from millpond.base.deadline import Deadline
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds, QueueContext
from millpond.tunnel.datapath.notifier import Notifier
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.datapath.stats_shm import make_stats, map_stats
from millpond.tunnel.endpoint.pumps import LinkPumps
from millpond.tunnel.errors import InterfaceGone
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.layout import SLEEP_WORDS, STRIDE, Layout
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import Region

from .robust_loop_context import LOOPS, Observation, Setting

MOST_TAKEN = 100_000
"""About the longest packet that the interface takes; a buffer of the ring holds more."""
NOTIFY_VALUE = 7
_READS = {"x86_64": ("0", "19"), "aarch64": ("63", "65")}.get(platform.machine(), ())
"""Numbers of read and readv."""
_LOOK_AGAIN = 0.0002


def why_not_observable() -> str:
    """Why it cannot be told here what a process waits for; nothing if it can."""
    if not _READS:
        return f"the numbers of system calls on {platform.machine()} are not known here"
    known = os.access("/proc/self/syscall", os.R_OK)
    return "" if known else "the kernel does not tell what a process waits for"


class Wire:
    """A ``transport.PacketInterface``: one end of a socket pair that keeps packets apart, as a TUN does."""

    name = "wire"

    def __init__(self, sock: socket.socket) -> None:
        self.descriptor = sock.fileno()

    def read_into(self, buffer: memoryview) -> int:
        return os.readv(self.descriptor, [buffer])

    def write(self, head: bytes, rest: memoryview) -> bool:
        os.writev(self.descriptor, (head, rest))
        return True

    def check_gone(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise InterfaceGone("the wire is gone") from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class OneLoop:
    """What ``LinkPumps`` takes of a connection."""

    queue: QueueContext
    setting: Setting
    needs: PumpNeeds

    def loops(self, context: DatapathContext) -> tuple[Loop, ...]:
        role, place, _ = LOOPS[self.setting.loop]
        loop = native.loops(context.engine, role)[place]

        def run() -> NoReturn:
            loop(self.queue)

        return (run,)


class RunningLoop:
    """The peer's half of its queue, ``memory``, is the test's, and so is the other end of the wire."""

    def __init__(self, undo: ExitStack, engine_name: str, setting: Setting) -> None:
        self.setting = setting
        self.role, place, self._number = LOOPS[setting.loop]
        self.outward = place == 0
        self._open_memory()
        self._open_wire(undo)
        self._open_notifiers(undo)
        self._start(undo, engine_name)
        self._delivered: list[bytes] = []
        self.verdict: tuple[str, str] | None = None

    def _open_memory(self) -> None:
        layout = Layout(self.setting.depth + self.setting.spare)
        self.region = Region.create(memoryview(mmap.mmap(-1, layout.size)), layout)
        self.memory = memory = self.region.queue(self._number, self.setting.depth)
        words = (memory.controller_sleep_word, memory.host_sleep_word)
        host = self.role == "host"
        self.own_word, self.peer_word = words[host], words[not host]
        self._own_word_at = SLEEP_WORDS + nvme_defs.doorbell_offset(2 * self._number + host, STRIDE)
        descriptor = make_stats()
        self._counters = map_stats(descriptor)[0]
        os.close(descriptor)

    def _start(self, undo: ExitStack, engine_name: str) -> None:
        setting, counters = self.setting, self._counters
        terms = LinkParameters(depth=setting.depth, vnet_header=setting.vnet_header)
        context = DatapathContext(terms, Wire(self._inner), setting.gate, counters, counters, engine_name)
        queue = QueueContext(self.role == "host", self.memory, self.wake, self._notifier, context, counters)
        self._link = LinkPumps(
            OneLoop(queue, setting, PumpNeeds(frozenset((self.wake, self._peer_wake)))), context
        )  # type: ignore[arg-type]
        undo.callback(self._link.__exit__)
        self.pid, self._report = self._link.pumps[0].pid, self._link.pumps[0].report

    def _open_wire(self, undo: ExitStack) -> None:
        self._inner, self.wire = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_TAKEN // 2)  # the kernel doubles it
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for sock in (self._inner, self.wire):
            undo.callback(sock.close)

    def _open_notifiers(self, undo: ExitStack) -> None:
        self.wake, self._peer_wake = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        for notifier in (self.wake, self._peer_wake):
            undo.callback(os.close, notifier)
        self._register = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")[:1]
        self._notifier = Notifier(self._peer_wake)
        if self.setting.register:
            self._notifier = Notifier(register=self._register, value=NOTIFY_VALUE)

    @property
    def counts(self) -> PacketStats:
        return self._counters.read()

    def cpu_seconds(self) -> float:
        """Used so far."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def ring(self, times: int = 1) -> None:
        """As its peer does."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.wake, times)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What its peer does within happens to it all at once."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def ended(self) -> bool:
        """Whether it has; ``verdict`` tells why."""
        if self.verdict is None and select.select([self._report], [], [], 0)[0]:
            error = self._link.pumps[0].verdict()
            self.verdict = type(error).__name__, str(error)
        return self.verdict is not None

    def rest(self, seconds: float = 20) -> None:
        """Until it has ended, or can do nothing more without a packet or its peer."""
        deadline, sleeps = Deadline.after(seconds), self.counts.sleeps
        # A nap that began after another one did has seen all that there was when it was called for.
        while not (self.ended() or self._reads() or self.counts.sleeps >= sleeps + 2):
            assert not deadline.passed, "the loop neither rests nor ends"
            self.ring()
            self._take_delivered()
            time.sleep(_LOOK_AGAIN)
        self._take_delivered()

    def _reads(self) -> bool:
        """Whether it waits for a packet, and there is none. In this order: it has not just taken one."""
        if select.select([self._inner], [], [], 0)[0]:
            return False
        try:
            call = Path(f"/proc/{self.pid}/syscall").read_text().split()
        except PermissionError:  # it has just ended: the kernel gives what is left of it to root
            return False
        return call[0] in _READS and int(call[1], 16) == self._inner.fileno()

    def _take_delivered(self) -> None:
        while select.select([self.wire], [], [], 0)[0]:
            self._delivered.append(self.wire.recv(1 << 18))

    def delivered(self) -> list[bytes]:
        """Packets that it gave the interface since this was last called."""
        self._take_delivered()
        packets, self._delivered = self._delivered, []
        return packets

    def observe(self) -> Observation:
        """After ``rest``. How often it slept and found the ring full depends on time, whether it did not."""
        counts = self.counts
        counts = replace(counts, sleeps=0, full=min(counts.full, 1))
        delivered, rung, armed = tuple(self.delivered()), self._rung(), self._armed()
        return Observation(self.verdict, delivered, counts, rung, armed, self._region_but_own_word())

    def _armed(self) -> int:
        """Its sleep word, which is 0 for a moment when a nap ends."""
        deadline = Deadline.after(5)
        while self.verdict is None and not self.own_word[0] and not self._reads():
            assert not deadline.passed, "it sleeps without having said so"
        return int(self.own_word[0])

    def _region_but_own_word(self) -> bytearray:
        """That word changes by itself, as naps end."""
        region = bytearray(self.region.memory)
        region[self._own_word_at : self._own_word_at + 4] = bytes(4)
        return region

    def _rung(self) -> int:
        if self.setting.register:
            rung, self._register[0] = self._register[0], 0
            return int(rung)
        with suppress(BlockingIOError):
            return os.eventfd_read(self._peer_wake)
        return 0
