"""Edge (the terminal): ``millpond cp``: between this machine and the public part of a device's volume."""

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
    """A path as it was given, on a device or, with none, on this machine."""

    text: str
    device: str
    path: str

    @property
    def name(self) -> str:
        """What it is called, also if it is a link to something else."""
        given = self.text.rstrip("/").rpartition("/")[2]
        return given if given not in ("", ".", "..") and ":" not in given else self.path.rpartition("/")[2]


def place(text: str, devices: Sequence[str]) -> CopyEndpoint:
    """``csd0:public/x`` is on a device of the fleet, all others on this machine."""
    name, colon, path = text.partition(":")
    if colon and name in devices:
        return CopyEndpoint(text, name, path.strip("/"))
    if colon and "/" not in name and not Path(text).exists():
        raise LocalError(f"there is no device '{name}' in the fleet; write ./{text} for a file of that name")
    return CopyEndpoint(text, "", _from_root(Path(text)))


def _from_root(path: Path) -> str:
    """Without links on the way, which volumes do not follow; the last name need not be there."""
    found = path.resolve() if path.exists() else path.parent.resolve() / path.name
    return str(found).lstrip("/")


def run(fleet: Path, sources: Sequence[str], target: str, console: Console, *, recursive: bool) -> Copied:
    """Copy. Raises LocalError for a mistake, RemoteError if a device fails; what is done by then is kept."""
    with DaemonClient(fleet) as client:
        names = [device.name for device in client.fleet.config.device]
    goes, come = place(target, names), [place(source, names) for source in sources]
    for source in come:
        if bool(source.device) == bool(goes.device):
            raise LocalError(
                f"{source.text} and {goes.text}: one must be on a device, the other on this machine"
            )
    if twice := [name for name, count in Counter(source.name for source in come).items() if count > 1]:
        raise LocalError(f"{goes.text}: two of the sources would be '{twice[0]}' there")
    done = Copied()
    with _opened(fleet, goes) as there, _shown(console) as progress:
        for source in come:
            with _opened(fleet, source) as here:
                way = _Way(source, goes, here, there)
                way.check(into=len(come) > 1 or target.endswith("/"))
                _copy(way, progress, done, recursive=recursive)
    return done


@dataclass(frozen=True, slots=True)
class _Way:
    """From where to where, with the volumes of both."""

    source: CopyEndpoint
    target: CopyEndpoint
    here: PathFs
    there: PathFs

    def check(self, *, into: bool) -> None:
        """Raises LocalError if the target must be a directory (``into``) and is none."""
        try:
            if not into or is_directory(self.there, self.target.path):
                return
        except OSError as error:
            raise self.failed(error) from None
        raise LocalError(f"{self.target.text}: there is no such directory")

    def failed(self, error: OSError) -> LocalError | RemoteError:
        """The error as people see it: whose, and what to do."""
        where = f"{printable(str(error.filename))}: " if error.filename else ""
        text = f"{self.source.text} to {self.target.text}: {where}{error.strerror}"
        if error.errno in _MISTAKES:
            return LocalError(text)
        return RemoteError(f"{text}; the same command again goes on from there")


def _copy(way: _Way, progress: Progress, done: Copied, *, recursive: bool) -> None:
    try:
        ends = (way.here, way.source.path, way.there, way.target.path)
        items = plan(*ends, recursive=recursive, name=way.source.name)
        total = sum(item.attributes.size for item in items if stat.S_ISREG(item.attributes.mode))
        task = progress.add_task(way.source.text, total=total)
        mask = 0o777 if way.target.device else 0o777 & ~_umask()
        advance = functools.partial(progress.advance, task)
        copier = Copier(way.here, way.there, advance, done, origin=way.source.device, mask=mask)
        for item in items:
            if not copier.copy(item):
                told = f"{printable(item.source)}: neither a file, a directory nor a link; left out"
                progress.console.print(told, markup=False)
    except OSError as error:
        raise way.failed(error) from None


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _shown(console: Console) -> Progress:
    """A bar for each source, with rate and time left."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def _opened(fleet: Path, at: CopyEndpoint) -> Iterator[PathFs]:
    """The volume that a place is in."""
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

    dial(Deadline.after(10)).close()  # an absent device is told as such, and not as an errno
    tree = RemoteFs(dial)
    try:
        yield PathAdapter(tree)
    finally:
        with contextlib.suppress(OSError):
            tree.close()
