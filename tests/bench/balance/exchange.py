# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): measures a step's exchange against gloo's all_reduce over the same tunnels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.experiment import Experiment, Run
from bench.fleets import running, trained
from bench.rows import Row, ratios, summary
from system.support import Emulation, millpond

VALUES = 3_504_872
"""Those of MobileNetV2."""
DEVICES = ("csd0", "csd1", "csd2")
_PART = 0.85
"""Part of the exchanges that every worker has: the last ones have the samples of some alone."""
_MODEL = """\
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.used = nn.Parameter(torch.zeros(10))
        self.sent = nn.Parameter(torch.zeros(values - 10))

    def forward(self, images):
        return images.flatten(1)[:, :10] * self.used
"""
_JOB = """\
name = "exchange"

[data]
private = "private/digits"
public = "public/digits"
test = "{test}"

[model]
factory = "wide:Wide"
files = ["wide.py"]
arguments = {{ values = {values} }}

[train]
momentum = 0.0

[synchronous]
epochs = 2
steps = {steps}
policy = "fixed"
patience = 0
"""
_GLOO = """\
import sys
import time
from statistics import median

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
vector, seconds = torch.ones(int(sys.argv[1])), []
for _ in range(int(sys.argv[2])):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(vector)
    seconds.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print("median", 1000 * median(seconds[3:]))
dist.destroy_process_group()
"""


def measure(run: Run) -> list[Row]:
    """Row ``exchange_over_gloo``."""
    emulation = (
        f"a host and {len(DEVICES)} emulated devices on one machine's processors; tunnels, agents and "
        "processes are real"
    )
    what = (
        f"of {VALUES} values, no canaries: all of a step that is neither the slowest worker's nor the "
        "optimizer's time, median of an epoch; over the median all_reduce of as many"
    )
    peer = "gloo's all_reduce between the same workers, by millpond launch"
    ours, theirs = [], []
    with _all_take_part(run, searched=False) as fleet:
        for repeat in range(1 if run.quick else 7):
            theirs.append(_gloo(fleet, 12 if run.quick else 30))
            ours.append(_ours(fleet, repeat))
            run.say(f"exchange: {ours[-1]:.1f} ms, gloo {theirs[-1]:.1f} ms")
    rows = [
        summary("exchange_over_gloo", what, ratios(ours, theirs), "x", peer=peer, emulation=emulation),
        summary("exchange_ms", "a step's exchange", ours, "ms", emulation=emulation),
        summary("exchange_gloo_ms", "gloo's all_reduce", theirs, "ms", emulation=emulation),
    ]
    return rows if run.quick else [*rows, _searched(run, emulation)]


def _searched(run: Run, emulation: str) -> Row:
    """Row ``exchange_searched_ms``, of a fleet of its own."""
    found = []
    with _all_take_part(run, searched=True) as fleet:
        for repeat in range(3):
            found.append(_ours(fleet, repeat))
            run.say(f"exchange, searched for two patterns: {found[-1]:.1f} ms")
    what = "a step's exchange where agents search all that they send for a canary and a tracer"
    return summary("exchange_searched_ms", what, found, "ms", emulation=emulation)


class NotAll(RuntimeError):
    """A worker had no part in some exchanges."""


@contextmanager
def _all_take_part(run: Run, *, searched: bool) -> Iterator[Emulation]:
    """A fleet whose plan has a batch for every worker. What is measured of so little work is noise, by which
    one may sit out; an exchange of fewer is not what gloo does.
    """
    for last in (False, False, False, False, True):
        with running(DEVICES, searched=searched) as fleet:
            try:
                _ours(fleet, -1)
            except NotAll as error:
                run.say(f"another fleet: {error}")
                if last:
                    raise
                continue
            yield fleet
            return


EXPERIMENT = Experiment(
    "exchange",
    "A step's exchange over the tunnels, against gloo's",
    measure,
    figures=("exchange_over_gloo",),
)


def _gloo(fleet: Emulation, times: int) -> float:
    script = fleet.base / "all_reduce.py"
    script.write_text(_GLOO)
    argv: list[str | Path] = ["launch", "--fleet", fleet.directory, "--", script, str(VALUES), str(times)]
    result = _millpond(argv)
    return float(re.findall(r"median ([\d.]+)", result)[-1])


def _ours(fleet: Emulation, repeat: int) -> float:
    job = _JOB.format(test=fleet.base / "test", values=VALUES, steps=32)
    epochs = trained(fleet, f"job{repeat}", {"wide.py": _MODEL, "job.toml": job})
    taken = {name: own["exchanges"] for name, own in epochs[-1].by_worker.items()}
    if len(taken) < len(DEVICES) + 1 or min(taken.values()) < _PART * max(taken.values()):
        raise NotAll(f"exchanges by worker: {taken}")
    return float(epochs[-1].metrics["exchange_ms"])


def _millpond(argv: list[str | Path]) -> str:
    """What a command said. Raises RuntimeError if it failed."""
    result = millpond(*argv, timeout=300)
    if result.code:
        raise RuntimeError(f"{argv[0]} failed: {result.err or result.out}")
    return result.out
