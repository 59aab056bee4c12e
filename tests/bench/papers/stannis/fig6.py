# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, processes, cgroups): Fig. 6: three equal nodes, of which one loses cores to gzip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from bench.balance.paper import CURVES, LEFT, THREE, TUNED
from bench.balance.quotas import QUOTA, Squeeze, limited_groups, speed, squeeze, workers
from bench.balance.squeezed import FULL, QUICK, Case, Course, Lengths
from bench.balance.squeezed import squeeze as squeeze_virtual
from bench.balance.team import LABELS, ROLES, emulation
from bench.balance.team import speed as speed_of
from bench.experiment import Line, Panel, Run, Unmeasured
from bench.papers.exhibit import Exhibit, Shown, Value, measured
from millpond.train.balance.policy import PolicyName
from millpond.train.job.spec import SynchronousSpec

POLICIES: tuple[PolicyName, ...] = ("fixed", "stannis", "stannis-inverse", "stannis-cpu", "balance")
REAL: tuple[PolicyName, ...] = ("fixed", "stannis", "stannis-cpu", "balance")
QUICK_REAL: tuple[PolicyName, ...] = ("fixed", "balance")
_TUNED: tuple[PolicyName, ...] = ("stannis", "balance")
_REAL, _QUICK_REAL = (3, 7, 5, 5.0), (1, 2, 1, 1.0)
"""Steps before gzip, beside it until they are measured, and measured; seconds in which the workers are
measured.
"""
Courses = Mapping[Case, Sequence[Course]]


def measure(run: Run) -> Shown:
    """Run virtual nodes at the paper's speeds under all rules, then real processes beside gzip."""
    lengths = QUICK if run.quick else FULL
    cases = [Case(taken, policy, lengths.planned, "") for taken in LEFT for policy in POLICIES]
    courses = squeeze_virtual(run, cases, lengths, tells=True)
    rows = [_before(cases[0], courses[cases[0]], lengths)]
    rows += [row for case, found in courses.items() for row in _virtual(case, found, lengths)]
    real, why = _real(run)
    factor = cases[0].factor
    return Shown(
        (*rows, *real),
        f"{emulation(factor, lengths.planned)}; the busy node reports its load; {CURVES}; "
        "real workers: three processes of one machine with "
        f"{QUOTA} of a processor each (cgroup quota), that train a CNN on noise, gzip beside one{why}",
        "The paper's tuned speeds are those of equations 2 and 3; it says that the third method gives almost "
        "the same. Its 83.7 img/s is more than its three nodes have left. Its rule makes the busy node's "
        "batch smaller every five steps. For real workers the paper's values are its speeds over its 93.4 "
        "img/s; our gzip takes 50 and 75 % of a worker's time, the paper's, on half and three quarters of "
        "the cores, 19 and 43 %. millpond ends its steps without the busy node, so it measures that node "
        "only every other step, and notices a decline of 19 % during the measured steps.",
        tuple(_panel(taken, courses, lengths) for taken in LEFT),
    )


def _paper(policy: PolicyName, taken: int) -> float | None:
    """Return the paper's img/s, its tuned ones also beside ours; None for methods of which it has none."""
    return LEFT[taken] * THREE if policy == "fixed" else TUNED[taken][1] if policy in _TUNED else None


def _before(case: Case, found: Sequence[Course], lengths: Lengths) -> Value:
    speeds = [case.factor * speed_of(course.steps[: lengths.before]) for course in found]
    return measured("no cores taken", "img/s", THREE, speeds)


def _virtual(case: Case, found: Sequence[Course], lengths: Lengths) -> list[Value]:
    where = f"{case.taken} % of one node's cores taken, {LABELS[case.policy]}"
    paper = _paper(case.policy, case.taken)
    speeds = [course.speed(case, lengths.measured) for course in found]
    rows = [measured(where, "img/s", paper and round(paper, 1), speeds)]
    if case.policy != "fixed":
        batch = TUNED[case.taken][0] if case.policy == "stannis" else None
        rows.append(
            measured(f"{where}: the busy node's batch", "", batch, [course.batch for course in found])
        )
    return rows


def _real(run: Run) -> tuple[list[Value], str]:
    """Return rows of real workers, and what to add to the emulation; none where there are no cgroups."""
    try:
        found = _squeeze_real(run)
    except Unmeasured as error:
        return [], f" (not measured here: {error})"
    rows = []
    for (taken, policy), squeezes in found.items():
        where = f"real workers, gzip takes {taken} % of one's time, {LABELS[policy]}"
        paper, what = _paper(policy, taken), f"{where}: speed beside gzip over that before"
        rows.append(
            measured(
                what,
                "x",
                paper and float(f"{paper / THREE:.3f}"),
                [one.beside / one.usual for one in squeezes],
            )
        )
    return rows, ""


def _squeeze_real(run: Run) -> dict[tuple[int, PolicyName], list[Squeeze]]:
    """Squeeze one worker under each policy in turn; a team that is not its turn's waits."""
    before, tuning, count, seconds = _QUICK_REAL if run.quick else _REAL
    policies = QUICK_REAL if run.quick else REAL
    found: dict[tuple[int, PolicyName], list[Squeeze]] = {(t, p): [] for t in LEFT for p in policies}
    with limited_groups() as groups, ExitStack() as stack:
        teams = {}
        for policy in policies:
            how = SynchronousSpec(policy=policy, patience=1.1 if policy == "balance" else 0)
            teams[policy] = stack.enter_context(workers(groups, how, seconds))
            run.say(f"{policy}: {teams[policy].planner.description}")
        for _ in range(run.repeats):
            for (taken, policy), squeezes in found.items():
                teams[policy].restart_plan()
                speed(teams[policy], 1)
                squeezes.append(squeeze(teams[policy], groups[-1], taken, before, tuning, count))
                one = squeezes[-1]
                run.say(f"{policy}, {taken} %: {one.usual:.1f} img/s, {one.beside:.1f} beside gzip")
    return found


def _panel(taken: int, courses: Courses, lengths: Lengths) -> Panel:
    cases = [case for case in courses if case.taken == taken]
    steps = range(1, lengths.before + lengths.tuning + lengths.measured + 1)
    rest = [step for step in steps if step > lengths.before]
    lines = [Line("limit", "available speeds", steps, _falling(steps, lengths, cases[0].limit))]
    for case in cases:
        speeds = [case.factor * one.samples / one.seconds for one in courses[case][0].steps]
        faint = case.policy == "stannis-inverse"
        lines.append(Line(ROLES[case.policy], LABELS[case.policy], steps, speeds, faint=faint))
    both = {"the paper, untuned": LEFT[taken] * THREE, "the paper, HyperTune": TUNED[taken][1]}
    for label, speed_of_it in both.items():
        lines.append(Line("paper", label, rest, len(rest) * [speed_of_it], faint=label.endswith("untuned")))
    event = (lengths.before + 0.5, f"{taken} % of one node's cores taken")
    return Panel(f"Fig. 6: {taken} % of one of three nodes taken", "step", "img/s", tuple(lines), event)


def _falling(steps: Sequence[int], lengths: Lengths, limit: float) -> list[float]:
    return [THREE if step <= lengths.before else limit for step in steps]


EXHIBIT = Exhibit("fig-6", "Fig. 6: Speed of three nodes, one interrupted", measure)
