# SPDX-License-Identifier: Apache-2.0
"""Edge: start an endpoint as a child process, follow its status and stop it."""

from __future__ import annotations

import contextlib
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
from millpond.linux.zygote.prepared import PreparedFork
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.datapath.stats_shm import make_stats, map_stats
from millpond.tunnel.endpoint.zygote_client import EndpointZygote
from millpond.tunnel.ring.link_params import DEFAULT_MTU

log = logging.getLogger(__name__)

STARTING = "starting"
"""The reason of an endpoint that has reported nothing yet."""
START_SECONDS = 90.0
"""Longer than a zygote may take for an answer, and another in its place."""
_STOP_SECONDS = 3.0


class Process(Protocol):
    """An endpoint's process, whether a program of its own or a fork of the zygote."""

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""

    def wait(self) -> object:
        """Wait until the process has ended."""


Starter = Callable[[int, int], Process]
"""Start a process, with the descriptors that get its status and its counters. Raises OSError."""


class EndpointHandle:
    """A running endpoint, made by ``spawn_endpoint``. It ends by ``stop``, or with this process."""

    def __init__(self, start: Starter) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {"state": "down", "reason": STARTING}
        self._process: Process | None = None
        self._failure: OSError | None = None
        self._ended = self._given_up = False
        counters = make_stats()
        try:
            self._counters = map_stats(counters)
            threading.Thread(target=self._follow, args=(counters,), name="tunnel-status", daemon=True).start()
        except BaseException:
            os.close(counters)
            raise
        self._wait_started()

    def _wait_started(self) -> None:
        with self._changed:
            self._given_up = not self._changed.wait_for(
                lambda: self._process is not None or self._ended, START_SECONDS
            )
        if self._given_up:
            raise LocalError(
                f"the tunnel endpoint cannot be started: it has not started in {START_SECONDS:g} s"
            )
        if self._failure is not None:
            raise LocalError(f"the tunnel endpoint cannot be started: {self._failure}")

    def _follow(self, counters: int) -> None:
        """Start the process and read its status lines. The kernel kills the process when the thread that
        forked it ends (PR_SET_PDEATHSIG): this thread, which therefore runs as long as the process does.
        """
        try:
            self._run(counters)
        except OSError as error:
            self._failure = error
        except ValueError as error:  # a line that is not JSON: it was cut
            log.warning("the tunnel endpoint wrote a status that cannot be read: %s", error)
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _run(self, counters: int) -> None:
        with contextlib.ExitStack() as passed_on:
            passed_on.callback(os.close, counters)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            passed_on.callback(os.close, writer)
            with os.fdopen(reader, encoding="utf-8") as lines:
                process = self._start(writer, counters)
                passed_on.close()
                with self._changed:
                    self._process = process
                    self._changed.notify_all()
                    if self._given_up:
                        return
                for line in lines:
                    self._set_status(json.loads(line))
        process.wait()

    def _set_status(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    @property
    def status(self) -> dict[str, Any]:
        """The latest state that the endpoint reported; down once its process has ended."""
        with self._changed:
            if self._ended and (self._status["state"] == "up" or self._status["reason"] == STARTING):
                return {**self._status, "state": "down", "reason": "the tunnel endpoint has died"}
            return dict(self._status)

    @property
    def counts(self) -> tuple[PacketStats, PacketStats]:
        """Read the counters: packets from this endpoint's interface to the peer, and from the peer to it."""
        outward, inward = self._counters
        return outward.read(), inward.read()

    @property
    def alive(self) -> bool:
        """Whether the endpoint's process runs."""
        with self._changed:
            return not self._ended

    def wait_up(self, deadline: Deadline) -> dict[str, Any]:
        """Return the status once the link is up. Raises DeadlineExceeded, and LocalError if the process
        ended.
        """
        with self._changed:
            while self._status["state"] != "up" or self._ended:
                if self._ended:
                    raise LocalError(
                        f"the tunnel endpoint has ended: {self._status.get('reason', 'it was up')}"
                    )
                if deadline.passed:
                    raise DeadlineExceeded(f"the tunnel is not up: {self._status['reason']}")
                self._changed.wait(deadline.remaining())
            return dict(self._status)

    def stop(self) -> None:
        """End the process and its pumps; the interface goes with them. Further calls do nothing."""
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
    zygote: EndpointZygote | None = None,
    prepared: PreparedFork | None = None,
    confinement: Literal["required", "best-effort"] = "required",
) -> EndpointHandle:
    """Start an endpoint in this process's network namespace. Raises LocalError.

    ``role`` is ``host`` or ``device``; ``where`` tells the ``transport`` how to reach the peer, as for
    ``python -m millpond.tunnel``; ``interface`` and ``address`` (such as 10.77.0.1/30) are of its TUN
    interface, ``mtu`` is in bytes; ``peers`` is the network that the device may speak with, if that is more
    than the host; ``confinement`` "best-effort" runs where pumps cannot be confined too. Without a ``zygote``
    the endpoint is a program of its own, or ``prepared``; as a fork of a zygote it starts at once, and shares
    memory with the other forks.
    """
    arguments = [role, f"--{transport}", str(where), "--interface", interface, "--address", address]
    arguments += ["--mtu", str(mtu), "--name", name, *(["--peers", peers] if peers else [])]
    arguments += ["--confinement", confinement]
    if prepared:
        return EndpointHandle(functools.partial(_start_prepared, prepared, arguments))
    return EndpointHandle(functools.partial(zygote.start if zygote else _start_program, arguments))


def _start_prepared(prepared: PreparedFork, arguments: list[str], status: int, counters: int) -> Process:
    told = [*arguments, "--status-fd", str(status), "--counters-fd", str(counters)]
    return prepared.start("millpond.tunnel.__main__", told, [status, counters])


def _start_program(arguments: list[str], status: int, counters: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "millpond.tunnel", *arguments]
    argv += ["--status-fd", str(status), "--counters-fd", str(counters)]
    return subprocess.Popen(argv, pass_fds=(status, counters), stdin=subprocess.DEVNULL)
