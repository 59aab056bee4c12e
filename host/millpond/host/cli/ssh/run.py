# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'run'."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from millpond.base.errors import LocalError
from millpond.base.text import named
from millpond.host.cli.exits import SSH, ended_by_signals
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AdminOption,
    AuthorityOption,
    FleetOption,
    FormatOption,
    complete_device_sets,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records import device_set
from millpond.host.terminal import printing, streams
from millpond.host.terminal.folded_output import FoldedOutput
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting
from millpond.host.terminal.streams import WholeOutput
from millpond.images.ondevice.sshd_config import ADMIN, USER, SshServer

if TYPE_CHECKING:
    from millpond.host.remote.run_many import Ended, ParallelRun

app = new_app()
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class _Command:
    """A command line, the fleet whose devices run it, as which user, and how its output is shown."""

    line: str
    fleet: Path
    authority: Path | None
    server: SshServer
    timeout: float | None
    reads: bool
    as_it_comes: bool
    as_json: bool


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


@app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    devices: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICES",
            help="Devices: csd0, csd0,csd1, csd[0-3,7], or a group of fleet.toml: @fast. None with --all.",
            autocompletion=complete_device_sets,
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND...",
            help="The command. Its words are joined and passed to a shell on the device, as ssh does.",
        ),
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Run it on all devices of the fleet.")] = False,
    no_input: Annotated[
        bool, typer.Option("-n", "--no-input", help="Give the command no standard input.")
    ] = False,
    as_it_comes: Annotated[
        bool,
        typer.Option("--stream", help="With several devices, print each line as it comes, behind [csd0]."),
    ] = False,
    admin: AdminOption = False,
    authority: AuthorityOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="End the command after this time, on each device; exit code 124."
        ),
    ] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a command on devices over SSH.

    Input, output and exit code are passed on. All behind -- is the command.

    With several devices, each device gets the whole input. When all have ended, equal output is printed once,
    under the names of its devices. The exit code is the greatest one of all devices; --format json has the
    exit code of each. A device that cannot be reached counts as 255 and stops no other device. Ctrl-C,
    SIGTERM, SIGHUP and a lost connection end the command on all devices, by SIGHUP. A process in a session of
    its own (setsid) goes on.
    """
    words = [*([devices] if devices else []), *(command or [])] if everywhere else command or []
    line = " ".join(words[1:] if words[:1] == ["--"] else words)
    if not line or not (everywhere or devices):
        raise LocalError("a device and a command are needed, such as: millpond run csd0 -- uname -a")
    server, as_json = ADMIN if admin else USER, output is Format.JSON
    asked = _Command(line, fleet_directory, authority, server, timeout, not no_input, as_it_comes, as_json)
    with ended_by_signals():
        if not everywhere and devices and device_set.is_one(devices):
            _run_on_one(asked, devices)
        else:
            _run_on_many(asked, "" if everywhere else devices or "")


def _run_on_many(asked: _Command, names: str) -> None:
    from millpond.host.remote import ssh  # imports paramiko, which takes long
    from millpond.host.remote.run_many import ParallelRun, choose
    from millpond.host.remote.shared_input import SharedInput

    with DaemonClient(asked.fleet, asked.authority) as client:
        ssh.key_for(client.fleet, asked.server)  # without the key there is nothing to try
        chosen = choose(client.devices(), names, client.fleet.config.groups)
    many = ParallelRun(
        asked.fleet,
        asked.line,
        asked.server,
        asked.timeout,
        capture=asked.as_json,
        authority=asked.authority,
        given=SharedInput(sys.stdin.fileno()) if asked.reads else None,
    )
    ended = _show(many, chosen, as_it_comes=asked.as_it_comes, shows=not asked.as_json)
    if asked.as_json:
        printing.print_json([one.captured for one in ended])
    for one in ended:
        if one.result.exit_code:
            reason = one.result.error or f"exit code {one.result.exit_code}"
            print(f"millpond: {one.device}: {reason.removeprefix(f'{one.device}: ')}", file=sys.stderr)
    raise typer.Exit(max((one.result.exit_code for one in ended), default=0))


def _run_on_one(asked: _Command, device: str) -> None:
    from millpond.host.remote import ssh

    given = functools.partial(streams.read, sys.stdin.fileno(), _CHUNK) if asked.reads else None
    server = asked.server
    with DaemonClient(asked.fleet, asked.authority) as client, client.dial(device, server.port) as sock:
        if asked.as_json:
            captured = ssh.capture(client.fleet, device, sock, asked.line, server, asked.timeout, given)
            printing.print_json({"device": device} | captured)
            raise typer.Exit(int(captured["exit_code"]))
        with ssh.connected(client.fleet, device, sock, server) as transport:
            out, err = (WholeOutput(stream.fileno()) for stream in (sys.stdout, sys.stderr))
            result = ssh.RemoteCommand(transport, asked.line).run(given, out, err, asked.timeout)
    if result.error:
        print(f"millpond: {device}: {result.error}", file=sys.stderr)
    raise typer.Exit(result.exit_code if result.exit_code >= 0 else SSH)


def _left(names: Collection[str]) -> str:
    return f"waits for {named(list(names))}"


def _show(
    fleet_run: ParallelRun, chosen: dict[str, str], *, as_it_comes: bool, shows: bool
) -> Sequence[Ended]:
    """Print output, as lines come or at the end. Returns the ends, in the fleet's order."""
    from millpond.host.remote.run_many import OutputLines

    ended: dict[str, Ended] = {}
    folds = shows and not as_it_comes
    with (
        _folded(list(chosen)) if not as_it_comes else _streamed() as shown,
        waiting("run", f"{_left(chosen)}: --stream shows output as it comes", shows=folds) as tell,
    ):
        for event in fleet_run.follow(chosen):
            if isinstance(event, OutputLines):
                shown(event.device, event.lines, is_error=event.is_error)
            else:
                ended[event.device] = event
                tell(_left([name for name in chosen if name not in ended]))
    return [ended[name] for name in chosen]


@contextmanager
def _folded(devices: Sequence[str]) -> Iterator[Any]:
    """Yield what takes lines and keeps them; the end of the block prints them, also where it is cut short."""
    held = FoldedOutput(devices)
    try:
        yield held.add
    except BrokenPipeError:  # nobody reads
        held.forget()
        raise
    finally:
        held.show()


@contextmanager
def _streamed() -> Iterator[Any]:
    def show(device: str, lines: Sequence[str], *, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        print("\n".join(f"[{device}] {line}" for line in lines), file=stream, flush=True)

    yield show
