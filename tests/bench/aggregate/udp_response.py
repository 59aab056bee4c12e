# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): rounds one after the other between processes of a LAN, and their response times."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregate.udp.fake_link import open_socket
from bench.aggregate.lan import Lan, address
from bench.aggregate.udp_peers import TcpServer, Vector, tcp_exchange
from millpond.aggregate.udp.aggregator import ClientHead
from millpond.aggregate.udp.datagrams import KEY_SIZE, VectorPlan
from millpond.aggregate.udp.exchange import aggregate, exchange
from millpond.base.deadline import Deadline

KINDS = ("udp", "udp-lossy", "tcp", "tcp-pipelined")
PORT = 7000
_SECONDS = 120.0
_Word = dict[str, Any]


def _key_of(client: int) -> bytes:
    return bytes([client + 1]) * KEY_SIZE


@dataclass(frozen=True, slots=True)
class Setting:
    """Of all rounds: clients, and the size of a vector."""

    clients: int
    size: int

    def vector(self, client: int) -> Vector:
        """Return a client's vector."""
        return np.random.default_rng(client).standard_normal(self.size, dtype=np.float32)

    @property
    def largest(self) -> float:
        """The bound of all values."""
        return 16.0

    def plan(self, kind: str, number: int) -> VectorPlan:
        """Return the plan of a round by UDP."""
        return VectorPlan(number, self.size, repair=kind != "udp-lossy")


@dataclass(frozen=True, slots=True)
class Response:
    """Seconds from the start of a round to the mean at the last client, CPU seconds of the server and of all
    clients, and the digests of the clients' means.
    """

    seconds: float
    server_cpu: float
    client_cpu: float
    digests: tuple[float, ...]


class Team:
    """A server and clients, processes that wait for rounds."""

    def __init__(self, lan: Lan, setting: Setting, roles: list[socket.socket]) -> None:
        self._lan, self._setting, self._roles, self._round = lan, setting, roles, 0

    def round(self, kind: str) -> Response:
        """Do one."""
        self._round += 1
        word = json.dumps({"kind": kind, "round": self._round}).encode()
        began = time.monotonic()
        for each in self._roles:
            each.send(word)
        server, *clients = (json.loads(each.recv(4096)) for each in self._roles)
        if failed := [each["error"] for each in (server, *clients) if "error" in each]:
            raise RuntimeError("; ".join(failed))
        seconds = max(each["at"] for each in clients) - began
        cpu = sum(each["cpu"] for each in clients)
        return Response(seconds, server["cpu"], cpu, tuple(each["digest"] for each in clients))


@contextmanager
def team(lan: Lan, setting: Setting) -> Iterator[Team]:
    """Start a server at the first node and a client at each other one."""
    roles, processes = [], []
    try:
        for number in range(setting.clients + 1):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sys.stdout.flush()
            process = os.fork()
            if not process:
                near.close()
                _live(lan, setting, number, far)
            far.close()
            roles.append(near)
            processes.append(process)
            near.settimeout(_SECONDS)
            near.recv(100)
        yield Team(lan, setting, roles)
    finally:
        for each in roles:
            each.close()
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _live(lan: Lan, setting: Setting, number: int, channel: socket.socket) -> None:
    """Run a role until its channel ends; never returns."""
    try:
        with lan.nodes[number].entered():
            run = _server(setting, channel) if not number else _client(setting, number - 1, channel)
            while text := channel.recv(4096):
                word = json.loads(text)
                cpu = time.process_time()
                try:
                    answer = run(word["kind"], word["round"])
                except Exception as error:  # noqa: BLE001 - the parent says it
                    answer = {"error": f"{number}: {error!r}"}
                answer.setdefault("at", time.monotonic())
                channel.send(json.dumps(answer | {"cpu": time.process_time() - cpu}).encode())
    except BaseException:  # noqa: BLE001 - a fork of a benchmark must end here
        traceback.print_exc()
    os._exit(0)


def _server(setting: Setting, channel: socket.socket) -> Callable[[str, int], _Word]:
    datagrams = open_socket((address(0), PORT))
    heads = [ClientHead(_key_of(client), 1.0, setting.largest) for client in range(setting.clients)]
    found: list[TcpServer] = []
    with socket.create_server((address(0), PORT), backlog=64) as listener:
        channel.send(b"ready")
        kept = listener.dup()

    def run(kind: str, number: int) -> _Word:
        if kind.startswith("udp"):
            aggregate(datagrams, setting.plan(kind, number), heads)
            return {}
        if not found:
            connections = [kept.accept()[0] for _ in range(setting.clients)]
            found.append(TcpServer(connections, setting.size, setting.largest))
        found[0].round(pipelined=kind == "tcp-pipelined")
        return {}

    return run


def _client(setting: Setting, client: int, channel: socket.socket) -> Callable[[str, int], _Word]:
    datagrams, values = open_socket((address(client + 1), 0)), setting.vector(client)
    connection = socket.create_connection((address(0), PORT))
    key, hub = _key_of(client), (address(0), PORT)
    channel.send(b"ready")

    def run(kind: str, number: int) -> _Word:
        if kind.startswith("udp"):
            plan, deadline = setting.plan(kind, number), Deadline.after(_SECONDS / 2)
            mean = exchange(datagrams, hub, plan, client, key, values, deadline=deadline).mean
        else:
            mean = tcp_exchange(connection, values)
        at = time.monotonic()
        return {"at": at, "digest": float(mean.astype(np.float64).sum())}

    return run
