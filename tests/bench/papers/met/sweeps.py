# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): Fig. 7 to 11: accuracy against (nm, rf), with fixed and with adaptive repeats.

The paper's networks and data sets are not here: a small network on little data stands in, which overfits as
theirs do. All trainings of an exhibit visit each sample as often, so larger repeats mean fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, stdev

from bench.data.tiered_training import Setting, Split, digits, plain, repeated, synthetic, trained
from bench.experiment import Line, Panel, Run
from bench.papers.exhibit import Shown, Value, computed, measured
from millpond.train.repeats import BandedRepeats, FixedRepeats, RepeatRule, ScoredRepeats, Weights

ALL: Weights = (1.0, 1.0, 1.0)
"""The paper's example of a score: the sum of training loss, training error and validation error."""
LEAST_LOSS = 3.0
"""Points of accuracy that fixed repeats must lose before an adaptive rule has any to regain."""
ADAPTIVE = ("score", "bollinger", "bands")
"""The adaptive rules beside the fixed one: the paper's two, and ours."""


def rules(most: int) -> dict[str, RepeatRule]:
    """Return the adaptive rules: the paper's two, and ours, with ``most`` repetitions."""
    return {
        "score": ScoredRepeats(most=most, weights=ALL),
        "bollinger": BandedRepeats(most=most, weights=ALL, upper=False),
        "bands": BandedRepeats(most=most, weights=ALL),
    }


@dataclass(frozen=True, slots=True)
class Sweep:
    """A stand-in: ``data`` with so many training samples, trained as ``setting``; the values of rf = nm."""

    data: Callable[..., Split]
    samples: int
    setting: Setting
    cells: tuple[int, ...] = (16, 32, 64)


@dataclass(slots=True)
class Swept:
    """Accuracies in percent by seed: of plain training, and by the rule's name and nm; and the repetitions
    of all mini-epochs.
    """

    plain: list[float] = field(default_factory=list)
    accuracy: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    repeats: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def lost(self, name: str, cell: int) -> list[float]:
        """Return the points that are lost against plain training, by seed."""
        return [own - value for own, value in zip(self.plain, self.accuracy[name, cell], strict=True)]

    @property
    def cells(self) -> list[int]:
        """The values of nm."""
        return sorted({cell for _, cell in self.accuracy})

    @property
    def fallen(self) -> list[int]:
        """The values of nm at which fixed repeats lose LEAST_LOSS or more on average, and the largest one."""
        *others, largest = self.cells
        return [cell for cell in others if fmean(self.lost("fixed", cell)) >= LEAST_LOSS] + [largest]


SWEEPS: Mapping[str, Sweep] = {
    "fig-7": Sweep(digits, 400, Setting(batch=32, rate=0.02, weighed=True)),
    "fig-8": Sweep(digits, 400, Setting(batch=8, rate=0.015, weighed=True)),
    "fig-9": Sweep(synthetic, 600, Setting(batch=16, rate=0.02, weighed=True)),
    "fig-10": Sweep(digits, 400, Setting(batch=16, rate=0.02, weighed=True)),
}


EMULATION: Mapping[str, str] = {
    "fig-7": "a network of one hidden layer on 400 of scikit-learn's digits, batches of 32, stands in for "
    "ResNet-50 on ImageNet",
    "fig-8": "the same network and data with batches of 8, a quarter as the paper's, stand in for "
    "EfficientNet-B0 on ImageNet",
    "fig-9": "the network on 600 samples of ten overlapping normal distributions stands in for the mixture "
    "of logistic models on YouTube-8M",
    "fig-10": "the network on 400 digits, batches of 16, stands in for DeepLabv3+ on climate images",
}
"""What stands in for the paper's networks and data."""


@cache
def swept(name: str, run: Run) -> Swept:
    """Train everything of an exhibit, once in a run."""
    sweep, found = SWEEPS[name], Swept()
    cells, setting = sweep.cells, sweep.setting
    if run.quick:
        cells, setting = cells[-1:], replace(setting, visits=16)
    for seed in range(run.repeats):
        split = sweep.data(seed, samples=sweep.samples)
        found.plain.append(100 * trained(split, seed, setting, plain(split, seed, setting)))
        for cell in cells:
            wanted = {"fixed": FixedRepeats(min(cell, setting.visits)), **rules(cell)}
            for rule in ("fixed", *ADAPTIVE):
                accuracy, repeats = repeated(split, seed, setting, cell, wanted[rule])
                found.accuracy.setdefault((rule, cell), []).append(100 * accuracy)
                found.repeats.setdefault((rule, cell), []).extend(repeats)
        told = {f"{rule} {cell}": values[-1] for (rule, cell), values in found.accuracy.items()}
        run.say(f"{name}, seed {seed}: plain {found.plain[-1]:.1f}, " + _listed(told))
    return found


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items())


Printed = Mapping[str, float | str]
"""The paper's values: the accuracy "plain", points lost by "fixed 64" or "score", or that "score regains"."""


def accuracy(name: str, printed: Printed, difference: str) -> Callable[[Run], Shown]:
    """Return what measures Fig. 7, 8, 9 or 10: points of accuracy lost against plain training, and those that
    adaptive rules regain where fixed repeats lose LEAST_LOSS or more, and at the largest nm, as in the paper.
    """

    def measure(run: Run) -> Shown:
        found = swept(name, run)
        cells = found.cells
        rows = [measured("accuracy of plain training", "%", printed.get("plain"), found.plain)]
        rows += [
            _lost(f"points lost, nm = rf = {cell}", printed.get(f"fixed {cell}"), found, "fixed", cell)
            for cell in cells
        ]
        for cell in found.fallen:
            rows += _adaptive(found, cell, printed if cell == cells[-1] else {})
        return Shown(tuple(rows), EMULATION[name], difference, (_panel(found, cells),))

    return measure


def _adaptive(found: Swept, cell: int, printed: Printed) -> list[Value]:
    """Return the rows of the adaptive rules at one nm."""
    rows = []
    for rule in ADAPTIVE:
        about = f"nm = {cell}, rf by {rule}"
        rows.append(_lost(f"points lost, {about}", printed.get(rule), found, rule, cell))
        regains = printed.get(f"{rule} regains")
        rows.append(measured(f"points regained, {about}", "points", regains, regained(found, rule, cell)))
    best = max(("score", "bollinger"), key=lambda rule: fmean(regained(found, rule, cell)))
    what = f"met_adaptive_regains, points regained by the better of the paper's rules ({best}), nm = {cell}"
    return [*rows, measured(what, "points", printed.get("regains"), regained(found, best, cell))]


def _lost(what: str, printed: float | str | None, found: Swept, rule: str, cell: int) -> Value:
    return measured(what, "points", printed, found.lost(rule, cell))


def regained(found: Swept, rule: str, cell: int) -> list[float]:
    """Return the points that a rule regains of what fixed repeats lose, by seed."""
    pairs = zip(found.lost("fixed", cell), found.lost(rule, cell), strict=True)
    return [fixed - adaptive for fixed, adaptive in pairs]


def _panel(found: Swept, cells: Sequence[int]) -> Panel:
    def line(rule: str, *, faint: bool) -> Line:
        ys = [fmean(found.accuracy[rule, cell]) for cell in cells]
        return Line("millpond", f"rf by {rule}" if rule != "fixed" else "rf = nm", cells, ys, faint=faint)

    plain_line = Line("limit", "plain training", [cells[0], cells[-1]], 2 * [fmean(found.plain)])
    lines = [plain_line, line("fixed", faint=True), *(line(rule, faint=False) for rule in ADAPTIVE)]
    return Panel("Accuracy after as many visits", "nm", "accuracy in %", tuple(lines))


_SPREAD = {"score": "wider", "bollinger": "tighter"}


def distributions(run: Run) -> Shown:
    """Fig. 11: how often the adaptive rules have repeated the mini-epochs of Fig. 10."""
    found = swept("fig-10", run)
    cell = found.cells[-1]
    printed = {"score": 55, "bollinger": 35, "bands": None}
    rows, lines = list[Value](), list[Line]()
    for rule in ADAPTIVE:
        repeats = found.repeats[rule, cell]
        about = f"nm = {cell}, rf by {rule}"
        rows += [
            computed(f"{about}: mean", "", printed[rule], fmean(repeats)),
            computed(f"{about}: standard deviation", "", _SPREAD.get(rule), stdev(repeats)),
            computed(f"{about}: largest", "", "close to 128" if printed[rule] else None, max(repeats)),
        ]
        xs = list(range(1, max(repeats) + 1))
        lines.append(Line("millpond", rule, xs, [repeats.count(x) / len(repeats) for x in xs]))
    panel = Panel(f"Repeats of mini-epochs, nm = {cell}", "rf", "share of mini-epochs", tuple(lines))
    return Shown(
        tuple(rows),
        EMULATION["fig-10"],
        "The paper's values are of nm = 128. It does not print its rules' numbers: a score that "
        "must improve within three repetitions ends them earlier here.",
        (panel,),
    )
