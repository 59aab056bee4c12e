# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): what ``millpond cp`` does: copies between this machine and devices, or among these."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.base.schema import dump
from millpond.base.text import counted, printable
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import BackingBulk
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import causes
from millpond.host.cli.exits import REMOTE, fail
from millpond.host.cli.volumes.copy_end import noted_signals
from millpond.host.cli.volumes.copy_paths import CopyEndpoint, check, endpoints, from_root
from millpond.host.client.connection import DaemonConnection
from millpond.host.fleet import directory
from millpond.host.remote.copies.copying import Copier, is_directory
from millpond.host.remote.copies.rules import CopyEnded, CopyRules
from millpond.host.remote.copies.small_copies import Copied, CopyFailed, Item, naming
from millpond.host.terminal.folded_output import folded
from millpond.host.terminal.printing import print_json, size
from millpond.host.terminal.progress_lines import ProgressView, view
from millpond.wire.channel import Channel

_MISTAKES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EINVAL}
)
MOST_TOLD = 50
"""Files that could not be copied and have a line each."""


@dataclass(slots=True)
class TargetCopy:
    """A copy to one target: its counts and its failures."""

    target: CopyEndpoint
    copied: Copied = field(default_factory=Copied)
    failures: list[MillpondError] = field(default_factory=list)
    is_ended: bool = False


def run(fleet: Path, paths: Sequence[str], rules: CopyRules, *, recursive: bool, as_json: bool) -> None:
    """Copy files to the last of the paths, and print how many. Raises LocalError for a mistake, RemoteError
    if a device fails; finished files stay.
    """
    if len(paths) < 2:
        raise LocalError("a source and a target are needed, such as: millpond cp data.npy csd0:public/")
    if rules.deletes and not recursive:
        raise LocalError("--delete is for the directories that -r copies: it deletes what those do not have")
    read = directory.read(fleet)
    sources = [source for text in paths[:-1] for source in endpoints(text, read)]
    targets = endpoints(paths[-1], read)
    check(sources, targets)
    if rules.deletes and (whole := [source.text for source in sources if not source.name]):
        raise LocalError(
            f"{whole[0]} has no name in a target, which --delete would empty: name what is in it"
        )
    into = len(sources) > 1 or paths[-1].endswith("/")
    copies = [TargetCopy(target) for target in targets]
    with contextlib.ExitStack() as stack:
        ready = [stack.enter_context(_readable(source)) for source in sources]
        end, progress = (
            stack.enter_context(noted_signals()),
            stack.enter_context(view(terminal=sys.stdout.isatty(), shows=not as_json)),
        )
        ended = replace(rules, is_ended=end.is_asked_for)
        _CopyJob(fleet, ready, ended, progress, recursive, into, len(copies) > 1).run(copies)
    _tell(copies, end.signal, keeps=rules.keeps, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _CopyJob:
    """The sources of a copy, and how it goes, the same for each target."""

    fleet: Path
    sources: Sequence[CopyEndpoint]
    rules: CopyRules
    progress: ProgressView
    recursive: bool
    into: bool
    many: bool

    def run(self, copies: Sequence[TargetCopy]) -> None:
        """Copy to all targets at once. The failure of one ends no other."""
        if not self.many:
            self._copy_to(copies[0])
            return
        threads = [
            threading.Thread(
                target=self._copy_to, args=(copy,), name=f"copy to {copy.target.device}", daemon=True
            )
            for copy in copies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _copy_to(self, copy: TargetCopy) -> None:
        try:
            with _open_volume(self.fleet, copy.target) as there:
                for source in self.sources:
                    with _open_volume(self.fleet, source) as here:
                        transfer = _Transfer(source, copy.target, here, there)
                        transfer.check(into=self.into)
                        self._transfer(transfer, copy)
        except CopyEnded:
            copy.is_ended = True
        except MillpondError as error:
            copy.failures.append(error)
        except OSError as error:
            copy.failures.append(RemoteError(f"{copy.target.text}: {error.strerror or error}"))

    def _transfer(self, transfer: _Transfer, copy: TargetCopy) -> None:
        """Copy a source. Keeps the failures of single files; raises the error that ends a copy."""
        mask = 0o777 if transfer.target.device else 0o777 & ~_umask()
        shown = printable(
            f"{transfer.source.text} to {copy.target.device}" if self.many else transfer.source.text
        )
        with contextlib.ExitStack() as listing:
            say = listing.enter_context(self.progress.status(shown))
            rules = replace(self.rules, mask=mask, found=lambda count: say(f"{count:,} files found"))
            origin = transfer.source.device
            copier = Copier(transfer.here, transfer.there, copy.copied, origin=origin, rules=rules)
            try:
                with copier:
                    items = copier.plan(
                        transfer.source.path,
                        transfer.target.path,
                        recursive=self.recursive,
                        name=transfer.source.name,
                    )
                    listing.close()
                    self._copy_items(transfer, copier, items, shown)
            except CopyFailed as error:
                copy.failures += [transfer.failed(each) for each in copier.failures if each is not error]
                if not error.is_of_one:
                    raise transfer.failed(error) from None
                copy.failures.append(transfer.failed(error))

    def _copy_items(self, transfer: _Transfer, copier: Copier, items: Sequence[Item], shown: str) -> None:
        total = sum(item.attributes.size for item in items if stat.S_ISREG(item.attributes.mode))
        for item in copier.copy(items, self.progress.begin(shown, total)):
            name = printable(transfer.here.shown(item.source))
            self.progress.print(f"{name}: neither a file, a directory nor a link; left out")


def _tell(copies: Sequence[TargetCopy], ended: int, *, keeps: bool, as_json: bool) -> None:
    """Print the result for each target. Exits if the copy was ended or has failed."""
    several, is_ended = len(copies) > 1, any(copy.is_ended for copy in copies)
    is_whole = not is_ended and not any(copy.failures for copy in copies)
    for copy in copies:
        if copy.copied.stripped:
            files = f"{counted(copy.copied.stripped, 'file')} without extended attributes of the source"
            why = "too many, too large, or the file system has none"
            print(f"millpond: {printable(copy.target.text)}: {files}: {why}", file=sys.stderr)
    if as_json and (several or is_whole):
        print_json([_document(copy) for copy in copies] if several else copies[0].copied)
    if not as_json:
        _show(copies, always=is_whole)
    if is_ended:
        done = sum(copy.copied.files for copy in copies)
        left = (
            "the copied part of a file stays in a hidden '.NAME.*.part'"
            if keeps
            else "nothing unfinished stays"
        )
        text = f"interrupted; {counted(done, 'file')} copied, {left}; the same command copies the others"
        fail(text, 128 + ended, document=not several)
    if not is_whole:
        _fail(copies, document=not several)


def _document(copy: TargetCopy) -> dict[str, object]:
    failed = [str(failure) for failure in copy.failures]
    return {"device": copy.target.device, **dump(copy.copied), "failed": failed}


def _show(copies: Sequence[TargetCopy], *, always: bool) -> None:
    lines = {copy.target.device: [_line(copy.copied)] for copy in copies if always or _is_some(copy.copied)}
    for line in folded(lines):
        print(line if len(copies) > 1 else next(iter(lines.values()))[0])


def _is_some(copied: Copied) -> bool:
    return bool(copied.files or copied.unchanged)


def _line(copied: Copied) -> str:
    resumed = f", {size(copied.resumed)} of them by an earlier copy" if copied.resumed else ""
    unchanged = f"; {copied.unchanged} were there already" if copied.unchanged else ""
    deleted = f"; {copied.deleted} deleted" if copied.deleted else ""
    return f"{counted(copied.files, 'file')}, {size(copied.bytes)}{resumed}{unchanged}{deleted}"


def _fail(copies: Sequence[TargetCopy], *, document: bool) -> NoReturn:
    """Print all failures but the last, which ends the command. Where other files were copied, so that no
    mistake has kept the command from its work, the exit code is that of a failure.
    """
    failures = [failure for copy in copies for failure in copy.failures]
    *others, last = sorted(failures, key=lambda error: isinstance(error, RemoteError))
    for error in others[:MOST_TOLD]:
        print(f"millpond: {printable(text := str(error), len(text))}", file=sys.stderr)
    if len(others) > MOST_TOLD:
        print(f"millpond: ... and {len(others) - MOST_TOLD} more", file=sys.stderr)
    if len(failures) > 1 or any(_is_some(copy.copied) for copy in copies):
        if document and len(failures) > 1:
            last = RemoteError(f"{last}; in all {len(failures)} were not copied")
        fail(str(last), REMOTE, document=document)
    raise last


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
        yield CopyEndpoint(source.text, "", from_root(Path(whole.name)))


def _is_stream(path: Path) -> bool:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and not found.st_size:
            with path.open("rb") as file:
                return bool(file.read(1))
    except OSError:  # said where it is copied
        return False
    return stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode)


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
        begun = "the same command again continues from the hidden files '.NAME.*.part'"
        return RemoteError(f"{text}{because}; {begun}")


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
