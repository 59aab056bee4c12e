# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): rounds whose updates are masked, beside those of the same job without masks.

Updates are of 2,029,642 values. Workers do not train, so a round is what it costs to move, mask and add them.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from safetensors.numpy import load_file

from bench.experiment import Experiment, Run
from bench.fleets import IDLE_MODEL, running, trained
from bench.privacy import masked_exchanges
from bench.rows import Row, ratios, summary
from system.support import Emulation

DEVICES = tuple(f"csd{number}" for number in range(8))
TITLE = "Masked rounds of 8 devices over plain ones, 2,029,642 values"
CASES = {"masked_over_plain": 32, "masked_over_plain_64": 64}
"""The figures and their ``sum_bits``."""
FIGURES = (*CASES, "masked_bits_equal", "setup_36_s", "dropouts")
EMULATION = "8 devices are process trees of one machine, and share its processors with the host"
_ROUNDS, _QUICK_ROUNDS = 24, 8
_FIRST = 3
"""Rounds before those that count: buffers grow, processes load what they need."""
_JOB = """\
name = "{name}"
seed = 3

[data]
private = "private/digits"

[model]
factory = "idle:Idle"
files = ["idle.py"]

[train]
batch = 65536
momentum = 0.0

[federated]
rounds = {rounds}
quorum = 1.0
secure = "{secure}"
sum_bits = {bits}

[limits]
clip = 0.05

[evaluate]
on = []
"""


def measure(run: Run) -> list[Row]:
    """Rows of FIGURES: alternate jobs whose updates are masked and jobs without masks."""
    return [*_rounds(run), *masked_exchanges.measure(run)]


def _rounds(run: Run) -> list[Row]:
    seconds: dict[tuple[str, str], list[float]] = {
        (case, secure): [] for case in CASES for secure in ("", "cohort")
    }
    equal = list[float]()
    with running(DEVICES, searched=False) as fleet:
        for repeat in range(run.repeats):
            models = {case: set[bytes]() for case in CASES}
            for (case, secure), found in seconds.items():
                each, model = _round(fleet, case, secure, _QUICK_ROUNDS if run.quick else _ROUNDS)
                found.append(each)
                models[case].add(model)
                run.say(f"{repeat + 1}: {case}, {secure or 'plain'}: a round {each:.3f} s")
            equal.append(float(all(len(each) == 1 for each in models.values())))
    rows = [
        summary(
            figure,
            f"seconds of a round with masks over one without, sum_bits = {bits}, workers that do not train",
            ratios(seconds[figure, "cohort"], seconds[figure, ""]),
            "x",
            peer="the same job without federated.secure",
        )
        for figure, bits in CASES.items()
    ]
    for (case, secure), found in seconds.items():
        name = f"{case}.{'masked' if secure else 'plain'}"
        rows.append(summary(name, f"seconds of such a round, sum_bits = {CASES[case]}", found, "s"))
    what = "1 if the models with masks and without have the same bits, in a star"
    rows.append(summary("masked_bits_equal", what, equal, ""))
    return [replace(row, emulation=EMULATION) for row in rows]


def _round(fleet: Emulation, case: str, secure: str, rounds: int) -> tuple[float, bytes]:
    """Return the seconds of one of a job's ``rounds``, and the values of its model."""
    name = f"{case}-{secure or 'plain'}"
    text = _JOB.format(name=name, rounds=rounds, secure=secure, bits=CASES[case])
    found = trained(fleet, name, {"idle.py": IDLE_MODEL, "job.toml": text}, DEVICES)
    number = max(int(each.name) for each in (fleet.directory / "jobs").iterdir() if each.name.isdigit())
    tensors = load_file(fleet.directory / "jobs" / str(number) / "model.safetensors")
    values = b"".join(each.tobytes() for _, each in sorted(tensors.items()))
    return median(each.seconds for each in found[_FIRST:]), values


EXPERIMENT = Experiment("masked", TITLE, measure, figures=FIGURES)
