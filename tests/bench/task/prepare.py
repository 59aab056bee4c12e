# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): measures how long a job takes to its first round, over the import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from bench.experiment import Run
from bench.fleets import running
from bench.rows import Row, ratios, summary
from system.support import MILLPOND, Emulation

DEVICES = ("csd0", "csd1", "csd2")
TITLE = "From 'millpond train' to the first round, over the import of torch"
_JOB = """\
name = "digits"

[data]
private = "private/digits"
public = "public/digits"
test = "{test}"

[model]
factory = "millpond.train.zoo.models:digits_cnn"

[federated]
rounds = 2
quorum = 1.0
"""
_PEER = 'python -c "import torch" from its start to its end, its files cached'
_WHAT = (
    "from the start of the process 'millpond train job.toml' until it shows the first round; the demo's CNN "
    f"and data on {len(DEVICES)} devices and the host, all in the round; second job and later ones"
)
_EMULATION = "a host and three emulated devices on one machine's processors; agents and processes are real"


def measure(run: Run) -> list[Row]:
    """Rows ``prepare_over_import``, ``prepare_s``, ``import_s``, and ``prepare_first_s``."""
    ours, peers, first = [], [], []
    with running(DEVICES, searched=False) as fleet:
        _import()
        first.append(_first_round(fleet))
        for _ in range(2 if run.quick else 2 * run.repeats):
            peers.append(_import())
            ours.append(_first_round(fleet))
            run.say(f"first round after {ours[-1]:.2f} s, torch imported in {peers[-1]:.2f} s")
    return [
        summary("prepare_over_import", _WHAT, ratios(ours, peers), "x", peer=_PEER, emulation=_EMULATION),
        summary("prepare_s", _WHAT, ours, "s", emulation=_EMULATION),
        summary("import_s", _PEER, peers, "s"),
        summary("prepare_first_s", "the fleet's first job", first, "s", emulation=_EMULATION),
    ]


def _import() -> float:
    """Seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def _first_round(fleet: Emulation) -> float:
    """Seconds. Raises RuntimeError if there is no first round with all workers."""
    path = fleet.base / "prepared.toml"
    path.write_text(_JOB.format(test=fleet.base / "test"))
    argv = [*MILLPOND, "train", "--fleet", str(fleet.directory), str(path)]
    began, shown = time.perf_counter(), None
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as command:
        assert command.stdout
        lines = []
        for line in command.stdout:
            if shown is None and re.match(r"\s*1\s", line):
                shown = time.perf_counter() - began
            lines.append(line)
    if command.returncode or shown is None:
        raise RuntimeError("".join(lines))
    return shown
