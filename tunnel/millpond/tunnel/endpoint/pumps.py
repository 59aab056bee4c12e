# SPDX-License-Identifier: Apache-2.0
"""Edge: fork the two pumps of an open link, watch each through a pipe, kill them."""

from __future__ import annotations

import functools
import logging
import os
import signal
from dataclasses import dataclass

from millpond.base.errors import ConnectionLost, LocalError, MillpondError
from millpond.base.text import printable
from millpond.linux import child
from millpond.linux.child import fork
from millpond.tunnel.datapath.confinement import confine_pump
from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds
from millpond.tunnel.errors import InterfaceGone, LinkViolation
from millpond.tunnel.transports.base import Connection

log = logging.getLogger(__name__)

_VIOLATION, _INTERFACE_GONE, _LOST, _BROKEN = b"V", b"I", b"L", b"B"
_MAX_REPORT = 1000


@dataclass(frozen=True, slots=True)
class LinkPump:
    """A pump: the process that runs one datapath loop. ``report`` becomes readable when it ends."""

    pid: int
    report: int

    def verdict(self) -> MillpondError:
        """Return the error that ended the pump; call it when ``report`` is readable."""
        text = os.read(self.report, _MAX_REPORT)
        # a pump may have been taken over by what its peer has sent
        kind, reason = text[:1], printable(text[1:].decode(errors="replace"))
        if kind == _VIOLATION:
            return LinkViolation(reason)
        if kind == _INTERFACE_GONE:
            return InterfaceGone(reason)
        if kind == _LOST:
            return ConnectionLost(reason)
        return LocalError(reason or f"a pump was killed{self._killer()}")

    def _killer(self) -> str:
        """Name the signal that killed the pump, where it tells the cause; empty otherwise."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        causes: dict[int, str] = {
            signal.SIGBUS: "the region's file was truncated",
            signal.SIGSYS: "a forbidden system call",
        }
        cause = causes.get(found.si_status) if found and found.si_code != os.CLD_EXITED else ""
        return f": {cause}" if cause else ""

    def kill(self) -> None:
        """Kill and reap the pump."""
        child.end(self.pid)
        os.close(self.report)


class LinkPumps:
    """The pumps of one connection, as a context manager that kills and reaps all of them."""

    def __init__(self, connection: Connection, datapath: DatapathContext) -> None:
        self.pumps: list[LinkPump] = []
        needs, interface = connection.needs, datapath.interface.descriptor
        try:
            for loop in connection.loops(datapath):
                self.pumps.append(LinkPump(*fork(functools.partial(_run, needs, interface, loop))))
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> LinkPumps:
        return self

    def __exit__(self, *_: object) -> None:
        while self.pumps:
            self.pumps.pop().kill()


def _run(needs: PumpNeeds, interface: int, loop: Loop, report: int) -> None:
    try:
        confine_pump(needs, (interface, report))
        loop()
    except LinkViolation as error:
        os.write(report, _VIOLATION + str(error).encode())
    except InterfaceGone as error:
        os.write(report, _INTERFACE_GONE + str(error).encode())
    except ConnectionLost as error:
        os.write(report, _LOST + str(error).encode())
    except Exception as error:
        log.exception("the pump failed")
        os.write(report, _BROKEN + f"{type(error).__name__}: {error}".encode())
