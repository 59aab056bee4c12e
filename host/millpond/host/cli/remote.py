# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands that work on devices over SSH, 'run' and 'shell', and 'logs'."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from millpond.base.errors import LocalError
from millpond.host.api.daemon import job_number
from millpond.host.cli.exits import SSH, ended_by_signals
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AuthorityOption,
    DeviceArgument,
    FleetOption,
    FormatOption,
    complete_devices,
    complete_jobs,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.remote import log_follow
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.streams import WholeOutput
from millpond.images.ondevice.sshd_config import ADMIN, USER, SshServer

if TYPE_CHECKING:
    from millpond.host.remote.run_many import Ended, ParallelRun

app = new_app()


@dataclass(frozen=True, slots=True)
class _Place:
    """The fleet's directory, and that of its owner's keys if they are apart."""

    fleet: Path
    authority: Path | None


class RunCommand(TyperCommand):
    """The command 'run': options of its own may come before and behind the device, up to "--" or the first
    word of what is run.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's own options first, where the parser expects them."""
        valued = {
            name
            for option in self.params
            if isinstance(option, TyperOption) and not option.is_flag
            for name in option.opts
        }
        return super().parse_args(ctx, options_first(args, valued))


def options_first(arguments: Sequence[str], valued: Collection[str]) -> list[str]:
    """Return the arguments of 'run' with its own options before the device. ``valued`` take a value each."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    left, options, words = deque(arguments[:end]), list[str](), list[str]()
    while left and len(words) < (1 if "--all" in options else 2):
        word = left.popleft()
        if not word.startswith("-"):
            words.append(word)
            continue
        options.append(word)
        if word in valued and left:
            options.append(left.popleft())
    return [*options, *words, *left, *arguments[end:]]


AdminOption = Annotated[
    bool, typer.Option("--admin", help="As root of the whole device, by the fleet's admin key.")
]


@app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    devices: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICE[,DEVICE...]",
            help="Names such as csd0; none with --all.",
            autocompletion=complete_devices,
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="Joined, and passed to a shell there, as by ssh."),
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="On all devices of the fleet.")] = False,
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="End the command after so long, on each device; exit code 124."
        ),
    ] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a command on a device over SSH, passing on input, output, exit code. All behind -- is the command.

    On several devices at once it has no input, each line of output begins with its device's name, and the
    exit code is the greatest of all; a device that cannot be reached counts as 255 and stops no other.
    Ctrl-C, SIGTERM and SIGHUP end it everywhere, by SIGHUP, as does a lost connection; what runs in a session
    of its own (setsid) goes on.
    """
    words = [*([devices] if devices else []), *(command or [])] if everywhere else command or []
    line = " ".join(words[1:] if words[:1] == ["--"] else words)
    if not line or not (everywhere or devices):
        raise LocalError("a device and a command are needed, such as: millpond run csd0 -- uname -a")
    server = ADMIN if admin else USER
    place = _Place(fleet_directory, authority)
    with ended_by_signals():
        if everywhere or not devices or "," in devices:
            _run_on_many(place, "" if everywhere else devices or "", line, server, timeout, output)
        else:
            _run_on_one(place, devices, line, server, timeout, output)


def _run_on_many(
    place: _Place, names: str, line: str, server: SshServer, timeout: float | None, output: Format
) -> None:
    from millpond.host.remote import ssh  # imports paramiko, which takes long
    from millpond.host.remote.run_many import ParallelRun, choose

    with DaemonClient(place.fleet, place.authority) as client:
        ssh.key_for(client.fleet, server)  # without the key there is nothing to try
        chosen = choose(client.devices(), names)
    capture = output is Format.JSON
    many = ParallelRun(place.fleet, line, server, timeout, capture=capture, authority=place.authority)
    ended = _show(many, chosen)
    if output is Format.JSON:
        printing.print_json([one.captured for one in ended])
    for one in ended:
        if one.result.exit_code:
            reason = one.result.error or f"exit code {one.result.exit_code}"
            print(f"millpond: {one.device}: {reason.removeprefix(f'{one.device}: ')}", file=sys.stderr)
    raise typer.Exit(max((one.result.exit_code for one in ended), default=0))


def _run_on_one(
    place: _Place, device: str, line: str, server: SshServer, timeout: float | None, output: Format
) -> None:
    from millpond.host.remote import ssh

    with DaemonClient(place.fleet, place.authority) as client, client.dial(device, server.port) as sock:
        if output is Format.JSON:
            captured = ssh.capture(client.fleet, device, sock, line, server, timeout)
            printing.print_json({"device": device} | captured)
            raise typer.Exit(int(captured["exit_code"]))
        with ssh.connected(client.fleet, device, sock, server) as transport:
            out, err = (WholeOutput(stream.fileno()) for stream in (sys.stdout, sys.stderr))
            result = ssh.RemoteCommand(transport, line).run(sys.stdin.fileno(), out, err, timeout)
    if result.error:
        print(f"millpond: {device}: {result.error}", file=sys.stderr)
    raise typer.Exit(result.exit_code if result.exit_code >= 0 else SSH)


def _show(fleet_run: ParallelRun, chosen: dict[str, str]) -> Sequence[Ended]:
    """Print lines as they come. Returns the ends, in the fleet's order."""
    from millpond.host.remote.run_many import OutputLines

    ended: dict[str, Ended] = {}
    for event in fleet_run.follow(chosen):
        if isinstance(event, OutputLines):
            stream = sys.stderr if event.is_error else sys.stdout
            print("\n".join(f"[{event.device}] {line}" for line in event.lines), file=stream, flush=True)
        else:
            ended[event.device] = event
    return [ended[name] for name in chosen]


@app.command()
def shell(
    device: DeviceArgument,
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
) -> None:
    """Open a shell on a device over SSH."""
    from millpond.host.remote import ssh

    server = ADMIN if admin else USER
    with (
        DaemonClient(fleet_directory, authority) as client,
        client.dial(device, server.port) as sock,
        ssh.connected(client.fleet, device, sock, server) as transport,
    ):
        raise typer.Exit(ssh.shell(transport))


def complete_logs(context: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """Return what has a log: devices and jobs."""
    return [*complete_devices(context, incomplete), *complete_jobs(context, incomplete)]


@app.command()
def logs(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE|JOB", help="A device's name or a job's number.", autocompletion=complete_logs
        ),
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Then new lines as they come, until Ctrl-C or the job's end; as JSON, a document per line.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="The job's own log on a device, by the fleet's admin key: prints and whole tracebacks. "
            "Jobs of one name share one; that of a private launch is launch-SCRIPT.py.",
            autocompletion=complete_devices,
        ),
    ] = "",
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the log of a device's agent, or of a job. What a job prints on a device stays there.

    Only root of the device reads that, since it can hold private data: 'millpond logs --device csd0 JOB'.
    """
    if device:
        _show_job_log(_Place(fleet_directory, authority), device, target, lines, output, follow=follow)
        return
    with DaemonClient(fleet_directory) as client:
        if follow:
            _follow(client, target, lines, as_json=output is Format.JSON)
            return
        found = client.log(target, lines)
    if output is Format.TEXT:
        print("\n".join(found))
    else:
        printing.print_json({"target": target, "lines": found})


def _show_job_log(place: _Place, device: str, job: str, lines: int, output: Format, *, follow: bool) -> None:
    from millpond.host.remote import job_log  # imports paramiko, which takes long

    if job_number(job) is None and not job_log.is_launch(job):
        raise LocalError(f"'{job}' is no job's number, such as in: millpond logs --device {device} 3")
    found = job_log.read(place.fleet, device, job, lines, follow=follow, authority=place.authority)
    if output is Format.TEXT:
        for line in found:
            print(line, flush=True)
    elif follow:
        for line in found:
            print(json.dumps({"target": job, "device": device, "line": line}), flush=True)
    else:
        printing.print_json({"target": job, "device": device, "lines": list(found)})


def _follow(client: DaemonClient, target: str, lines: int, *, as_json: bool) -> None:
    for entry in log_follow.follow(client, target, lines):
        if as_json:
            kind = "event" if entry.is_event else "line"
            print(json.dumps({"target": target, kind: entry.text}), flush=True)
        elif entry.is_event:
            print(f"millpond: {entry.text}", file=sys.stderr, flush=True)
        else:
            print(entry.text, flush=True)
