# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): figures 6 and 7: response, receiving and computing of six servers, and what stands for
the paper's polling and its threads on cores of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from bench.experiment import Line, Panel, Role, Run
from bench.papers.dpu_server.library import BUSY_POLL, LOCKED, MILLPOND, PINNED, SPINS, UDP, Vector
from bench.papers.dpu_server.rounds import CLIENTS, DPU, SERVERS, WHOLE, Design, Timing, exact, rounds
from bench.papers.exhibit import Shown, Value, measured

SIZE, QUICK_SIZE = 2_029_642, 200_000
_ROUNDS = 5
"""Rounds of each server in a repeat; all servers take turns."""
WRONG = 1e-5
"""How far a value of a mean may be from the exact one: a lost addition changes nearly any value by more."""
_MOST_WRONG = 0.9
"""The share of values with lost additions beyond which a round of racing threads has gone wrong otherwise."""
EMULATION = (
    f"the server is a process with a whole core, or {DPU} of one for the DPU (cgroup quota, 10 ms periods); "
    f"{CLIENTS} clients are threads beside it, on the same cores; loopback, datagrams of the paper's frame; "
    "receive buffers that hold a round stand for the card's queues; by TCP no thread adds before all vectors "
    "have come"
)
_SHARES = {WHOLE: "whole core", DPU: f"{DPU} of a core"}
_EXACT, _SLEEPS = "millpond: exact sums, tags, repair", "threads that sleep"
_VARIANTS = {"threads that spin": SPINS, "threads with SO_BUSY_POLL": BUSY_POLL, "pinned threads": PINNED}
_DESIGNS = (
    *SERVERS,
    *(
        Design(0, f"{name}, {where}", share, UDP | how)
        for share, where in _SHARES.items()
        for name, how in {_EXACT: MILLPOND, _SLEEPS: 0, **_VARIANTS}.items()
    ),
)
_PAPER = {1: 1.39, 3: 3.93, 5: 3.93 / 1.25, 6: 1.0}
"""Responses over that of server 6, by the ratios in the paper's section 5.2."""
Timings = dict[str, list[Timing]]


@functools.cache
def timings(run: Run) -> Timings:
    """Return the rounds of each design, by label; both figures show parts of them."""
    found: Timings = {design.label: [] for design in _DESIGNS}
    size, count = (QUICK_SIZE, 2) if run.quick else (SIZE, _ROUNDS * run.repeats)
    with rounds(size, WHOLE) as whole, rounds(size, DPU) as part:
        for number in range(count + 1):
            for design in _DESIGNS:
                server = whole if design.share == WHOLE else part
                timing = server.run(design.how)
                _check(server.vectors, server.means, design)
                if number:  # memory was touched, and connections have warmed up
                    found[design.label].append(timing)
    for label, times in found.items():
        run.say(f"{label}: {np.median([each.response for each in times]):.3f} s")
    return found


def _check(vectors: Vector, means: Vector, design: Design) -> None:
    """Raise RuntimeError unless the clients have the mean, up to additions that racing threads lost."""
    wrong = float((np.abs(means[0] - exact(vectors)) > WRONG).mean())
    if wrong > (0 if design.how & (LOCKED | MILLPOND) else _MOST_WRONG):
        raise RuntimeError(f"{design.label}: {wrong:.1%} of the mean is wrong")


def _seconds(found: Timings, part: str) -> dict[int, list[float]]:
    """Return the seconds of a part of a round, by the paper's number of the server."""
    return {each.number: [getattr(timing, part) for timing in found[each.label]] for each in SERVERS}


def _ratio(what: str, paper: float | None, over: Sequence[float], under: Sequence[float]) -> Value:
    return measured(what, "x", paper, [a / b for a, b in zip(over, under, strict=True)])


def measure_response(run: Run) -> Shown:
    """Figure 6: the time from START to END at the client."""
    found = timings(run)
    seconds = _seconds(found, "response")
    rows = [
        measured(f"({each.number}) {each.label}", "ms", None, [1e3 * s for s in seconds[each.number]])
        for each in SERVERS
    ]
    for over, under, what, paper in (
        (3, 5, "TCP over UDP, both atomic", 1.25),
        (3, 6, "TCP, atomic over UDP, racing", 3.93),
        (1, 6, "the CPU's server over the paper's proposal", 1.39),
    ):
        rows.append(_ratio(f"({over}) over ({under}): {what}", paper, seconds[over], seconds[under]))
    for where in _SHARES.values():
        times = [1e3 * timing.response for timing in found[f"{_EXACT}, {where}"]]
        rows.append(measured(f"{_EXACT}, {where}", "ms", None, times))
    difference = (
        "The paper prints its bars without numbers, and three ratios. Its servers (5) and (6) have DPDK, for "
        "which the kernel's UDP stands here, "
        "and loopback costs TCP next to nothing."
    )
    return Shown(tuple(rows), EMULATION, difference, _response_panels(seconds))


def _response_panels(seconds: dict[int, list[float]]) -> tuple[Panel, ...]:
    numbers = list(seconds)
    ours = [1e3 * float(np.median(seconds[number])) for number in numbers]
    relative = [each / ours[-1] for each in ours]
    both = (
        Line("paper", "paper, by its text", list(_PAPER), list(_PAPER.values()), marks=True),
        Line("millpond", "here", numbers, relative, marks=True),
    )
    own = (Line("millpond", "here", numbers, ours, marks=True),)
    return (
        Panel("Fig. 6: response time", "server", "ms", own),
        Panel("response over that of server 6", "server", "x", both),
    )


def measure_parts(run: Run) -> Shown:
    """Figure 7: the server's time until all has come, and from there until the mean is there."""
    found = timings(run)
    receive, compute = _seconds(found, "receive"), _seconds(found, "compute")
    rows = []
    for each in SERVERS:
        for name, times in (("receive", receive), ("compute", compute)):
            values = [1e3 * seconds for seconds in times[each.number]]
            rows.append(measured(f"({each.number}) {each.label}: {name}", "ms", None, values))
    rows += [
        _ratio("compute of (3) over (4): atomic over racing", 6.66, compute[3], compute[4]),
        _ratio("receive of (3) over (5): TCP over UDP", 1.65, receive[3], receive[5]),
        _ratio("compute of (3) over (5): TCP over UDP", 1.09, compute[3], compute[5]),
        *_shares_had(found),
        *_variants(found),
    ]
    difference = (
        "By UDP each thread adds what comes at once, so the additions are in the receiving time, and the "
        "division alone is left; the paper's workers have most of the additions left then."
    )
    lines = (_line("peer", "receive", receive), _line("millpond", "compute", compute))
    panel = Panel("Fig. 7: time at the server", "server", "ms", lines)
    return Shown(tuple(rows), EMULATION, difference, (panel,))


def _shares_had(found: Timings) -> list[Value]:
    """Return how much of a core servers had: where that is less than their limit, the limit was not felt."""
    rows = []
    for each in SERVERS:
        shares = [timing.cpu / timing.response for timing in found[each.label]]
        rows.append(
            measured(f"({each.number}) {each.label}: cores used, of {each.share:g}", "", None, shares)
        )
    return rows


def _line(role: Role, name: str, seconds: dict[int, list[float]]) -> Line:
    medians = [1e3 * float(np.median(values)) for values in seconds.values()]
    return Line(role, name, list(seconds), medians, marks=True)


def _variants(found: Timings) -> list[Value]:
    """Return the response of UDP servers that poll, or are pinned, over that of one whose threads sleep."""
    rows = []
    for where in _SHARES.values():
        usual = [timing.response for timing in found[f"{_SLEEPS}, {where}"]]
        for name in _VARIANTS:
            other = [timing.response for timing in found[f"{name}, {where}"]]
            about = f"response by UDP, racing, {where}: {name} over {_SLEEPS}"
            rows.append(_ratio(about, None, other, usual))
    return rows
