"""Edge: the two pump processes of an open link: forked, watched through a pipe each, killed."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.counters import Counters
from millpond.tunnel.errors import InterfaceGone, LinkViolation
from millpond.tunnel.parameters import Parameters
from millpond.tunnel.pump import INWARD, OUTWARD, Bench, device_bench, host_bench
from millpond.tunnel.transport import Connection
from millpond.tunnel.tun import Tun
from millpond.wire.errors import LocalError, MillpondError

log = logging.getLogger(__name__)

_VIOLATION, _INTERFACE_GONE, _BROKEN = b"V", b"I", b"B"
_MAX_REPORT = 1000


@dataclass(frozen=True, slots=True)
class Pump:
    """A running pump; ``report`` becomes readable when it ends."""

    pid: int
    report: int

    def verdict(self) -> MillpondError:
        """Why it ended; call it when ``report`` is readable."""
        text = os.read(self.report, _MAX_REPORT)
        kind, reason = text[:1], text[1:].decode(errors="replace")
        if kind == _VIOLATION:
            return LinkViolation(reason)
        if kind == _INTERFACE_GONE:
            return InterfaceGone(reason)
        return LocalError(reason or "a pump was killed")

    def kill(self) -> None:
        """End it and forget it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.report)


class Link:
    """The pumps of one connection; a context manager that never leaves one behind."""

    def __init__(
        self,
        role: str,
        connection: Connection,
        terms: Parameters,
        tun: Tun,
        counters: tuple[Counters, Counters],
    ) -> None:
        bench = host_bench if role == "host" else device_bench
        self.pumps: list[Pump] = []
        try:
            for (queue, loop), counter in zip((OUTWARD[role], INWARD[role]), counters, strict=True):
                self.pumps.append(_start(loop, bench(connection, queue, terms, tun, counter)))
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        while self.pumps:
            self.pumps.pop().kill()


def _start(loop: Callable[[Bench], NoReturn], bench: Bench) -> Pump:
    """Fork a pump. It keeps all descriptors: an end is gone for its peer only when its pumps are gone too."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Pump(pid, reader)
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            _forget_signals()
            _run(loop, bench, writer)
    finally:
        os._exit(1)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the main process decides


def _run(loop: Callable[[Bench], NoReturn], bench: Bench, report: int) -> None:
    try:
        loop(bench)
    except LinkViolation as error:
        os.write(report, _VIOLATION + str(error).encode())
    except InterfaceGone as error:
        os.write(report, _INTERFACE_GONE + str(error).encode())
    except Exception as error:
        log.exception("the pump failed")
        os.write(report, _BROKEN + f"{type(error).__name__}: {error}".encode())
