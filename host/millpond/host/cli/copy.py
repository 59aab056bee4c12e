# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): ``millpond cp``: copies between this machine and the public part of a volume."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import PathFs
from millpond.host.client import DaemonClient
from millpond.host.remote.copying import Copied, Copier, is_directory, plan
from millpond.wire.channel import Channel

_MISTAKES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EINVAL}
)


@dataclass(frozen=True, slots=True)
class CopyEndpoint:
    """A path as given by the user, on a device, or on this machine if ``device`` is empty."""

    text: str
    device: str
    path: str

    @property
    def name(self) -> str:
        """The name as given by the user, also of a symbolic link."""
        given = self.text.rstrip("/").rpartition("/")[2]
        return given if given not in ("", ".", "..") and ":" not in given else self.path.rpartition("/")[2]


def endpoint(text: str, devices: Sequence[str]) -> CopyEndpoint:
    """Parse a path: ``csd0:public/x`` is on a device of the fleet, others are on this machine."""
    name, colon, path = text.partition(":")
    if colon and name in devices:
        return CopyEndpoint(text, name, path.strip("/"))
    if colon and "/" not in name and not Path(text).exists():
        raise LocalError(f"there is no device '{name}' in the fleet; write ./{text} for a file of that name")
    return CopyEndpoint(text, "", _from_root(Path(text)))


def _from_root(path: Path) -> str:
    """Return the path below / without symbolic links on the way, which volumes do not follow. The file itself
    need not exist.
    """
    found = path.resolve() if path.exists() else path.parent.resolve() / path.name
    return str(found).lstrip("/")


def run(fleet: Path, sources: Sequence[str], target: str, console: Console, *, recursive: bool) -> Copied:
    """Copy files. Raises LocalError for a mistake, RemoteError if a device fails; finished files stay."""
    with DaemonClient(fleet) as client:
        names = [device.name for device in client.fleet.config.device]
    destination, origins = endpoint(target, names), [endpoint(source, names) for source in sources]
    for source in origins:
        if bool(source.device) == bool(destination.device):
            raise LocalError(
                f"{source.text} and {destination.text}: one must be on a device, the other on this machine"
            )
    if twice := [name for name, count in Counter(source.name for source in origins).items() if count > 1]:
        raise LocalError(f"{destination.text}: two of the sources would be '{twice[0]}' there")
    done = Copied()
    with _open_volume(fleet, destination) as there, _progress_bars(console) as progress:
        for source in origins:
            with _open_volume(fleet, source) as here:
                transfer = _Transfer(source, destination, here, there)
                transfer.check(into=len(origins) > 1 or target.endswith("/"))
                _copy(transfer, progress, done, recursive=recursive)
    return done


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A source and a target, and the volumes of both."""

    source: CopyEndpoint
    target: CopyEndpoint
    here: PathFs
    there: PathFs

    def check(self, *, into: bool) -> None:
        """Raise LocalError if the target must be a directory (``into``) and is none."""
        try:
            if not into or is_directory(self.there, self.target.path):
                return
        except OSError as error:
            raise self.failed(error) from None
        raise LocalError(f"{self.target.text}: there is no such directory")

    def failed(self, error: OSError) -> LocalError | RemoteError:
        """Return the error for the user: whose mistake it is, and what to do."""
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        text = f"{self.source.text} to {self.target.text}: {where}{error.strerror}"
        if error.errno in _MISTAKES:
            return LocalError(text)
        return RemoteError(f"{text}; the same command again goes on from there")


def _copy(transfer: _Transfer, progress: Progress, done: Copied, *, recursive: bool) -> None:
    try:
        ends = (transfer.here, transfer.source.path, transfer.there, transfer.target.path)
        items = plan(*ends, recursive=recursive, name=transfer.source.name)
        total = sum(item.attributes.size for item in items if stat.S_ISREG(item.attributes.mode))
        task = progress.add_task(transfer.source.text, total=total)
        mask = 0o777 if transfer.target.device else 0o777 & ~_umask()
        advance = functools.partial(progress.advance, task)
        copier = Copier(
            transfer.here, transfer.there, advance, done, origin=transfer.source.device, mask=mask
        )
        for item in items:
            if not copier.copy(item):
                text = f"{printable(item.source)}: neither a file, a directory nor a link; left out"
                progress.console.print(text, markup=False)
    except OSError as error:
        raise transfer.failed(error) from None


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _progress_bars(console: Console) -> Progress:
    """Return a bar for each source, with rate and time left."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def _open_volume(fleet: Path, at: CopyEndpoint) -> Iterator[PathFs]:
    """Open the volume of an endpoint, on a device or on this machine."""
    if not at.device:
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield PathAdapter(BackingFs(root))
        finally:
            os.close(root)
        return

    def dial(deadline: Deadline) -> Channel:
        with DaemonClient(fleet) as client:
            return client.volume(at.device, deadline)

    dial(Deadline.after(10)).close()  # so that an absent device is reported as such, and not as an errno
    tree = RemoteFs(dial)
    try:
        yield PathAdapter(tree)
    finally:
        with contextlib.suppress(OSError):
            tree.close()
