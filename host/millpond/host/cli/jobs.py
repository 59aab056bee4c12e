# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands for jobs: 'train', 'resume', 'profile', 'jobs' and 'stop'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.api.daemon import JobRecord
from millpond.host.cli.exits import JOB, fail
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    FleetOption,
    Format,
    FormatOption,
    complete_jobs,
)
from millpond.host.client import DaemonClient
from millpond.host.model.comparison import ComparedJob, JobComparison, differences, results
from millpond.host.terminal import tables
from millpond.train.job import file
from millpond.train.job.spec import SynchronousSpec

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file: train.learning_rate=0.1."),
]

DevicesOption = Annotated[
    str, typer.Option("--devices", metavar="csd0,csd1", help="With these devices, not all of them.")
]
PriorityOption = Annotated[
    int | None, typer.Option(help="Among jobs that wait for a device, the highest begins first.")
]


def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml")],
    settings: SetOption = None,
    devices: DevicesOption = "",
    priority: PriorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Train a job across the fleet, and show it happening. Ctrl-C leaves the job running.

    --set may be repeated; of two for one key the last counts. Its values are TOML's, a bare word is text.
    A job waits while another one that has begun, or is before it in the queue, needs one of its devices.
    """
    job, code = file.read(job_file, _settings(settings, devices, priority))
    with DaemonClient(fleet_directory) as client:
        number = client.submit(job, code)
        _follow(client, number, output, detach=detach)


def _settings(settings: list[str] | None, devices: str, priority: int | None) -> list[str]:
    """Return all changes to the job file. Raises LocalError for a list that names no device."""
    found = list(settings or ())
    if devices:
        names = [name.strip() for name in devices.split(",") if name.strip()]
        if not names:
            raise LocalError(f"--devices: '{devices}' names no device")
        found.append(f"devices={json.dumps(names)}")
    if priority is not None:
        found.append(f"priority={priority}")
    return found


def resume(
    job: Annotated[
        int,
        typer.Argument(
            metavar="JOB", help="The number of a job that has ended.", autocompletion=complete_jobs
        ),
    ],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on up to so many rounds or epochs.")] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Resume a job that was stopped or has failed, or continue one that is done, from its last checkpoint."""
    with DaemonClient(fleet_directory) as client:
        client.resume(job, rounds)
        _follow(client, job, output, detach=detach)


def _follow(client: DaemonClient, number: int, output: Format, *, detach: bool) -> None:
    """Show a job until it ends, unless ``detach``. Exits if it does not end well."""
    now = next(each for each in client.jobs() if each.id == number)
    if detach:
        if output is Format.JSON:
            tables.print_json({"id": number, "state": now.state})
        else:
            state = f"queued: {now.reason}" if now.reason else now.state
            print(f"job {number} is {state}; 'millpond jobs' and 'millpond logs {number}' tell more")
        return
    names = now.devices or [device.name for device in client.fleet.config.device]
    console = tables.quiet_console() if output is Format.JSON else tables.console()
    unit = now.unit
    info, rounds = tables.JobView(console, names, unit).follow(client.watch(number))
    if output is Format.JSON:
        tables.print_json({"job": info, "rounds": rounds})
    elif info.state == "done":
        scored = "" if info.score is None else f"{info.metric} {info.score:.4f} "
        print(f"job {number} is done: {scored}after {info.round} {unit}s; {info.model}")
    if info.state != "done":
        fail(info.error or f"job {number} was {info.state}", JOB, document=False)


def profile(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="A synchronous job.")],
    settings: SetOption = None,
    devices: DevicesOption = "",
    priority: PriorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the curves, too.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Measure what steps of a job take each worker, and show the plan; nothing is trained."""
    job, code = file.read(job_file, _settings(settings, devices, priority))
    only_measured = replace(job.synchronous or SynchronousSpec(), epochs=0)
    with DaemonClient(fleet_directory) as client:
        number = client.submit(replace(job, federated=None, synchronous=only_measured), code)
        console = tables.quiet_console() if output is Format.JSON else tables.console()
        info, _ = tables.JobView(console, ()).follow(client.watch(number))
        if info.state != "done":
            fail(info.error or f"job {number} was {info.state}", JOB)
        curves = client.curves(number)
    if picture:
        from millpond.host.cli import profile_plot  # loads numpy

        profile_plot.draw(curves.profiles, curves.batches, job.name, picture)
    if output is Format.JSON:
        tables.print_json(curves)
    else:
        tables.console().print(tables.curves(curves))


jobs = typer.Typer(invoke_without_command=True)


@jobs.callback()
def list_all(
    context: typer.Context, fleet_directory: FleetOption = DEFAULT_FLEET, output: FormatOption = Format.TEXT
) -> None:
    """List all jobs; 'compare' shows some of them side by side."""
    if context.invoked_subcommand is not None:
        return
    with DaemonClient(fleet_directory) as client:
        found = client.jobs()
    if output is Format.JSON:
        tables.print_json({"jobs": found})
    else:
        tables.console().print(tables.jobs(found))


@jobs.command()
def compare(
    context: typer.Context,
    numbers: Annotated[
        list[int],
        typer.Argument(metavar="JOB JOB...", help="The numbers of jobs.", autocompletion=complete_jobs),
    ],
    fleet_directory: Annotated[
        Path | None, typer.Option("--fleet", metavar="DIR", help="The fleet's directory.")
    ] = None,
    output: Annotated[Format | None, typer.Option("--format", help="How to print the result.")] = None,
) -> None:
    """Compare jobs: what each came to, and the keys in which their files differ."""
    assert context.parent is not None
    given = context.parent.params
    with DaemonClient(fleet_directory or given["fleet_directory"]) as client:
        records = [client.job(number) for number in dict.fromkeys(numbers)]
    found = JobComparison(
        tuple(_results(each) for each in records),
        differences([(each.job, each.code) for each in records]),
    )
    if (output or given["output"]) is Format.JSON:
        tables.print_json(found)
        return
    outcome, keys = tables.comparison(found)
    tables.console().print(outcome)
    if found.differences:
        tables.console().print()
        tables.console().print(keys)
    elif len(found.jobs) > 1:
        print("their definitions are the same")


def stop(
    job: Annotated[
        int, typer.Argument(metavar="JOB", help="The job's number.", autocompletion=complete_jobs)
    ],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Stop a job; its last finished round is kept."""
    with DaemonClient(fleet_directory) as client:
        client.stop(job)
    if output is Format.JSON:
        tables.print_json({"id": job, "state": "stopped"})
    else:
        print(f"job {job} is stopped")


def _results(job: JobRecord) -> ComparedJob:
    info = job.info
    return results(
        info.id,
        info.name,
        info.state,
        job.rounds,
        metric=info.metric,
        final=info.score,
        best=info.best,
    )
