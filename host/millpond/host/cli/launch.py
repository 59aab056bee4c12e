# SPDX-License-Identifier: Apache-2.0
"""Edge: the 'launch' command: reads the script's files, prints the workers' output, keeps their files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.api.launch import LaunchEnded, LaunchOutput, LaunchSaved, StartLaunch, WorkerEnd
from millpond.host.client import DaemonClient
from millpond.host.model.jobs import HOST
from millpond.host.terminal import printing
from millpond.host.terminal.output_folder import OutputFolder
from millpond.wire.launch_messages import check_files, check_names, check_size, script_digest

MOST_LINES = 100_000
"""Lines of output in a JSON document: the last ones."""
_CACHES = "__pycache__"


def read_files(script: Path, paths: Sequence[Path]) -> dict[str, bytes]:
    """Return the files to send, by their names in the workers' folder: the script by its own name, others by
    their paths below the current folder, or by their own names if they lie elsewhere; of folders all that
    they hold. Nothing is read before names and sizes have been checked. Raises LocalError, OSError.
    """
    found = {script.name: script}
    for path in paths:
        for name, file in _named(path):
            if name in found and not found[name].samefile(file):
                raise LocalError(f"two files are named '{name}'")
            found[name] = file
            check_size(len(found), 0)
    check_names(script.name, found)
    check_size(len(found), sum(len(name.encode()) + path.stat().st_size for name, path in found.items()))
    files = {name: path.read_bytes() for name, path in found.items()}
    check_files(script.name, files)
    return files


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    whole, here = Path(os.path.abspath(path)), Path.cwd()  # noqa: PTH100 - links stay as they are
    name = whole.relative_to(here) if whole != here and whole.is_relative_to(here) else Path(whole.name)
    if not path.is_dir():
        yield name.as_posix(), _plain(path)
        return
    base = Path() if whole == here else name
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(folder for folder in folders if folder != _CACHES)
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


def run(client: DaemonClient, start: StartLaunch, output: Path | None, *, as_json: bool) -> LaunchEnded:
    """Run a launch: print lines as they come, each with its worker's name, or, as JSON, one document at the
    end; keep what the workers have saved in ``output``.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(output)) if output else None
        ended = _show(client, start, folder, as_json=as_json)
    if not as_json:
        for line in [*_about_files(ended.workers, output), *_about_privacy(start, ended.workers)]:
            print(f"millpond: {line}", file=sys.stderr)
    return ended


def _show(
    client: DaemonClient, start: StartLaunch, folder: OutputFolder | None, *, as_json: bool
) -> LaunchEnded:
    lines: deque[dict[str, str]] = deque(maxlen=MOST_LINES)
    for event, data in client.launch(start):
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


def _about_privacy(start: StartLaunch, workers: Sequence[WorkerEnd]) -> Iterator[str]:
    if start.confined and (devices := [worker.name for worker in workers if worker.name != HOST]):
        command = f"millpond logs --device {devices[0]} launch-{start.script}"
        yield f"what the script prints on a device stays there: '{command}' shows it"


def show_digest(script: str, files: Mapping[str, bytes], *, as_json: bool) -> None:
    """Print the digest of a script and its files, which owners of devices list or sign."""
    found = script_digest(script, files)
    if as_json:
        printing.print_json({"digest": found})
    else:
        print(found)
