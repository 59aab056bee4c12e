# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): Stannis A: three equal virtual workers, of which one loses a part of its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import quantiles

from bench.balance.paper import CURVES, LEFT, LIMIT, NODE, NODE_SPEED, THREE
from bench.balance.team import LABELS, POLICIES, ROLES, Step, emulation, side_by_side, speed, team
from bench.experiment import Experiment, Findings, Line, Panel, Run
from bench.rows import Row, summary
from millpond.train.balance.policy import PolicyName

_WORKERS = 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """Repeats; steps before the squeeze, until it is to be dealt with, and measured; the seconds of a step as
    planned: of all policies, and of ours alone where the time that scheduling may cost is a greater part.
    """

    repeats: int
    before: int
    tuning: int
    measured: int
    planned: float
    short: float


FULL, QUICK = Lengths(3, 3, 10, 10, 1.0, 0.5), Lengths(1, 1, 6, 2, 0.1, 0.05)


@dataclass(frozen=True, slots=True)
class Case:
    """What other work takes of the squeezed worker's cores in percent, under which policy, and the seconds of
    a step.
    """

    taken: int
    policy: PolicyName
    planned: float
    suffix: str

    @property
    def figure(self) -> str:
        """The key of its row."""
        return f"a_virtual_{100 * self.left:.0f}{self.suffix}"

    @property
    def left(self) -> float:
        """Of the squeezed worker's speed."""
        return LEFT[self.taken]

    @property
    def limit(self) -> float:
        """Images per second that are there after the squeeze."""
        return (_WORKERS - 1 + self.left) * NODE_SPEED

    @property
    def factor(self) -> float:
        """Of time."""
        return self.planned / NODE.curve.seconds[-1]


@dataclass(frozen=True, slots=True)
class Course:
    """All steps of a team, by how many seconds its workers woke up later than they wanted to, and the batch
    of the squeezed worker at the end.
    """

    steps: tuple[Step, ...]
    late: tuple[float, ...]
    batch: int

    def speed(self, case: Case, last: int) -> float:
        """Return the images per second of the ``last`` steps, in the time of the paper."""
        return case.factor * speed(self.steps[-last:])


def measure(run: Run) -> Findings:
    """Rows ``a_virtual_57``, ``a_virtual_81``, also for the paper's rule, untuned, and shorter steps."""
    lengths = QUICK if run.quick else FULL
    courses = squeeze(run, _cases(lengths), lengths)
    rows = [_row(case, found, lengths) for case, found in courses.items()]
    panels = [_panel(percent, courses, lengths) for percent in LEFT]
    return Findings((*rows, _lateness(courses, lengths)), tuple(panels))


EXPERIMENT = Experiment(
    "a_virtual", "Stannis A: three equal virtual workers, one squeezed in mid-run", measure
)


def _cases(lengths: Lengths) -> list[Case]:
    found = []
    for percent in LEFT:
        found += [Case(percent, policy, lengths.planned, suffix) for policy, suffix in POLICIES.items()]
        found.append(Case(percent, "balance", lengths.short, "_short"))
    return found


def squeeze(
    run: Run, cases: Sequence[Case], lengths: Lengths, *, tells: bool = False
) -> dict[Case, list[Course]]:
    """Run all cases side by side, as often as there are repeats. The squeezed worker ``tells`` of its load or
    not.
    """
    courses: dict[Case, list[Course]] = {case: [] for case in cases}
    for repeat in range(lengths.repeats):
        run.say(f"Stannis A: repeat {repeat + 1} of {lengths.repeats}")
        found = side_by_side({case: partial(_squeeze, case, lengths, tells=tells) for case in cases})
        for case, course in found.items():
            courses[case].append(course)
    return courses


def _squeeze(case: Case, lengths: Lengths, *, tells: bool) -> Course:
    nodes = _WORKERS * [NODE.scaled(case.factor)]
    with team(nodes, case.policy, tells=tells) as made:
        before = made.run(lengths.before)
        made.workers[-1].slowness = 1 / case.left
        steps = [*before, *made.run(lengths.tuning + lengths.measured)]
        late = tuple(late for worker in made.workers for late in worker.late)
        return Course(tuple(steps), late, made.batches[-1])


def _row(case: Case, courses: Sequence[Course], lengths: Lengths) -> Row:
    speeds = [course.speed(case, lengths.measured) for course in courses]
    first, last = lengths.tuning + 1, lengths.tuning + lengths.measured
    limit = f"{_WORKERS - 1 + case.left:.2f} x {NODE_SPEED:.2f} = {case.limit:.1f} img/s"
    what = (
        f"{LABELS[case.policy]}, one at {case.left:.2f}, untold: steps {first} to {last} after, of "
        f"{case.planned:g} s; limit {limit}"
    )
    shares = [found / case.limit for found in speeds]
    return summary(case.figure, what, shares, "x", peer=LIMIT, emulation=_note(case.factor, case.planned))


def _note(factor: float, planned: float) -> str:
    return f"{emulation(factor, planned)}; {CURVES}"


def _lateness(courses: Mapping[Case, Sequence[Course]], lengths: Lengths) -> Row:
    """How much of a loss is this machine's own."""
    late = [[1e3 * moment for moment in course.late] for found in courses.values() for course in found]
    values = [quantiles(moments, n=10)[-1] for moments in late]
    what = "how much later than they wanted workers woke up, 90th percentile of each run"
    note = _note(lengths.planned / NODE.curve.seconds[-1], lengths.planned)
    return summary("a_virtual_late_ms", what, values, "ms", emulation=note)


def _panel(percent: int, courses: Mapping[Case, Sequence[Course]], lengths: Lengths) -> Panel:
    cases = [case for case in courses if case.taken == percent and case.planned == lengths.planned]
    numbers = list(range(1, lengths.before + lengths.tuning + lengths.measured + 1))
    whole, left = THREE, cases[0].limit
    limit = [whole if number <= lengths.before else left for number in numbers]
    lines = [Line("limit", "limit: available speeds", numbers, limit)]
    for case in cases:
        speeds = [case.factor * speed([step]) for step in courses[case][0].steps]
        lines.append(Line(ROLES[case.policy], LABELS[case.policy], numbers, speeds))
    title = f"A: 3 equal virtual workers, one at {cases[0].left:.2f} of its speed"
    return Panel(title, "step", "img/s", tuple(lines), event=(lengths.before + 0.5, "squeezed"))
