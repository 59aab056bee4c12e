# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): Ember's figures of what a job uses: Fig. 4, 6 and table 3, of the same watched jobs."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from bench.data.jobs import JobResult, JobSpec, Kind, Moment, interpreter_of, run_job
from bench.data.shaped import sparse_images
from bench.experiment import Line, Panel, Role, Run
from bench.papers.exhibit import Shown, computed, measured

_SIDE, _MEGABYTES = 64, 250
_STEPS, _BATCH = 40, 16
_EMULATION = (
    f"the set has {_MEGABYTES} MB of black images of {_SIDE}x{_SIDE} in RGB with the network of three"
    " convolutions, two workers, all on this machine's two cores; memory is that of all processes of the"
    " job, pages that they share counted once"
)
_NAMES: dict[Kind, tuple[Role, str]] = {
    "stream": ("millpond", "streamed"),
    "memory": ("untuned", "the set in each worker"),
    "ray": ("peer", "Ray"),
}
_STARTS: dict[Kind, str] = {"stream": "earlier than the baseline"}
"""What the paper says of Fig. 6."""
Jobs = dict[Kind, list[JobResult]]


def watched_jobs(run: Run) -> Jobs:
    """Return the jobs of all kinds; of Ray none where it does not install."""
    return {kind: watched(kind, run) for kind in _NAMES}


@functools.cache
def watched(kind: Kind, run: Run) -> list[JobResult]:
    """Run a kind of job once a repeat; the exhibits share its results. A quick run has none with Ray."""
    if (run.quick and kind == "ray") or not (python := interpreter_of(kind)):
        return []
    found = list[JobResult]()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        samples = (_MEGABYTES // (10 if run.quick else 1)) * 10**6 // (3 * _SIDE**2)
        sparse_images(Path(folder) / "train", samples, (3, _SIDE, _SIDE))
        sparse_images(Path(folder) / "test", 64, (3, _SIDE, _SIDE))
        arguments = {"side": _SIDE, "channels": 3}
        steps = 8 if run.quick else _STEPS
        spec = JobSpec(
            Path(folder), "models.mnist_cnn", arguments, steps=steps, batch=_BATCH, memory="16 MiB"
        )
        for _ in range(min(run.repeats, 2)):
            found.append(run_job(kind, spec, python, watched=True))
            run.say(f"{kind}: peak {max(_in_loop(found[-1])):.0f} MB")
    return found


def figure_4(run: Run) -> Shown:
    """Show the service's CPU over time."""
    jobs = watched("stream", run)
    loads = [_loads(each.moments) for each in jobs]
    within = [
        [load for at, load in each if job.loop[0] <= at <= job.loop[1]]
        for each, job in zip(loads, jobs, strict=True)
    ]
    within = [each for each in within if each]
    rows = (
        measured("server's CPU during training, mean", "% of a core", None, [fmean(each) for each in within]),
        measured(
            "server's CPU during training, standard deviation",
            "% of a core",
            None,
            [pstdev(each) for each in within],
        ),
        measured(
            "server's CPU during training, second half over first half",
            "x",
            "constant",
            [_halves(each) for each in within if _halves(each)],
        ),
    )
    lines = tuple(
        Line(
            "millpond",
            f"service, run {number}",
            [at for at, _ in each],
            [load for _, load in each],
            faint=number > 1,
        )
        for number, each in enumerate(loads, 1)
    )
    difference = (
        "The paper draws a curve without numbers, and says that it is constant. Our service sends images as"
        " they are stored, so most of its time it waits for the workers."
    )
    panel = Panel(
        "the data service during a job", "seconds since the start of the job", "CPU, % of a core", lines
    )
    return Shown(rows, _EMULATION, difference, (panel,))


def figure_6(run: Run) -> Shown:
    """Show memory over time."""
    jobs = watched_jobs(run)
    lines = []
    for kind, (role, name) in _NAMES.items():
        moments = jobs[kind][0].moments if jobs[kind] else ()
        lines.append(Line(role, name, [each.at for each in moments], [each.job / 1e6 for each in moments]))
    first = {kind: [each.loop[0] for each in found] for kind, found in jobs.items()}
    rows = tuple(
        measured(f"{name}: seconds until training starts", "s", _STARTS.get(kind), first[kind])
        for kind, (_, name) in _NAMES.items()
    )
    difference = (
        "The paper's curves have no numbers beside those of table 3; its set and what else its processes"
        " hold are not printed. Here the set is small and in the page cache: it is read whole in less time"
        " than a stream takes to start."
    )
    panel = Panel("memory of the workers", "seconds since the start of the job", "MB", tuple(lines))
    return Shown(rows, _EMULATION, difference, (panel,))


def table_3(run: Run) -> Shown:
    """Show peak and mean of memory, and what streaming saves."""
    jobs = watched_jobs(run)
    peaks = {kind: [max(_in_loop(each)) for each in found] for kind, found in jobs.items()}
    means = {kind: [fmean(_in_loop(each)) for each in found] for kind, found in jobs.items()}
    rows = []
    for what, found, ours, baseline, saved in (
        ("peak RAM in the loop", peaks, 1519.1, 2368.0, 35.85),
        ("mean RAM in the loop", means, 1512.2, 2367.8, 36.14),
    ):
        rows += [
            measured(f"{what}, streamed", "MB", ours, found["stream"]),
            measured(f"{what}, the set in each worker", "MB", baseline, found["memory"]),
            measured(f"{what}, Ray, its object store and daemons included", "MB", baseline, found["ray"]),
            measured(f"{what}, reduction by streaming", "%", saved, _saved(found["stream"], found["memory"])),
            measured(f"{what}, reduction over Ray", "%", saved, _saved(found["stream"], found["ray"])),
        ]
    service = [max(each.service for each in job.moments) / 1e6 for job in jobs["stream"]]
    rows.append(measured("peak RAM of the data service, which is not in these", "MB", None, service))
    rows.append(computed("size of the set", "MB", None, _MEGABYTES / (10 if run.quick else 1)))
    difference = (
        "What is saved grows with the set, whose size the paper does not print; torch itself has about 0.3"
        " GB in each worker. The paper calls Ray and 'without asynchronous serving' its baseline, so both"
        " are here."
    )
    return Shown(tuple(rows), _EMULATION, difference)


def _loads(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    return [(b.at, 100 * (b.cpu - a.cpu) / (b.at - a.at)) for a, b in pairwise(moments) if b.cpu]


def _halves(loads: Sequence[float]) -> float:
    """Return the mean of the second half over that of the first, 0 if the first has none."""
    middle = len(loads) // 2
    first = fmean(loads[:middle]) if middle else 0.0
    return fmean(loads[middle:]) / first if first else 0.0


def _in_loop(job: JobResult) -> list[float]:
    """Return the megabytes at the moments of the loop, at all moments if none was in it."""
    within = [each.job / 1e6 for each in job.moments if job.loop[0] <= each.at <= job.loop[1]]
    return within or [each.job / 1e6 for each in job.moments]


def _saved(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [100 * (1 - own / other) for own, other in zip(ours, theirs, strict=False)]
