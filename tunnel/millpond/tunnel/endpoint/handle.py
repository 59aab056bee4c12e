"""Edge: an end of the tunnel as a child process of this one."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, LocalError
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.datapath.stats_shm import make_stats, map_stats
from millpond.tunnel.endpoint.zygote_client import EndpointZygote
from millpond.tunnel.ring.link_params import DEFAULT_MTU

log = logging.getLogger(__name__)

_STOP_SECONDS = 3.0


class Process(Protocol):
    """What an end's process can be asked."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> object:
        """Until it has ended."""


Starter = Callable[[int, int], Process]
"""Starts a process with descriptors for status and counters. Raises OSError."""


class EndpointHandle:
    """A running end. Use ``spawn_endpoint``; ``stop`` it in the end, or it stops with this process."""

    def __init__(self, start: Starter) -> None:
        self._start = start
        descriptor = make_stats()
        try:
            self._counters = map_stats(descriptor)
            self._start_following(descriptor)
        finally:
            os.close(descriptor)

    def _start_following(self, counters: int) -> None:
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {"state": "down", "reason": "starting"}
        self._process: Process | None = None
        self._failure: OSError | None = None
        self._ended = False
        threading.Thread(target=self._follow, args=(counters,), name="tunnel-status", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._process is not None or self._ended)
        if self._failure is not None:
            raise LocalError(f"the tunnel end cannot be started: {self._failure}")

    def _follow(self, counters: int) -> None:
        """Start the process and read what it says. It dies with the thread that forked it: so with this one,
        which lasts as long as it does.
        """
        try:
            self._run(counters)
        except OSError as error:
            self._failure = error
        except ValueError as error:  # a line that is not JSON: it was cut
            log.warning("the tunnel end said something unreadable: %s", error)
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _run(self, counters: int) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(reader, encoding="utf-8") as lines:
            try:
                process = self._start(writer, counters)
            finally:
                os.close(writer)
            with self._changed:
                self._process = process
                self._changed.notify_all()
            for line in lines:
                self._take(json.loads(line))
        process.wait()

    def _take(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    @property
    def status(self) -> dict[str, Any]:
        """The latest state that the end reported; down once its process has ended."""
        with self._changed:
            if self._ended and self._status["state"] == "up":
                return {**self._status, "state": "down", "reason": "the tunnel's end has died"}
            return dict(self._status)

    @property
    def counts(self) -> tuple[PacketStats, PacketStats]:
        """What went from this end's interface to the peer, and what came from it, at this moment."""
        outward, inward = self._counters
        return outward.read(), inward.read()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        with self._changed:
            return not self._ended

    def wait_up(self, deadline: Deadline) -> dict[str, Any]:
        """The status once the link is up. Raises DeadlineExceeded, or LocalError if the process ended."""
        with self._changed:
            while self._status["state"] != "up" or self._ended:
                if self._ended:
                    raise LocalError(f"the tunnel end has ended: {self._status.get('reason', 'it was up')}")
                if deadline.passed:
                    raise DeadlineExceeded(f"the tunnel is not up: {self._status['reason']}")
                self._changed.wait(deadline.remaining())
            return dict(self._status)

    def stop(self) -> None:
        """End the process and its pumps; the interface goes with them. Does nothing the second time."""
        if self._process is None or self._ended:
            return
        self._process.terminate()
        with self._changed:
            stopped = self._changed.wait_for(lambda: self._ended, _STOP_SECONDS)
        if not stopped:
            self._process.kill()
            with self._changed:
                self._changed.wait_for(lambda: self._ended, _STOP_SECONDS)


def spawn_endpoint(
    role: str,
    where: Path | str,
    interface: str,
    address: str,
    *,
    mtu: int = DEFAULT_MTU,
    name: str = "",
    peers: str = "",
    transport: Literal["socket", "ivshmem", "nvme"] = "socket",
    nursery: EndpointZygote | None = None,
) -> EndpointHandle:
    """Start an end (``host`` or ``device``) in this process's network namespace: as a program of its own, or
    from a ``nursery``, where many ends share their memory and start at once. ``where`` its peer is depends on
    the ``transport``, as for ``python -m millpond.tunnel``. ``peers`` is the network that
    the device may speak with, if that is more than the host. Raises LocalError.
    """
    arguments = [role, f"--{transport}", str(where), "--interface", interface, "--address", address]
    arguments += ["--mtu", str(mtu), "--name", name, *(["--peers", peers] if peers else [])]
    return EndpointHandle(functools.partial(nursery.start if nursery else _start_program, arguments))


def _start_program(arguments: list[str], status: int, counters: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "millpond.tunnel", *arguments]
    argv += ["--status-fd", str(status), "--counters-fd", str(counters)]
    return subprocess.Popen(argv, pass_fds=(status, counters), stdin=subprocess.DEVNULL)
