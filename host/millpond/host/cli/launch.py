# SPDX-License-Identifier: Apache-2.0
"""Entry: the 'launch' command: sends the script, prints the workers' output, keeps their files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.api.launch import (
    LaunchEnded,
    LaunchOutput,
    LaunchSaved,
    StartLaunch,
    WorkerEnd,
)
from millpond.host.cli.exits import JOB, fail
from millpond.host.cli.launch_files import module_file, read_files, read_inputs
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.jobs import HOST
from millpond.host.terminal import printing
from millpond.host.terminal.output_folder import OutputFolder
from millpond.host.terminal.printing import Format
from millpond.train.distributed.launch_messages import script_digest

app = new_app()

MOST_LINES = 100_000
"""Lines of output in a JSON document: the last ones."""
_TOO_LATE = ("LD_", "MALLOC_", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONDEVMODE")
"""The beginnings of variables that take effect before a program begins."""
Events = Iterable[tuple[LaunchOutput | LaunchSaved | LaunchEnded, bytes]]


FilesOption = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="PATH", help="A file, or a folder, to lie where it lies here."),
]
WheelsOption = Annotated[
    list[Path] | None,
    typer.Option("--wheels", metavar="PATH", help="Packages to install: a wheel, or a folder of wheels."),
]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable of the environment.")
]
InputOption = Annotated[
    Path | None,
    typer.Option("--input", metavar="DIR", help="Files as --output leaves them; DIR/all is for each worker."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="Keep what the script saves, as DIR/WORKER/FILE."),
]
SharedOption = Annotated[
    Path | None,
    typer.Option(
        "--shared", metavar="DIR", help="A folder that all share, at $MILLPOND_SHARED; made if missing."
    ),
]
PrivateOption = Annotated[
    bool,
    typer.Option(
        "--private", help="Show private folders to the script, which then has millpond.train.group alone."
    ),
]
FoldersOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="private/FOLDER", help="With --private: these folders, not all."),
]
SignatureOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="An owner's signature of the digest.")
]
ProcessesOption = Annotated[
    int, typer.Option("--nproc-per-node", "--nproc_per_node", metavar="N", help="Processes on each worker.")
]


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[Path, typer.Argument(metavar="-- SCRIPT.py", help="Any torch.distributed script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="For the script.")] = None,
    devices: Annotated[str, typer.Option(metavar="csd0,csd1", help="These devices, not all of them.")] = "",
    host: Annotated[bool, typer.Option("--host/--no-host", help="Whether the host is worker 0.")] = True,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    processes: ProcessesOption = 1,
    files: FilesOption = None,
    wheels: WheelsOption = None,
    variables: EnvironmentOption = None,
    given: InputOption = None,
    shared: SharedOption = None,
    saved: OutputOption = None,
    most: Annotated[
        int, typer.Option("--output-limit", min=1, max=65536, help="MiB of files of each worker.")
    ] = 256,
    private: PrivateOption = False,
    folders: FoldersOption = None,
    signature: SignatureOption = None,
    digest: Annotated[bool, typer.Option("--digest", help="Print the script's digest; run nothing.")] = False,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a torch.distributed script (gloo) across host and devices, as torchrun does. Ctrl-C ends it."""
    left = list(arguments or ())
    if script == Path("-m") and left:  # behind --
        module, script = True, Path(left.pop(0))
    as_module = str(script) if module else ""
    file, here = module_file(as_module) if module else (script, True)
    if not here and (private or digest):
        raise LocalError(f"-m {script}: {file} is not here; a private launch has no installed modules")
    name, sent = read_files(file, files or (), installed=not here)
    if digest:
        found = script_digest(name, sent, left, as_module)
        printing.show(output, {"digest": found}, found)
        return
    _check_folders(folders, shared, private=private)
    start = StartLaunch(
        name,
        tuple(left),
        sent,
        tuple(name.strip() for name in devices.split(",") if name.strip()),
        host,
        most_saved=most << 20 if saved else 0,
        confined=private,
        folders=tuple(folders or ()),
        signature=signature.read_text() if signature else "",
        module=as_module,
        processes=processes,
        variables=tuple(map(_variable, variables or ())),
        inputs=bool(given or wheels),
        shares=shared is not None,
    )
    with DaemonClient(fleet_directory) as client, _opened(shared) as folder:
        events = client.launch(start, read_inputs(given, wheels or ()), folder)
        ended = _run(start, events, saved, as_json=output is Format.JSON)
    if ended.error:
        fail(ended.error, JOB, document=False)


def _check_folders(folders: Sequence[str] | None, shared: Path | None, *, private: bool) -> None:
    """Raise LocalError for folders that a launch cannot have."""
    if folders and not private:
        raise LocalError("--data is for --private")
    if shared and private:
        raise LocalError("--private scripts have no network, and their own files alone: leave --shared out")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise LocalError(f"--env {text}: this is not NAME=VALUE")
    return name, value


@contextlib.contextmanager
def _opened(folder: Path | None) -> Iterator[int | None]:
    """Yield an open folder, made if it is missing; None without one. The daemon opens nothing by a path."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _run(start: StartLaunch, events: Events, output: Path | None, *, as_json: bool) -> LaunchEnded:
    """Follow a launch: print lines as they come, each with its worker's name, or, as JSON, one document at
    the end; keep what the workers have saved in ``output``.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(output)) if output else None
        ended = _show(events, folder, as_json=as_json)
    if not as_json:
        for line in [
            *_about_variables(start),
            *_about_files(ended.workers, output),
            *_about_privacy(start, ended.workers),
        ]:
            print(f"millpond: {line}", file=sys.stderr)
    return ended


def _show(events: Events, folder: OutputFolder | None, *, as_json: bool) -> LaunchEnded:
    lines: deque[dict[str, str]] = deque(maxlen=MOST_LINES)
    for event, data in events:
        if isinstance(event, LaunchSaved):
            if folder:
                folder.write(event, data)
        elif isinstance(event, LaunchOutput):
            if as_json:
                lines += ({"worker": event.worker, "line": line} for line in event.lines)
            else:
                print("\n".join(f"[{event.worker}] {line}" for line in event.lines))
                sys.stdout.flush()
        else:
            if as_json:
                ended = {"error": event.error, "seconds": event.seconds}
                printing.print_json({"workers": event.workers, **ended, "lines": list(lines)})
            return event
    raise AssertionError("a launch without an end")


def _about_files(workers: Sequence[WorkerEnd], output: Path | None) -> Iterator[str]:
    """Yield what became of the files that workers have saved."""
    files, size = sum(worker.files for worker in workers), sum(worker.size for worker in workers)
    count = f"{files} file{'s' * (files != 1)} ({printing.size(size)})"
    if output:
        yield f"{count} came back to {output}"
        for worker in workers:
            if worker.left_out:
                shown = [*worker.named, *["..."][: worker.left_out - len(worker.named)]]
                yield f"{worker.name}: left out, as too much or no plain files: {', '.join(shown)}"
    elif files:
        names = ", ".join(worker.name for worker in workers if worker.files)
        yield f"{count} written by the script on {names}: gone; --output DIR brings such files back"


def _about_variables(start: StartLaunch) -> Iterator[str]:
    """Yield which of the user's variables the script itself has begun without."""
    late = [name for name, _ in start.variables if name.startswith(_TOO_LATE)]
    if names := [name for name in late if (name, "0") not in start.variables]:
        yield (
            f"{', '.join(names)}: without effect on the script itself, a fork of a process that began before;"
            " its hashes are those of PYTHONHASHSEED=0"
        )


def _about_privacy(start: StartLaunch, workers: Sequence[WorkerEnd]) -> Iterator[str]:
    if start.confined and (devices := [worker.name for worker in workers if worker.name != HOST]):
        command = f"millpond logs --device {devices[0]} launch-{Path(start.script).name}"
        yield f"what the script prints on a device stays there: '{command}' shows it"
