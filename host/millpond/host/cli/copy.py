# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): ``millpond cp``: copies between this machine and the public part of a volume."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import BackingBulk
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import causes
from millpond.host.client.connection import DaemonConnection
from millpond.host.fleet import directory
from millpond.host.remote.copying import Copier, is_directory
from millpond.host.remote.small_copies import Copied, CopyFailed, naming
from millpond.host.terminal.printing import print_json, size
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


def _check_public(at: CopyEndpoint, *, is_target: bool) -> None:
    """Raise LocalError for the private part of a device: no user of the host sees that it exists; and for a
    target outside its public part.
    """
    part = at.path.split("/")[0]
    if at.device and part == PRIVATE:
        way = f"tar c FOLDER | millpond run --admin {at.device} -- tar x -C /volume/{PRIVATE}"
        raise LocalError(
            f"{at.text}: only the device's owner reaches its private part, by the admin key: {way}"
        )
    if at.device and is_target and part != PUBLIC:
        raise LocalError(f"{at.text}: a device takes files below {at.device}:{PUBLIC}/ alone")


def _from_root(path: Path) -> str:
    """Return the path below / without symbolic links on the way, which volumes do not follow. The file itself
    need not exist.
    """
    found = path.resolve() if path.exists() else path.parent.resolve() / path.name
    return str(found).lstrip("/")


def run(fleet: Path, paths: Sequence[str], *, recursive: bool, as_json: bool) -> None:
    """Copy files to the last of the paths, and print how many. Raises LocalError for a mistake, RemoteError
    if a device fails; finished files stay.
    """
    if len(paths) < 2:
        raise LocalError("a source and a target are needed, such as: millpond cp data.npy csd0:public/")
    with _progress(as_json=as_json) as progress:
        copied, failures = _run(fleet, paths[:-1], paths[-1], progress, recursive=recursive)
    if copied.stripped:
        told = "miss extended attributes of their sources: too many or too large, or the file system has none"
        print(f"millpond: {copied.stripped} files {told}", file=sys.stderr)
    if failures:
        _fail(copied, failures, as_json=as_json)
    if as_json:
        print_json(copied)
    else:
        _show(copied)


def _fail(copied: Copied, failures: Sequence[LocalError | RemoteError], *, as_json: bool) -> NoReturn:
    """Show what was copied all the same, and all failures but the last, which is raised."""
    if not as_json and (copied.files or copied.unchanged):
        _show(copied)
    *others, last = sorted(failures, key=lambda error: isinstance(error, RemoteError))
    for error in others:
        print(f"millpond: {error}", file=sys.stderr)
    raise last


def _show(copied: Copied) -> None:
    resumed = f", {size(copied.resumed)} of them by an earlier copy" if copied.resumed else ""
    unchanged = f"; {copied.unchanged} were there already" if copied.unchanged else ""
    print(f"{copied.files} files, {size(copied.bytes)}{resumed}{unchanged}")


def _run(
    fleet: Path, sources: Sequence[str], target: str, progress: CopyProgress, *, recursive: bool
) -> tuple[Copied, list[LocalError | RemoteError]]:
    names = [device.name for device in directory.read(fleet).config.device]
    destination, origins = endpoint(target, names), [endpoint(source, names) for source in sources]
    for source in origins:
        for at in (source, destination):
            _check_public(at, is_target=at is destination)
        if bool(source.device) == bool(destination.device):
            raise LocalError(
                f"{source.text} and {destination.text}: one must be on a device, the other on this machine"
            )
    if twice := [name for name, count in Counter(source.name for source in origins).items() if count > 1]:
        raise LocalError(f"{destination.text}: two of the sources would be '{twice[0]}' there")
    done, failures = Copied(), list[LocalError | RemoteError]()
    with _open_volume(fleet, destination) as there:
        for source in origins:
            with _open_volume(fleet, source) as here, _readable(source) as found:
                transfer = _Transfer(found, destination, here, there)
                transfer.check(into=len(origins) > 1 or target.endswith("/"))
                failures += _copy(transfer, progress, done, recursive=recursive)
    return done, failures


@contextlib.contextmanager
def _readable(source: CopyEndpoint) -> Iterator[CopyEndpoint]:
    """Yield the source, or a file with its contents where it tells no size: a pipe, a file of /proc."""
    if source.device or not _is_stream(Path(source.text)):
        yield source
        return
    with tempfile.NamedTemporaryFile(prefix="millpond-") as whole:
        with Path(source.text).open("rb") as stream:
            shutil.copyfileobj(stream, whole)
        whole.flush()
        os.fchmod(whole.fileno(), 0o666 & ~_umask())
        yield CopyEndpoint(source.text, "", _from_root(Path(whole.name)))


def _is_stream(path: Path) -> bool:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and not found.st_size:
            with path.open("rb") as file:
                return bool(file.read(1))
    except OSError:  # said where it is copied
        return False
    return stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode)


class CopyProgress(Protocol):
    """Shows how far copies are."""

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a source of ``total`` bytes. Returns what is called with the bytes of each step."""

    def print(self, line: str) -> None:
        """Print a line for the user."""


class _Silence:
    """CopyProgress of a copy whose output goes to no terminal: lines, and none where a document follows."""

    def __init__(self, *, prints: bool) -> None:
        self._prints = prints

    def begin(self, _name: str, _total: int) -> Callable[[int], None]:
        """Return what ignores its argument."""
        return lambda _count: None

    def print(self, line: str) -> None:
        """Print a line."""
        if self._prints:
            print(line)


@contextlib.contextmanager
def _progress(*, as_json: bool) -> Iterator[CopyProgress]:
    if as_json or not sys.stdout.isatty():
        yield _Silence(prints=not as_json)
        return
    from millpond.host.terminal.progress_bars import ProgressBars  # loads rich

    with ProgressBars() as bars:
        yield bars


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A source and a target, and the volumes of both."""

    source: CopyEndpoint
    target: CopyEndpoint
    here: BulkPathAdapter
    there: BulkPathAdapter

    def check(self, *, into: bool) -> None:
        """Raise LocalError if the target must be a directory (``into``) and is none."""
        try:
            with naming(self.there, self.target.path):
                if not into or is_directory(self.there, self.target.path):
                    return
        except CopyFailed as error:
            raise self.failed(error) from None
        raise LocalError(f"{self.target.text}: there is no such directory")

    def failed(self, error: CopyFailed) -> LocalError | RemoteError:
        """Return the error for the user: whose mistake it is, and what to do."""
        where = printable(str(error.filename))
        text = f"{self.source.text} to {self.target.text}: {where}: {error.strerror}"
        if error.errno == errno.EISDIR and error.filename == self.here.shown(self.source.path):
            return LocalError(f"{text}; with -r it is copied with all in it")
        if error.errno in _MISTAKES:
            return LocalError(text)
        why = causes(error)
        because = "" if why == error.strerror else f" ({why})"
        begun = "the same command again goes on from what has come, in hidden files '.NAME.*.part'"
        return RemoteError(f"{text}{because}; {begun}")


def _copy(
    transfer: _Transfer, progress: CopyProgress, done: Copied, *, recursive: bool
) -> list[LocalError | RemoteError]:
    """Copy a source. Returns what single files have failed with; raises the error that ends a copy."""
    mask = 0o777 if transfer.target.device else 0o777 & ~_umask()
    source = transfer.source
    try:
        with Copier(transfer.here, transfer.there, done, origin=source.device, mask=mask) as copier:
            items = copier.plan(source.path, transfer.target.path, recursive=recursive, name=source.name)
            total = sum(item.attributes.size for item in items if stat.S_ISREG(item.attributes.mode))
            for item in copier.copy(items, progress.begin(source.text, total)):
                name = printable(transfer.here.shown(item.source))
                progress.print(f"{name}: neither a file, a directory nor a link; left out")
    except CopyFailed as error:
        if not error.is_of_one:
            raise transfer.failed(error) from None
        return [transfer.failed(each) for each in (copier.failures or [error])]
    return []


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@contextlib.contextmanager
def _open_volume(fleet: Path, at: CopyEndpoint) -> Iterator[BulkPathAdapter]:
    """Open the volume of an endpoint, on a device or on this machine."""
    if not at.device:
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            tree = BackingFs(root)
            yield BulkPathAdapter(tree, BackingBulk(tree), "/")
        finally:
            os.close(root)
        return

    def dial(deadline: Deadline) -> Channel:
        with DaemonConnection(fleet) as client:
            return client.volume(at.device, deadline)

    first = [
        dial(Deadline.after(10))
    ]  # now, so that an absent device is reported as such, and not as an errno
    remote = RemoteFs(lambda deadline: first.pop() if first else dial(deadline))
    try:
        yield BulkPathAdapter(remote, remote.bulk, f"{at.device}:")
    finally:
        with contextlib.suppress(OSError):
            remote.close()
