# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): what a round costs its server: beside a plain server, and in memory."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

from bench.experiment import Run
from bench.rows import Row, summary
from millpond.linux.descriptors import allow_most

TITLE = "the server of a round"
VALUES, SMALL = 2_029_642, 100_000
EMULATION = "clients are threads of one process on the same machine, by TCP on loopback"
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Server:
    """What a server told: bytes when it was ``alone`` and when all were ``connected``, then by round."""

    alone: int
    connected: int
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    peak: int


def measure(run: Run) -> list[Row]:
    """Rows ``cpu_over_floor`` and ``memory_models``."""
    allow_most()
    ours, plain = [], []
    for _ in range(run.repeats):
        ours.append(serve("millpond", 10, VALUES))
        plain.append(serve("plain", 10, VALUES))
        for name, each in (("millpond", ours[-1]), ("plain", plain[-1])):
            run.say(f"10 clients, {name}: {median(each.cpu):.3f} s CPU, {median(each.seconds):.3f} s a round")
    rows = [
        _ratio(
            "cpu_over_floor",
            "server's processor time of a round",
            [a.cpu for a in ours],
            [b.cpu for b in plain],
        ),
        _ratio(
            "wall_over_floor", "seconds of a round", [a.seconds for a in ours], [b.seconds for b in plain]
        ),
    ]
    measured = {(10, VALUES): ours, (100, 10 * SMALL): [], (1000, SMALL): []}
    for (count, size), servers in measured.items():
        if count > 10 and not (run.quick and count > 100):
            servers += [serve("millpond", count, size) for _ in range(run.repeats)]
    return [*rows, *_memory(run, measured)]


def _ratio(figure: str, what: str, ours: list[tuple[float, ...]], plain: list[tuple[float, ...]]) -> Row:
    about = f"{what}, 10 clients x {VALUES} float32, both ways"
    ratios = [median(a) / median(b) for a, b in zip(ours, plain, strict=True)]
    return summary(
        figure, about, ratios, "x", peer="a select server that adds with numpy", emulation=EMULATION
    )


def _memory(run: Run, measured: Mapping[tuple[int, int], Sequence[Server]]) -> list[Row]:
    """Return the worst figure above the server with its clients connected, and all of both kinds."""
    found: dict[tuple[int, str], list[float]] = {}
    for (count, size), servers in measured.items():
        for server in servers:
            for idle, before in (("connected", server.connected), ("alone", server.alone)):
                found.setdefault((count, idle), []).append((server.peak - before) / (4 * size))
    for (count, idle), values in found.items():
        run.say(f"{count} clients: {median(values):.2f} models above the server that is idle, {idle}")
    worst = max((key for key in found if key[1] == "connected"), key=lambda key: median(found[key]))
    about = "peak memory of a round above the idle server"
    rows = [_models("memory_models", f"{about} with all clients connected; worst: {worst[0]}", found[worst])]
    return rows + [
        _models(f"memory_models.{count}.{idle}", f"{about}, {idle}, {count} clients", values)
        for (count, idle), values in found.items()
    ]


def _models(figure: str, what: str, values: Sequence[float]) -> Row:
    return summary(figure, what, values, "models", emulation=EMULATION)


def serve(
    kind: str, count: int, size: int, threads: int = 0, rounds: int = _ROUNDS, late: float = 0.0
) -> Server:
    """Run a server and its clients, of which the first answers ``late`` by so many seconds. Raises
    RuntimeError if the mean is wrong.
    """
    with ExitStack() as undo:
        pairs = [undo.enter_context(connected()) for _ in range(count)]
        near, far = ([end.fileno() for end in ends] for ends in zip(*pairs, strict=True))
        module = (
            "bench.train.simulated_devices"
            if kind in ("millpond", "staged")
            else "bench.aggregate.plain_clients"
        )
        arguments = [str(size), *map(str, far)]
        if late:
            module, arguments = "bench.aggregate.late_clients", [str(size), str(late), *map(str, far)]
        clients = subprocess.Popen([sys.executable, "-m", module, *arguments], pass_fds=far)
        undo.callback(clients.wait)
        undo.callback(clients.kill)
        server = [sys.executable, "-m", "bench.aggregate.server", kind, str(size), str(rounds), str(threads)]
        done = subprocess.run([*server, *map(str, near)], pass_fds=near, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    first, *told = map(json.loads, done.stdout.splitlines())
    if len(told) != rounds or not told[-1]["first"]:
        raise RuntimeError("the server has not summed the clients' vectors")
    return Server(
        first["alone"],
        first["connected"],
        tuple(each["seconds"] for each in told[1:]),
        tuple(each["cpu"] for each in told[1:]),
        max(each["peak"] for each in told),
    )


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far
