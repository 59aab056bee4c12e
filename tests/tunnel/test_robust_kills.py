# SPDX-License-Identifier: Apache-2.0
"""Ends and pumps are killed at random moments under load, 240 times in a full run: no connection loses or
changes a byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..effort import scaled
from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, Pair, each_with_each

STREAMS = Path(__file__).with_name("robust_streams.py")
TUNNELS, KILLS = scaled((1, 3), (2, 25))
"""At once in a test, and of each tunnel's ends; a full run has four tests."""
PUMP_KILLS = scaled(1, 5)
SURVIVED = scaled(2, 3)
"""Kills that at least one connection lived through."""
SECONDS_TO_LINK_UP = 5.0
"""Generous, for a machine that does other things; the figures are printed, a second is meant."""
LOAD = 200_000
SOON = 0.5
PATIENCE = 180.0
"""Seconds for the streams' end, more than one may stand still (``robust_streams.STALLED``)."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed; ``seconds`` from the start of its successor until the link was up again."""

    victim: str
    at: float
    seconds: float


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
        self._pending: list[tuple[str, float, float]] = []
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
        killed = time.monotonic()
        os.kill(end.process.pid, signal.SIGKILL)
        end.close()
        started = time.monotonic()
        self.ends[role] = self.sides[role].end(role, self.pair.socket)
        self._pending.append((role, killed, started))

    def kill_pump(self) -> None:
        """Kill one of the four."""
        role = self._random.choice(("host", "device"))
        pump = self._random.choice(self.ends[role].pumps())
        killed = time.monotonic()
        os.kill(pump, signal.SIGKILL)
        self._pending.append((f"{role}'s pump", killed, killed))

    def wait_up(self) -> None:
        """Until both ends say that the same, new link is up."""
        host, device = self.ends["host"], self.ends["device"]

        def both_up() -> bool:
            states = (host.status, device.status)
            new = [state["state"] == "up" and state["generation"] > self.generation for state in states]
            return all(new) and states[0]["generation"] == states[1]["generation"]

        eventually(both_up, "the link is up again", 4 * SECONDS_TO_LINK_UP)
        self.generation = host.status["generation"]
        up = max(end.up_at(self.generation) for end in (host, device))
        *hurried, (victim, at, started) = self._pending
        self.kills += [Kill(f"{victim} (no link yet)", at, 0.0) for victim, at, _ in hurried]
        self.kills.append(Kill(victim, at, up - started))
        self._pending.clear()

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


@pytest.mark.serial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engines", each_with_each(), indirect=True)
def test_no_kill_harms_a_stream(
    undo: ExitStack, tmp_path: Path, tun_works: None, engines: tuple[str, str], record_property: Any
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    tunnels = [Tunnel(undo, tmp_path / f"csd{n}.sock", engines, seed + n) for n in range(TUNNELS)]
    for turn in range(KILLS):
        for tunnel in tunnels:
            tunnel.wait_for_load()
            tunnel.kill_end()
        for tunnel in tunnels:
            tunnel.wait_up()
            if turn % (KILLS // PUMP_KILLS) == 0:
                tunnel.kill_pump()
                tunnel.wait_up()
    for number, tunnel in enumerate(tunnels):
        streams = tunnel.finish()
        report = _report(tunnel, streams)
        print(report)
        record_property(f"tunnel {number}", report)


def _report(tunnel: Tunnel, streams: list[dict[str, Any]]) -> str:
    """Check what one tunnel went through, and tell it."""
    victims = Counter(kill.victim.split()[0] for kill in tunnel.kills)
    assert victims["host"] + victims["device"] >= KILLS
    ends = sorted(kill.seconds for kill in tunnel.kills if kill.victim in ("host", "device"))
    pumps = sorted(kill.seconds for kill in tunnel.kills if kill.victim.endswith("pump"))
    assert ends[-1] < SECONDS_TO_LINK_UP and pumps[-1] < SECONDS_TO_LINK_UP
    survived = sorted(
        sum(stream["began"] < kill.at < stream["ended"] for kill in tunnel.kills) for stream in streams
    )
    assert survived[-1] >= SURVIVED, "no connection lived through several kills"
    moved = sum(stream["sent"][0] + stream["received"][0] for stream in streams)
    silence = max(stream["silence"] for stream in streams)
    return (
        f"{dict(victims)}; link up after {statistics.median(ends):.2f} s, at most {ends[-1]:.2f} s, after a "
        f"pump's death {statistics.median(pumps):.2f} s, at most {pumps[-1]:.2f} s; {len(streams)} streams, "
        f"{moved / 1e6:.0f} MB, through {survived} kills, silent for at most {silence:.0f} s"
    )
