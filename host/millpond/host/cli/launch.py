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
    LaunchInput,
    LaunchNews,
    LaunchOutput,
    LaunchPrepares,
    LaunchSaved,
    StartLaunch,
    WorkerEnd,
)
from millpond.host.cli.exits import JOB, fail
from millpond.host.cli.options import DEFAULT_FLEET, DevicesOption, FleetOption, FormatOption, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.client.launch_hosts import LaunchHosts, hosts_of
from millpond.host.client.launch_inputs import CACHES, InputFile, list_inputs, read_inputs
from millpond.host.fleet import directory
from millpond.host.records.jobs import HOST
from millpond.host.terminal import printing
from millpond.host.terminal.launch_progress import LaunchProgress
from millpond.host.terminal.output_folder import OutputFolder
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import view
from millpond.train.distributed.launch_messages import (
    ElasticAgents,
    check_files,
    check_names,
    check_size,
    script_digest,
)

app = new_app()

MOST_LINES = 100_000
"""Lines of output in a JSON document: the last ones."""
_TOO_LATE = ("LD_", "MALLOC_", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONDEVMODE")
"""The beginnings of variables that take effect before a program begins."""
Events = Iterable[tuple[LaunchNews, bytes]]


FilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", metavar="PATH", help="Send a file or folder; a worker finds it under the same path."
    ),
]
WheelsOption = Annotated[
    list[Path] | None,
    typer.Option("--wheels", metavar="PATH", help="Install these packages: a wheel, or a folder of wheels."),
]
EnvironmentOption = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Set a variable of the environment.")
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="DIR",
        help="Send the files of DIR/WORKER, as --output leaves them; DIR/all is for each worker.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", help="Keep the files that the script saves, as DIR/WORKER/FILE."),
]
OutputLimitOption = Annotated[
    int, typer.Option("--output-limit", min=1, max=65536, help="The most MiB of files from each worker.")
]
SharedOption = Annotated[
    Path | None,
    typer.Option(
        "--shared",
        metavar="DIR",
        help="A folder that all workers share, at $MILLPOND_SHARED; made if missing.",
    ),
]
TransformsOption = Annotated[
    Path | None,
    typer.Option(
        "--transforms",
        metavar="FILE.py",
        help="Streams of the devices' public data have its functions of a sample, by name.",
    ),
]
PrivateOption = Annotated[
    bool,
    typer.Option(
        "--private",
        help="Show private folders to the script. Then it has no network, only millpond.train.group.",
    ),
]
FoldersOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="private/FOLDER", help="With --private, show only these folders."),
]
SignatureOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The file of an owner's signature of the digest.")
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--nproc-per-node", "--nproc_per_node", metavar="N", help="The number of processes on each worker."
    ),
]
RestartsOption = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        "--max_restarts",
        min=0,
        metavar="N",
        help="Start a failed script again, as torchrun does.",
    ),
]
NodesOption = Annotated[
    str,
    typer.Option(
        "--nnodes", metavar="MIN:MAX", help="Go on with MIN workers or more when a device is lost or comes."
    ),
]
RendezvousOption = Annotated[
    str,
    typer.Option("--rdzv-conf", "--rdzv_conf", metavar="KEY=VALUE,...", help="Settings of the rendezvous."),
]
HostsOption = Annotated[
    str,
    typer.Option(
        "--hosts",
        metavar="HOST[=ADDRESS],...",
        help="Run on the devices of these hosts; ranks are in this order. This one is localhost.",
    ),
]
ShellOption = Annotated[
    str, typer.Option("--rsh", envvar="MILLPOND_RSH", help="The remote shell by which --hosts are reached.")
]
PlainOption = Annotated[
    bool,
    typer.Option("--plain-hosts", help="Accept that links between --hosts are not encrypted."),
]


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[Path, typer.Argument(metavar="-- SCRIPT.py", help="Any torch.distributed script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="Its arguments.")] = None,
    devices: DevicesOption = "",
    host: Annotated[bool, typer.Option("--host/--no-host", help="Whether the host is worker 0.")] = True,
    module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")] = False,
    processes: ProcessesOption = 1,
    nodes: NodesOption = "",
    restarts: RestartsOption = None,
    rendezvous: RendezvousOption = "",
    hosts: HostsOption = "",
    rsh: ShellOption = "ssh",
    plain: PlainOption = False,
    files: FilesOption = None,
    wheels: WheelsOption = None,
    variables: EnvironmentOption = None,
    given: InputOption = None,
    shared: SharedOption = None,
    transforms: TransformsOption = None,
    saved: OutputOption = None,
    most: OutputLimitOption = 256,
    private: PrivateOption = False,
    folders: FoldersOption = None,
    signature: SignatureOption = None,
    digest: Annotated[bool, typer.Option("--digest", help="Only print the script's digest.")] = False,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Run a torch.distributed script across host and devices. Like torchrun, with gloo; Ctrl-C ends it."""
    as_module, script, left = _program(script, arguments or (), module=module)
    file, here = _file_of(script, module=bool(as_module), must_be_here=private or digest)
    changing = name_of(transforms) if transforms else ""
    name, sent = read_files(file, [*(files or ()), *([transforms] if transforms else ())], installed=not here)
    if digest:
        _show_digest(script_digest(name, sent, left, as_module, changing), output)
        return
    _check_folders(folders, shared, private=private, hosts=hosts)
    start = StartLaunch(
        name,
        tuple(left),
        sent,
        _devices(devices, fleet_directory, hosts),
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
        transforms=changing,
        elastic=_elastic(nodes, restarts, rendezvous),
    )
    several = LaunchHosts(hosts_of(hosts), rsh, plain, fleet_directory) if hosts else None
    with _progress(inputs := list_inputs(given, wheels or ()), output) as progress:
        sending = progress.sending(read_inputs(inputs))
        with _events(start, sending, fleet_directory, shared, several) as events:
            _run(start, events, saved, progress, as_json=output is Format.JSON)


def _progress(inputs: Sequence[InputFile], output: Format) -> LaunchProgress:
    shown = view(terminal=sys.stdout.isatty(), shows=output is Format.TEXT)
    return LaunchProgress(shown, sum(each.size for each in inputs))


def _program(script: Path, arguments: Sequence[str], *, module: bool) -> tuple[str, Path, list[str]]:
    """Return the module that is run, "" for a script; its name, and its arguments. Behind -- may stand -m."""
    left = list(arguments)
    if script == Path("-m") and left:
        module, script = True, Path(left.pop(0))
    return str(script) if module else "", script, left


def _devices(text: str, fleet: Path, hosts: str) -> tuple[str, ...]:
    """Return the devices that a user names: csd0.HOST and so on with several ``hosts``. Raises LocalError."""
    if not text:
        return ()
    if not hosts:
        return directory.read(fleet).named(text)
    known, found = [host.name for host in hosts_of(hosts)], tuple(text.split(","))
    for name in found:
        if name.partition(".")[2] not in known:
            raise LocalError(f"--devices {text}: with --hosts, name devices as csd0.{known[0]}")
    return found


def _check_folders(folders: Sequence[str] | None, shared: Path | None, *, private: bool, hosts: str) -> None:
    """Raise LocalError for folders that a launch cannot have."""
    if hosts and private:
        raise LocalError("--private scripts meet in one host's daemon: leave --hosts out, or use federate")
    if hosts and shared:
        raise LocalError("--shared is a folder of one host: leave --hosts or --shared out")
    if folders and not private:
        raise LocalError("--data is for --private")
    if shared and private:
        raise LocalError("--private scripts have no network, and their own files alone: leave --shared out")


def _show_digest(found: str, output: Format) -> None:
    printing.show(output, {"digest": found}, found)


def _file_of(script: Path, *, module: bool, must_be_here: bool) -> tuple[Path, bool]:
    """Return the file of a script or ``module``, and whether it is here. Raises LocalError if it must be."""
    file, here = module_file(str(script)) if module else (script, True)
    if not here and must_be_here:
        raise LocalError(f"-m {script}: {file} is not here; a private launch has no installed modules")
    return file, here


def _elastic(nodes: str, restarts: int | None, conf: str) -> ElasticAgents | None:
    """Return how torch's elastic agents run the script, if options of torchrun ask for them; the numbers of
    workers are 0 for all. Raises LocalError.
    """
    if not nodes and restarts is None and not conf:
        return None
    least, _, most = nodes.partition(":")
    if nodes and not (least.isdecimal() and (most or least).isdecimal()):
        raise LocalError(f"--nnodes {nodes}: this is neither N nor MIN:MAX")
    pairs = [text.partition("=") for text in conf.split(",") if text]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise LocalError(f"--rdzv-conf {bad[0]}: this is not KEY=VALUE")
    settings = tuple((key.strip(), value.strip()) for key, _, value in pairs)
    return ElasticAgents(int(least or 0), int(most or least or 0), restarts or 0, settings)


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


@contextlib.contextmanager
def _events(
    start: StartLaunch,
    inputs: Iterable[tuple[LaunchInput, bytes]],
    fleet: Path,
    shared: Path | None,
    several: LaunchHosts | None,
) -> Iterator[Events]:
    """Yield the events of a launch on ``several`` hosts, or else on the ``fleet`` of this one."""
    if several:
        with contextlib.closing(several.launch(start, inputs)) as events:
            yield events
        return
    with DaemonClient(fleet) as client, _opened(shared) as folder:
        yield client.launch(start, inputs, folder)


def _run(
    start: StartLaunch, events: Events, output: Path | None, progress: LaunchProgress, *, as_json: bool
) -> None:
    """Follow a launch: print lines as they come, each with its worker's name, or, as JSON, one document at
    the end; keep what the workers have saved in ``output``. Exits where it has failed.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(output)) if output else None
        ended = _show(events, folder, progress, as_json=as_json)
    if not as_json:
        for line in [
            *_about_variables(start),
            *_about_files(ended.workers, output),
            *_about_privacy(start, ended.workers),
        ]:
            print(f"millpond: {line}", file=sys.stderr)
    if ended.error:
        fail(ended.error, JOB, document=False)


def _show(
    events: Events, folder: OutputFolder | None, progress: LaunchProgress, *, as_json: bool
) -> LaunchEnded:
    lines: deque[dict[str, str]] = deque(maxlen=MOST_LINES)
    for event, data in events:
        if isinstance(event, LaunchPrepares):
            progress.take(event)
        elif isinstance(event, LaunchSaved):
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


def read_files(
    script: Path, paths: Sequence[Path], *, installed: bool = False
) -> tuple[str, dict[str, bytes]]:
    """Return the script's name and the files to send, without the script's own if it is ``installed`` there,
    by their names in the workers' folder: their paths below the current folder, or their own names if they
    lie elsewhere; of folders all that they hold. Nothing is read before names and sizes have been checked.
    Raises LocalError, OSError.
    """
    own = name_of(script)
    found = {} if installed else {own: script}
    for path in paths:
        for name, file in _named(path):
            if name in found and not found[name].samefile(file):
                raise LocalError(f"two files are named '{name}'")
            found[name] = file
            check_size(len(found), 0)
    check_names(own, found, installed=installed)
    check_size(len(found), sum(len(name.encode()) + path.stat().st_size for name, path in found.items()))
    files = {name: path.read_bytes() for name, path in found.items()}
    check_files(own, files, installed=installed)
    return own, files


def name_of(path: Path) -> str:
    """Return a file's or folder's name in the workers' folder; that of the current folder is its own."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - links stay as they are
    inside = whole != here and whole.is_relative_to(here)
    return (whole.relative_to(here) if inside else Path(whole.name)).as_posix()


def module_file(name: str) -> tuple[Path, bool]:
    """Return the file of the module that ``python -m name`` would run here, and whether it is here: otherwise
    it is installed where it runs. Raises LocalError for what is no name of a module.
    """
    parts = name.split(".")
    if not all(parts) or "/" in name:
        raise LocalError(f"-m {name}: this is no name of a module")
    path = Path(*parts)
    files = (path.with_name(f"{path.name}.py"), path / "__main__.py")
    return next(((file, True) for file in files if file.is_file()), (files[0], False))


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    name = name_of(path)
    if not path.is_dir():
        yield name, _plain(path)
        return
    base = Path() if Path(os.path.abspath(path)) == Path.cwd() else Path(name)  # noqa: PTH100 - as above
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(folder for folder in folders if folder != CACHES)
        for each in sorted(names):
            file = Path(folder, each)
            yield (base / file.relative_to(path)).as_posix(), _plain(file)
        for link in (Path(folder, each) for each in folders):
            if link.is_symlink():
                raise LocalError(f"{link}: a link to a folder cannot be sent; name that folder itself")


def _plain(path: Path) -> Path:
    path.stat()  # raises if it is not there
    if not path.is_file():
        raise LocalError(f"{path}: only plain files can be sent")
    return path
