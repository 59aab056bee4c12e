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
CASES = {
    "masked_over_plain": ('"auto"', ""),
    "masked_over_plain_64": ("64", ""),
    "masked_over_plain_tree": ('"auto"', "tree"),
    "masked_over_plain_ring": ('"auto"', "ring"),
}
"""The figures, with their ``sum_bits`` and the topology in which devices add masked updates, "" for none."""
FIGURES = (*CASES, "masked_bits_equal", "setup_36_s", "dropouts", *masked_exchanges.COSTS)
EMULATION = "8 devices are process trees of one machine, and share its processors with the host"
_ROUNDS, _QUICK_ROUNDS = 24, 8
_FIRST = 3
"""Rounds before those that count: buffers grow, processes load what they need."""
_JOB = """\
{root}name = "{name}"
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


_Kind = tuple[str, str, str]
"""The ``sum_bits``, ``secure`` and the topology of a job."""


def _plain(case: str) -> _Kind:
    return CASES[case][0], "", ""


def _masked(case: str) -> _Kind:
    bits, shape = CASES[case]
    return bits, "cohort", shape


def _rounds(run: Run) -> list[Row]:
    kinds = dict.fromkeys(kind for case in CASES for kind in (_plain(case), _masked(case)))
    seconds: dict[_Kind, list[float]] = {kind: [] for kind in kinds}
    equal = list[float]()
    with running(DEVICES, searched=False) as fleet:
        for repeat in range(run.repeats):
            models = dict[_Kind, bytes]()
            for kind, found in seconds.items():
                each, models[kind] = _round(fleet, kind, _QUICK_ROUNDS if run.quick else _ROUNDS)
                found.append(each)
                run.say(f"{repeat + 1}: {', '.join(filter(None, kind))}: a round {each:.3f} s")
            equal.append(float(all(models[_plain(case)] == models[_masked(case)] for case in CASES)))
    what = "seconds of a round with masks over one without, idle workers: sum_bits = {}, added by {}"
    rows = [
        summary(
            figure,
            what.format(bits, f"devices in a {shape}" if shape else "the host"),
            ratios(seconds[_masked(figure)], seconds[_plain(figure)]),
            "x",
            peer="the same job without federated.secure, whose host adds",
        )
        for figure, (bits, shape) in CASES.items()
    ]
    for (bits, secure, shape), found in seconds.items():
        name = ".".join(["round", "masked" if secure else "plain", bits.strip('"'), *filter(None, [shape])])
        rows.append(summary(name, "seconds of such a round", found, "s"))
    what = "1 if the models with masks and without have the same bits, in a star, a tree and a ring"
    rows.append(summary("masked_bits_equal", what, equal, ""))
    return [replace(row, emulation=EMULATION) for row in rows]


def _round(fleet: Emulation, kind: _Kind, rounds: int) -> tuple[float, bytes]:
    """Return the seconds of one of a job's ``rounds``, and the values of its model."""
    bits, secure, shape = kind
    name = "-".join(["bits", bits.strip('"'), secure or "plain", *filter(None, [shape])])
    root = f'aggregate = "{DEVICES[0]}"\ntopology = "{shape}"\n' if shape else ""
    text = _JOB.format(root=root, name=name, rounds=rounds, secure=secure, bits=bits)
    found = trained(fleet, name, {"idle.py": IDLE_MODEL, "job.toml": text}, DEVICES)
    number = max(int(each.name) for each in (fleet.directory / "jobs").iterdir() if each.name.isdigit())
    tensors = load_file(fleet.directory / "jobs" / str(number) / "model.safetensors")
    values = b"".join(each.tobytes() for _, each in sorted(tensors.items()))
    return median(each.seconds for each in found[_FIRST:]), values


EXPERIMENT = Experiment("masked", TITLE, measure, figures=FIGURES)
