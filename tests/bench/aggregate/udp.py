# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the UDP protocol against TCP on one shaped LAN: response times, and accuracy where
datagrams stay lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from bench.aggregate import udp_accuracy
from bench.aggregate.lan import lan
from bench.aggregate.udp_response import KINDS, Response, Setting, team
from bench.experiment import Run
from bench.rows import Row, summary

CLIENTS, SIZE = 10, 2_029_642
LOSSES = {"0": 0.0, "1": 0.01}
MBIT, GIGABIT = 250, 1000
LOST, SEEDS = 0.05, 3
TITLE = f"Response time by UDP and TCP, {CLIENTS} clients x {SIZE} float32, one shaped LAN"
ACCURACY_TITLE = f"Final accuracy with {LOST:.0%} of datagrams lost, {udp_accuracy.CLIENTS} clients"
_EMULATION = (
    "{} clients and a server in namespaces, a bridge between them, links of {} Mbit/s both ways by tc tbf, "
    "512 kB in a port of the switch, cubic; two cores for all of it"
)
_WHAT = {
    "udp": "with repair: all have the same bits",
    "udp-lossy": "without repair: what is lost stays lost",
}
_PEERS = {
    "tcp": "TCP, a plain server with one loop, which sends the mean when everything has come",
    "tcp-pipelined": "TCP, the same with parts of the mean sent while others come, as by UDP",
}


def measure(run: Run) -> list[Row]:
    """Rows ``udp_over_tcp_0`` and ``udp_over_tcp_1``, the same against TCP that sends parts of the mean
    early, without repair, and on a faster LAN; and the seconds of each kind.
    """
    rows: list[Row] = []
    for mbit in (MBIT,) if run.quick else (MBIT, GIGABIT):
        setting = Setting(3 if run.quick else CLIENTS, SIZE // 10 if run.quick else SIZE)
        with lan(setting.clients + 1, mbit) as network:
            for name, loss in LOSSES.items():
                network.lose(loss)
                with team(network, setting) as members:
                    members.round("tcp")  # connections and caches warm up
                    found: dict[str, list[Response]] = {kind: [] for kind in KINDS}
                    for _ in range(run.repeats):
                        for kind in KINDS:
                            found[kind].append(members.round(kind))
                told = ", ".join(f"{kind} {_median(found[kind]):.2f} s" for kind in KINDS)
                run.say(f"{mbit} Mbit/s, {loss:.0%} lost: {told}")
                _expect_one_mean(found)
                emulation = _EMULATION.format(setting.clients, mbit)
                suffix = name if mbit == MBIT else f"{name}_{mbit}"
                rows += _rows(found, suffix, f"{loss:.0%} of packets lost", emulation)
    return rows


def measure_accuracy(run: Run) -> list[Row]:
    """Row ``udp_accuracy_points``: points of accuracy that TCP has more, by seed; the median of seeds."""
    rounds, lossless, lossy, size = (4 if run.quick else udp_accuracy.ROUNDS), [], [], 0
    for seed in range(SEEDS):
        best, size = udp_accuracy.accuracy(seed, 0.0, rounds)
        other, _ = udp_accuracy.accuracy(seed, LOST, rounds)
        lossless.append(best)
        lossy.append(other)
        run.say(f"seed {seed}: {best:.2f} % without loss, {other:.2f} % with {LOST:.0%} lost")
    what = (
        f"FedAvg of {rounds} rounds, {size} values in datagrams of {udp_accuracy.VALUES}, {LOST:.0%} of them "
        "lost for good, both ways; final accuracy on 360 held-out images"
    )
    peer, emulation = "the exact mean, as TCP brings it", "both sides of the protocol in one process"
    points = [best - other for best, other in zip(lossless, lossy, strict=True)]
    return [
        summary(
            "udp_accuracy_points",
            f"points lost: {what}",
            points,
            "points",
            peer=peer,
            emulation=emulation,
        ),
        summary("udp_accuracy", what, lossy, "%", emulation=emulation),
        summary("tcp_accuracy", "the same without loss", lossless, "%", emulation=emulation),
    ]


def _rows(found: dict[str, list[Response]], suffix: str, circumstances: str, emulation: str) -> Iterator[Row]:
    for ours, what in _WHAT.items():
        for peer, described in _PEERS.items():
            ratios = [
                theirs.seconds / mine.seconds for theirs, mine in zip(found[peer], found[ours], strict=True)
            ]
            figure = f"{ours}_over_{peer}_{suffix}".replace("-", "_")
            said = f"response time by TCP over that by UDP {what}; {circumstances}"
            yield summary(figure, said, ratios, "x", peer=described, emulation=emulation)
    for kind, responses in found.items():
        name = kind.replace("-", "_")
        for figure, unit, values in (
            (f"{name}_seconds_{suffix}", "s", [each.seconds for each in responses]),
            (f"{name}_server_cpu_{suffix}", "s", [each.server_cpu for each in responses]),
        ):
            yield summary(figure, f"{kind}; {circumstances}", values, unit, emulation=emulation)


def _median(responses: list[Response]) -> float:
    return median(each.seconds for each in responses)


def _expect_one_mean(found: dict[str, list[Response]]) -> None:
    """Raise RuntimeError unless all clients of all rounds without losses that stay have had the same mean."""
    whole = [each for kind, responses in found.items() if kind != "udp-lossy" for each in responses]
    if len({digest for each in whole for digest in each.digests}) != 1:
        raise RuntimeError("clients have had different means")
