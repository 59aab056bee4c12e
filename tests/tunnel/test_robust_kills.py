# SPDX-License-Identifier: Apache-2.0
"""Ends and pumps are killed at random moments under load: no connection loses or changes a byte."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millpond.tunnel.datapath import native

from ..effort import scaled
from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, Pair, each_with_each

STREAMS = Path(__file__).with_name("robust_streams.py")
KILLS, PUMP_KILLS = scaled((3, 1), (15, 5))
"""Of each tunnel's ends and pumps; a full run has four tunnels."""
SURVIVED = scaled(2, 3)
"""Kills that at least one connection lived through."""
SECONDS_TO_LINK_UP = 60.0
LOAD = 200_000
SOON = 0.25
PATIENCE = 180.0
"""Seconds for the streams' end, more than one may stand still (``robust_streams.STALLED``)."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and when."""

    victim: str
    at: float


class Tunnel:
    """One tunnel with streams over it, its ends being killed."""

    def __init__(self, undo: ExitStack, socket: Path, engines: tuple[str, str], seed: int) -> None:
        self._random = random.Random(seed)
        self.pair = Pair(undo, socket, *engines)
        host, device = self.pair.start()
        self.ends = {"host": host, "device": device}
        self.sides = {"host": self.pair.host_side, "device": self.pair.device_side}
        self.generation = host.status["generation"]
        self.kills: list[Kill] = []
        program = [sys.executable, str(STREAMS)]
        self._server = self.pair.device_side.program(*program, "serve", DEVICE_ADDRESS)
        self._server.says("listening")
        self._client = self.pair.host_side.program(*program, "call", DEVICE_ADDRESS, str(seed))

    def kill_end(self) -> None:
        """Kill one and start its successor; now and then kill that too, mostly before the link is up. The
        other lives on: it is who remembers the generation.
        """
        role = self._random.choice(("host", "device"))
        self._replace(role)
        if self._random.random() < 0.2:
            time.sleep(self._random.uniform(0, SOON))
            self._replace(role)

    def _replace(self, role: str) -> None:
        end = self.ends[role]
        self.kills.append(Kill(role, time.monotonic()))
        os.kill(end.process.pid, signal.SIGKILL)
        end.close()
        self.ends[role] = self.sides[role].end(role, self.pair.socket)

    def kill_pump(self) -> None:
        """Kill one of the four."""
        role = self._random.choice(("host", "device"))
        self.kills.append(Kill(f"{role}'s pump", time.monotonic()))
        os.kill(self._random.choice(self.ends[role].pumps()), signal.SIGKILL)

    def wait_up(self) -> None:
        """Until both ends say that the same, new link is up."""
        host, device = self.ends["host"], self.ends["device"]

        def both_up() -> bool:
            states = (host.status, device.status)
            new = [state["state"] == "up" and state["generation"] > self.generation for state in states]
            return all(new) and states[0]["generation"] == states[1]["generation"]

        eventually(both_up, "the link is up again", SECONDS_TO_LINK_UP)
        self.generation = host.status["generation"]

    def wait_for_load(self) -> None:
        """Until bytes cross both ways; then a random moment."""
        before = {role: side.counters() for role, side in self.sides.items()}

        def loaded() -> bool:
            assert self._client.process.poll() is None, self._client.errors
            counters = (side.counters() for side in self.sides.values())
            pairs = zip(counters, before.values(), strict=True)
            return all(
                now - then > LOAD for found, base in pairs for now, then in zip(found, base, strict=True)
            )

        eventually(loaded, "streams go on", 60)
        time.sleep(self._random.uniform(0, SOON))

    def finish(self) -> list[dict[str, Any]]:
        """End the streams; what the caller said of each."""
        self._client.process.send_signal(signal.SIGTERM)
        self._client.result(PATIENCE)
        self._server.process.send_signal(signal.SIGTERM)
        self._server.result(60)
        called = [json.loads(line) for line in self._client.lines]
        answered = {found["number"]: found for found in map(json.loads, self._server.lines[1:])}
        for stream in called:
            other = answered.pop(stream["number"])
            whole = stream["sent"] == other["received"] and stream["received"] == other["sent"]
            assert whole, self._story(stream, other)
            assert stream["sent"][0] > 0 and stream["received"][0] > 0
        assert not answered
        return called

    def _story(self, stream: dict[str, Any], other: dict[str, Any]) -> str:
        """Tell what a stream that was harmed went through."""
        kills = [kill for kill in self.kills if stream["began"] < kill.at < stream["ended"]]
        ends = [end.story for end in self.ends.values()]
        return f"the caller's {stream}, the server's {other}, through {kills}; {ends}"


@pytest.mark.timeout(600)
def test_no_kill_harms_a_stream(undo: ExitStack, tmp_path: Path, tun_works: None) -> None:
    """One tunnel for each pair of engines, all at once."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    pairs = [pair.split("-") for pair in each_with_each()]
    if native.resolve("auto") != "c":
        pairs = [pair for pair in pairs if "c" not in pair]
    tunnels = [
        Tunnel(undo, tmp_path / f"{host}-{device}.sock", (host, device), seed + number)
        for number, (host, device) in enumerate(pairs)
    ]
    for turn in range(KILLS):
        for tunnel in tunnels:
            tunnel.wait_for_load()
            tunnel.kill_end()
        for tunnel in tunnels:
            tunnel.wait_up()
            if turn % (KILLS // PUMP_KILLS) == 0:
                tunnel.kill_pump()
                tunnel.wait_up()
    for tunnel in tunnels:
        survived = [
            sum(stream["began"] < kill.at < stream["ended"] for kill in tunnel.kills)
            for stream in tunnel.finish()
        ]
        assert max(survived) >= SURVIVED, "no connection lived through several kills"
