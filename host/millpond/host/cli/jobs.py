# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands for jobs: 'train', 'resume', 'profile', 'jobs' and 'stop'."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError, Refused
from millpond.base.text import counted
from millpond.host.api.daemon import MOST_LISTED, JobInfo
from millpond.host.api.progress import JobRecord
from millpond.host.cli.exits import INTERRUPTED, JOB, LOCAL, REMOTE, fail
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    DevicesOption,
    FleetOption,
    FormatOption,
    JobArgument,
    complete_jobs,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.monitor import job_view
from millpond.host.monitor.job_view import Axis, JobCourse
from millpond.host.program.trackers.tracking import FINISH_SECONDS, Tracking, trackers_of
from millpond.host.program.trackers.update import Tracker
from millpond.host.records.comparison import JobComparison, differences
from millpond.host.records.jobs import Round
from millpond.host.terminal import printing, tables
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import each_told, view, waiting
from millpond.train.job import file
from millpond.train.job.host_spec import TrackSpec
from millpond.train.job.spec import Job, SynchronousSpec

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job file: train.learning_rate=0.1."),
]

PriorityOption = Annotated[
    int | None, typer.Option(help="The priority. Of the queued jobs, the one with the highest begins first.")
]

app, jobs = new_app(), new_app(invoke_without_command=True)
app.add_typer(jobs, name="jobs")
SECONDS_A_DAY = 86400.0


@app.command()
def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml")],
    settings: SetOption = None,
    devices: DevicesOption = "",
    priority: PriorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end of the job.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the model to this file, too.")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Train a job across the fleet, and show its progress. Ctrl-C leaves the job running.

    --set may be repeated; of two for one key the last counts. Its values are TOML's; a bare word is text.
    A job waits while one of its devices is needed by another job that runs or is before it in the queue.
    The command sends the daemon all that the job file names; the test folder only if the daemon cannot open
    it. It writes to the trackers of the file's table [track] as long as it follows the job; 'millpond jobs
    track' does so later.
    """
    job, code = file.read(job_file, _settings(settings, fleet_directory, devices, priority))
    if model:
        _check_target(model, detach=detach)
    trackers = [] if detach else trackers_of(job.track)
    with DaemonClient(fleet_directory) as client:
        number = _submit(client, job, code, output)
        _follow(client, number, output, detach=detach, model=model, trackers=trackers)


def _submit(client: DaemonClient, job: Job, code: Mapping[str, Path], output: Format) -> int:
    """Queue a job, and show how much of its files is sent."""
    with view(terminal=sys.stdout.isatty(), shows=output is Format.TEXT) as shown:
        return client.submit(job, code, shown.begin)


def _check_target(model: Path, *, detach: bool) -> None:
    """Raise LocalError, before a job has trained for nothing."""
    if detach:
        raise LocalError(
            "--model needs the end of the job: leave --detach away, or use 'millpond jobs model'"
        )
    if model.is_dir() or not os.access(model.absolute().parent, os.W_OK | os.X_OK):
        raise LocalError(f"{model}: no file can be written there")


def _settings(settings: list[str] | None, fleet: Path, devices: str, priority: int | None) -> list[str]:
    """Return all changes to the job file. Raises LocalError for a text that names no device."""
    found = list(settings or ())
    if devices:
        found.append(f"devices={json.dumps(directory.read(fleet).named(devices))}")
    if priority is not None:
        found.append(f"priority={priority}")
    return found


@app.command()
def resume(
    job: Annotated[
        int,
        typer.Argument(
            metavar="JOB", help="The number of a job that has ended.", autocompletion=complete_jobs
        ),
    ],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Continue up to this number of rounds or epochs.")
    ] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end of the job.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Resume a job from its last checkpoint.

    The job was stopped, has failed, or is done and gets more rounds.
    """
    with DaemonClient(fleet_directory) as client:
        trackers = [] if detach else trackers_of(client.job(job).job.track)
        client.resume(job, rounds)
        _follow(client, job, output, detach=detach, trackers=trackers)


def _follow(
    client: DaemonClient,
    number: int,
    output: Format,
    *,
    detach: bool,
    model: Path | None = None,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Show a job until it ends, unless ``detach``, and write its model to a file. Exits if it does not end
    well.
    """
    now = client.job_info(number)
    if detach:
        state = f"queued: {now.reason}" if now.reason else now.state
        text = f"job {number} is {state}; 'millpond jobs' and 'millpond logs {number}' tell more"
        printing.show(output, {"id": number, "state": now.state}, text)
        return
    names = now.devices or [device.name for device in client.fleet.config.device]
    console = tables.quiet_console() if output is Format.JSON else tables.console()
    tracking = Tracking(client.fleet.directory, number, trackers, _warn)
    info, rounds = _watch(client, number, tables.JobView(console, names, now.unit))
    shows = output is Format.TEXT
    if trackers:
        with waiting(
            f"job {number}", f"its trackers take the end, at most {FINISH_SECONDS:.0f} s", shows=shows
        ):
            tracking.finish()
    if model and info.model:
        with view(terminal=sys.stdout.isatty(), shows=shows) as shown:
            client.save_model(number, model, begin=shown.begin)
    if output is Format.JSON:
        printing.print_json({"job": info, "rounds": rounds})
    elif info.state == "done":
        print(f"{ending(info, rounds)}; {_place(info, model)}")
    if info.state != "done":
        fail(info.error or f"job {number} was {info.state}", JOB, document=False)


def _warn(line: str) -> None:
    print(f"millpond: {line}", file=sys.stderr)


def ending(info: JobInfo, rounds: Sequence[Round]) -> str:
    """Return how a job that is done ended: its score, its rounds, and which workers the last one lacked."""
    scored = "" if info.score is None else f"{info.metric} {info.score:.4f} "
    without = ", ".join(rounds[-1].missing) if rounds else ""
    lacking = f", the last one without {without}" if without else ""
    return f"job {info.id} is done: {scored}after {counted(info.round, info.unit)}{lacking}"


def _watch(client: DaemonClient, number: int, view: tables.JobView) -> tuple[JobInfo, list[Round]]:
    """Show a job until it ends. Exits at Ctrl-C, which leaves it running."""
    try:
        return view.follow(client.watch(number))
    except KeyboardInterrupt:
        ways = f"'millpond logs -f {number}' follows it, 'millpond stop {number}' ends it"
        fail(f"interrupted; job {number} goes on: {ways}", INTERRUPTED, document=False)


def _place(info: JobInfo, model: Path | None) -> str:
    """Return where the user finds the model of a job."""
    if model or not info.model or os.access(info.model, os.R_OK):
        return str(model or info.model)
    return f"'millpond jobs model {info.id} FILE' writes its model to a file"


@app.command()
def profile(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A synchronous job.")],
    settings: SetOption = None,
    devices: DevicesOption = "",
    priority: PriorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the curves into this file, too.")
    ] = None,
    volumes: Annotated[
        bool,
        typer.Option(
            "--volumes", help="Tell the data of a step over the weights; the job's code runs here, as you."
        ),
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Measure each worker's time for steps, and show the plan.

    Nothing is trained, and no job stays in the list.
    """
    job, code = file.read(job_file, _settings(settings, fleet_directory, devices, priority))
    only_measured = replace(job.synchronous or SynchronousSpec(), epochs=0)
    with DaemonClient(fleet_directory) as client:
        job = replace(job, federated=None, synchronous=only_measured)
        number = _submit(client, job, code, output)
        console = tables.quiet_console() if output is Format.JSON else tables.console()
        info, _ = _watch(client, number, tables.JobView(console, ()))
        if info.state != "done":
            fail(info.error or f"job {number} was {info.state}", JOB)
        curves = client.curves(number)
        with contextlib.suppress(Refused):  # a member of the daemon's group may not remove jobs
            client.forget_job(number)  # its model is not trained
    if picture:
        from millpond.host.terminal import profile_plot  # loads numpy

        profile_plot.draw(curves.profiles, curves.batches, job.name, picture)
    printing.show(output, curves, lambda: tables.curves(curves))
    if volumes:
        from millpond.host.cli.step_volumes import step_volumes  # loads torch

        with waiting("profile", "counts the data of a step", shows=output is Format.TEXT):
            told = step_volumes(job, job_file.parent, sum(curves.batches.values()))
        print(told.text, file=sys.stdout if output is Format.TEXT else sys.stderr)


OwnFleetOption = Annotated[
    Path | None,
    typer.Option(  # as FleetOption
        "--fleet",
        metavar="DIR",
        help="The fleet's directory.  [env var: MILLPOND_FLEET]",
        readable=False,
    ),
]
OwnFormatOption = Annotated[Format | None, typer.Option("--format", help="How to print the result.")]


@jobs.callback()
def list_all(
    context: typer.Context,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    last: Annotated[
        int, typer.Option("--last", metavar="N", min=1, help="List the newest N jobs.")
    ] = MOST_LISTED,
    output: FormatOption = Format.TEXT,
) -> None:
    """List jobs; its own commands compare, plot and prune them.

    'compare' shows some side by side, 'plot' draws curves, 'model' fetches a model, 'prune' removes files.
    """
    if context.invoked_subcommand is not None:
        return
    with DaemonClient(fleet_directory) as client:
        found = client.jobs(last)
    printing.show(output, {"jobs": found}, lambda: tables.jobs(found, tables.console().width))
    if output is Format.TEXT and len(found) == last and found[0].id > 1:
        print(f"the newest {last}; --last N shows more")


def _of_group(
    context: typer.Context, fleet_directory: Path | None, output: Format | None
) -> tuple[Path, Format]:
    """Return the options of a command of 'jobs': its own, or those that were given before its name."""
    assert context.parent is not None
    given = context.parent.params
    return fleet_directory or given["fleet_directory"], output or given["output"]


def _records(place: Path, numbers: Sequence[int], output: Format) -> list[JobRecord]:
    """Return jobs with their rounds, each once."""
    wanted = each_told("jobs", list(dict.fromkeys(numbers)), "job", shows=output is Format.TEXT)
    with DaemonClient(place) as client:
        return [client.job(number) for number in wanted]


@jobs.command()
def compare(
    context: typer.Context,
    numbers: Annotated[
        list[int],
        typer.Argument(metavar="JOB JOB...", help="The numbers of jobs.", autocompletion=complete_jobs),
    ],
    fleet_directory: OwnFleetOption = None,
    output: OwnFormatOption = None,
) -> None:
    """Compare the results and the keys of jobs.

    Of the keys of their files those are shown that differ.
    """
    place, shown = _of_group(context, fleet_directory, output)
    records = _records(place, numbers, shown)
    found = JobComparison(
        tuple(job_view.outcome(each.info, each.rounds) for each in records),
        differences([(each.job, each.code) for each in records]),
    )
    outcome, keys = tables.comparison(found)
    printing.show(shown, found, lambda: outcome)
    if shown is Format.TEXT and found.differences:
        tables.console().print()
        tables.console().print(keys)
    elif shown is Format.TEXT and len(found.jobs) > 1:
        print("their definitions are the same")


@jobs.command()
def plot(
    context: typer.Context,
    numbers: Annotated[
        list[int],
        typer.Argument(metavar="JOB JOB...", help="The numbers of jobs.", autocompletion=complete_jobs),
    ],
    path: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Draw into this file: .png, .svg or .pdf."),
    ] = None,
    over: Annotated[
        Axis, typer.Option(help="The axis: rounds, or what the rounds took together.")
    ] = Axis.ROUNDS,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Draw this score instead of the one that decides.")
    ] = "",
    fleet_directory: OwnFleetOption = None,
    output: OwnFormatOption = None,
) -> None:
    """Draw the curves of jobs' scores: in the terminal, or into a file. Of one job all its scores are drawn.

    In the terminal this needs the extra millpond[top], into a file matplotlib.
    """
    from millpond.host.monitor import job_plot

    place, shown = _of_group(context, fleet_directory, output)
    records = _records(place, numbers, shown)
    drawn = job_plot.curves([JobCourse(each.info, each.rounds) for each in records], over, metric)
    if not drawn:
        fail("no score to draw yet", LOCAL)
    units = {each.info.unit for each in records}
    label = units.pop() if over is Axis.ROUNDS and len(units) == 1 else job_plot.AXIS_LABELS[over]
    if path:
        job_plot.save(drawn, ", ".join(each.info.name for each in records), label, path)
        printing.show(shown, {"plot": str(path)}, f"the curves are in {path}")
        return
    width, height = shutil.get_terminal_size()
    printing.show(shown, {"curves": drawn}, lambda: job_plot.text(drawn, width, height - 1, label))


@jobs.command()
def model(
    context: typer.Context,
    job: JobArgument,
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write; an existing file is replaced.")
    ],
    best: Annotated[bool, typer.Option("--best", help="Write the model with the best score so far.")] = False,
    fleet_directory: OwnFleetOption = None,
    output: OwnFormatOption = None,
) -> None:
    """Write the model of a job that is done to a file."""
    place, shown = _of_group(context, fleet_directory, output)
    with (
        DaemonClient(place) as client,
        view(terminal=sys.stdout.isatty(), shows=shown is Format.TEXT) as bars,
    ):
        client.save_model(job, path, best=best, begin=bars.begin)
    printing.show(shown, {"id": job, "model": str(path)}, f"the model of job {job} is in {path}")


@jobs.command()
def track(
    context: typer.Context,
    job: JobArgument,
    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write a run for TensorBoard into this folder.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Write a run to this MLflow server, or folder.")
    ] = None,
    fleet_directory: OwnFleetOption = None,
    output: OwnFormatOption = None,
) -> None:
    """Write a job to its trackers, from its first round on.

    The command goes on until the job ends.
    They are those of the job file, unless an option names one. The command may begin before the end of
    the job or after it, and again.
    """
    place, shown = _of_group(context, fleet_directory, output)
    if "" in (tensorboard, mlflow):
        raise LocalError("--tensorboard and --mlflow need a place: a folder, or a server's address")
    given = TrackSpec(str(Path(tensorboard).absolute()) if tensorboard else "", mlflow or "")
    with DaemonClient(place) as client:
        spec = given if given != TrackSpec() else client.job(job).job.track
    if not (trackers := trackers_of(spec)):
        raise LocalError(f"job {job} has no table [track]: give --tensorboard or --mlflow")
    try:
        with waiting(f"job {job}", "is tracked", shows=shown is Format.TEXT) as tell:
            tracking = Tracking(place, job, trackers, _warn, tell)
            tracking.finish(None)
    except KeyboardInterrupt:
        fail(f"interrupted; job {job} goes on", INTERRUPTED, document=False)
    if tracking.failed:
        raise SystemExit(REMOTE)
    places = " and ".join(filter(None, (spec.tensorboard, spec.mlflow)))
    printing.show(shown, {"id": job, "trackers": places}, f"job {job} is in {places}")


@jobs.command()
def prune(
    context: typer.Context,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=0, help="Keep the N jobs that ended last.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", metavar="DAYS", min=0.0, help="Keep the jobs that ended within this many days."
        ),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Take the jobs out of the list, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the jobs, and remove nothing.")] = False,
    fleet_directory: OwnFleetOption = None,
    output: OwnFormatOption = None,
) -> None:
    """Remove the folders of jobs that have ended.

    These have models, checkpoints and logs.
    --keep and --older-than say which jobs stay. Without both, the limits of fleet.toml ([jobs]) decide, as
    they do at the end of each job. A pruned job cannot be resumed. It stays in the list, with its rounds,
    unless you --forget it.
    """
    place, shown = _of_group(context, fleet_directory, output)
    seconds = None if older_than is None else older_than * SECONDS_A_DAY
    text = "looks at the folders of jobs" if dry_run else "removes the folders of jobs"
    with DaemonClient(place) as client, waiting("prune", text, shows=shown is Format.TEXT):
        found = client.prune(keep, seconds, dry_run=dry_run, forget=forget)
    done = "would be" if dry_run else "is"
    what = "forgotten" if forget else "pruned"
    lines = [f"job {job.id} ({job.name}) {done} {what}: {printing.size(job.bytes)}" for job in found]
    printing.show(shown, {"jobs": found, "dry_run": dry_run}, "\n".join(lines or ["nothing to prune"]))


@app.command()
def stop(
    job: JobArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Stop a job; its last finished round is kept."""
    with (
        DaemonClient(fleet_directory) as client,
        waiting(f"job {job}", "is stopped", shows=output is Format.TEXT),
    ):
        client.stop(job)
    printing.show(output, {"id": job, "state": "stopped"}, f"job {job} is stopped")
