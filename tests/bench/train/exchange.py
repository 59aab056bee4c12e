# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): measures a round's exchange against plain sockets over the same tunnels."""

from __future__ import annotations

import re
from statistics import median

from bench.experiment import Run
from bench.fleets import IDLE_MODEL, running, trained
from bench.rows import Row, ratios, summary
from system.support import Emulation

VALUES = 2_029_642
"""Those of the zoo's cifar_cnn."""
DEVICES = ("csd0", "csd1", "csd2")
TITLE = "A round without training over the tunnels, against plain sockets"
_UNTIMED = 3  # first exchanges of each side, in which buffers and windows grow
_JOB = """\
name = "idle"

[data]
private = "private/digits"
test = "{test}"

[model]
factory = "idle:Idle"
files = ["idle.py"]

[train]
batch = 65536
momentum = 0.0

[federated]
rounds = {rounds}
quorum = 1.0
"""
_FLOOR = """\
import os
import socket
import sys
import threading
import time
from statistics import median

size, times, untimed = 4 * int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def receive(sock, buffer):
    left = memoryview(buffer)
    while left:
        count = sock.recv_into(left)
        if not count:
            raise SystemExit("the other end has gone")
        left = left[count:]


def connected():
    for _ in range(600):
        try:
            return socket.create_connection(address)
        except OSError:
            time.sleep(0.1)
    raise SystemExit("nobody listens")


def echo():
    with connected() as sock:
        buffer = bytearray(size)
        for _ in range(times):
            receive(sock, buffer)
            sock.sendall(buffer)


def exchange(sock, state, turn):
    update = bytearray(size)
    with sock:
        for _ in range(times):
            turn.wait()
            sock.sendall(state)
            receive(sock, update)
            turn.wait()


def run():
    with socket.create_server(("", address[1])) as server:
        socks = [server.accept()[0] for _ in range(1, world)]
    state, turn, seconds = bytes(size), threading.Barrier(world), []
    for sock in socks:
        threading.Thread(target=exchange, args=(sock, state, turn)).start()
    for _ in range(times):
        turn.wait()
        began = time.perf_counter()
        turn.wait()
        seconds.append(time.perf_counter() - began)
    print("median", 1000 * median(seconds[untimed:]))


run() if rank == 0 else echo()
"""
_EMULATION = (
    f"a host and {len(DEVICES)} emulated devices on one machine's processors; tunnels, agents and processes "
    "are real"
)
_PEER = "sendall of the state and recv_into of the update, a thread per device, to an echo in each device"
_WHAT = (
    f"a federated round of {VALUES} values: the state to all, its check, copy and search by each device "
    "(load, difference, largest, norm), one step of 10 of the values on all samples, the heads, all updates, "
    "their exact mean, its application by the parameter server; no score and no checkpoint. Median round "
    "of a job over the median loop"
)


def measure(run: Run) -> list[Row]:
    """Row ``round_over_floor``, and what it is made of."""
    times = 12 if run.quick else 40
    ours, floor, outside = [], [], []
    with running(DEVICES, searched=False) as fleet:
        for repeat in range(run.repeats):
            floor.append(_floor(fleet, times))
            whole, exchange = _ours(fleet, repeat, times)
            ours.append(whole)
            outside.append(exchange)
            run.say(f"round: {whole:.1f} ms, of which exchange {exchange:.1f}; floor {floor[-1]:.1f} ms")
    inside = "of which neither the slowest worker's pass over samples and values nor the optimizer's time"
    return [
        summary("round_over_floor", _WHAT, ratios(ours, floor), "x", peer=_PEER, emulation=_EMULATION),
        summary(
            "round_exchange_over_floor", inside, ratios(outside, floor), "x", peer=_PEER, emulation=_EMULATION
        ),
        summary("round_ms", "the round", ours, "ms", emulation=_EMULATION),
        summary("round_exchange_ms", inside, outside, "ms", emulation=_EMULATION),
        summary("round_floor_ms", "the loop", floor, "ms", emulation=_EMULATION),
    ]


def _floor(fleet: Emulation, times: int) -> float:
    """Milliseconds. Raises RuntimeError."""
    script = fleet.base / "floor.py"
    script.write_text(_FLOOR)
    counts = [str(count) for count in (VALUES, times, _UNTIMED)]
    result = fleet.millpond("launch", "--", script, *counts, timeout=300)
    if result.code:
        raise RuntimeError(f"the loop failed: {result.err or result.out}")
    return float(re.findall(r"median ([\d.]+)", result.out)[-1])


def _ours(fleet: Emulation, repeat: int, times: int) -> tuple[float, float]:
    """Milliseconds of a round, and those of its exchange alone. Raises RuntimeError."""
    job = _JOB.format(test=fleet.base / "test", rounds=times)
    rounds = trained(fleet, f"job{repeat}", {"idle.py": IDLE_MODEL, "job.toml": job}, DEVICES)
    timed = rounds[_UNTIMED:]
    whole = median(each.seconds for each in timed)
    return 1000 * whole, median(each.metrics["exchange_ms"] for each in timed)
