# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands 'federate new', 'federate join' and 'federate run': one model on several fleets."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli import exits
from millpond.host.cli.federation import project
from millpond.host.cli.federation.processes import LOOPBACK, Flower, wait_for_port
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, new_app
from millpond.host.fleet import directory
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.linux.sockets import free_port

app, federate = (
    new_app(),
    new_app(help="Train one model on the fleets of several hosts, by Flower.", no_args_is_help=True),
)
app.add_typer(federate, name="federate")

AppArgument = Annotated[Path, typer.Argument(metavar="NAME", help="The folder of the Flower app.")]
EnvironmentOption = Annotated[
    Path,
    typer.Option("--flower", metavar="DIR", envvar="MILLPOND_FLOWER", help="The environment with Flower."),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--root-certificates", metavar="FILE", help="Of the SuperLink; without one, no TLS."),
]
_ENVIRONMENT = Path(".flower")


@federate.command("new")
def new(
    name: AppArgument,
    job: Annotated[Path, typer.Option("--from", metavar="JOB", help="The job's file.")],
    every: Annotated[int, typer.Option(min=1, help="Rounds of a fleet in an outer round.")] = 1,
    output: FormatOption = Format.TEXT,
) -> None:
    """Write a Flower app that trains a job on several fleets."""
    files = project.create(name, job, every)
    text = f"{name} has {', '.join(files)}; README.md says how it runs"
    printing.show(output, {"folder": str(name), "files": files}, text)


@federate.command("join")
def join(
    name: AppArgument,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink's address.")],
    fleet_directory: FleetOption = DEFAULT_FLEET,
    flower: EnvironmentOption = _ENVIRONMENT,
    certificates: CertificateOption = None,
) -> None:
    """Take part with this host's fleet, as a SuperNode."""
    programs = Flower(flower, name)
    argv = programs.node(superlink, _node(name, fleet_directory), certificates)
    os.execve(argv[0], argv, programs.variables)  # noqa: S606


@federate.command("run")
def run(
    name: AppArgument,
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A SuperLink that runs; without it, one for a try.")
    ] = "",
    fleet: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Fleets of this machine, for a try.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="Fleets that take part.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Outer rounds.")] = None,
    flower: EnvironmentOption = _ENVIRONMENT,
    certificates: CertificateOption = None,
) -> None:
    """Run a federation until its last outer round.

    It runs on a SuperLink that is there, or on one of its own for a try with fleets of this machine. A run
    ends with this command. One that was broken off goes on after its last outer round.
    """
    programs, fleets = Flower(flower, name), fleet or []
    if not superlink and not fleets:
        raise LocalError("say --superlink HOST:PORT, or for a try --fleet DIR for each fleet of this machine")
    config: dict[str, str | int | float] = {"state": str(programs.folder)}
    if chosen := hosts or len(fleets):
        config["hosts"] = chosen
    if rounds:
        config["rounds"] = rounds
    nodes = [_node(name, each) for each in fleets]
    with exits.ended_by_signals(), ExitStack() as stack:
        if not superlink:
            port = free_port(LOOPBACK)
            superlink = f"{LOOPBACK}:{port}"
            wait_for_port(port, stack.enter_context(programs.started("superlink", programs.superlink(port))))
        for number, node in enumerate(nodes):
            argv = programs.node(superlink, node, certificates)
            stack.enter_context(programs.started(f"node-{number}", argv))
        programs.connect(superlink, certificates)
        code = programs.run(config)
    if code:
        raise LocalError(f"the federation has not ended well: see the logs in {programs.folder}")
    printing.show(Format.TEXT, {}, f"the model of each fleet's job is {programs.folder}/model.safetensors")


def _node(name: Path, fleet: Path) -> dict[str, str]:
    """Return the configuration of a fleet's SuperNode. Raises ConfigError for a folder without a fleet."""
    directory.read(fleet)
    return {"fleet": str(fleet.absolute()), "job": str(name.absolute() / project.JOB)}
