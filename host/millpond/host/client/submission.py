# SPDX-License-Identifier: Apache-2.0
"""Edge: the files that a client hands to the daemon for a job, and the model that it gets.

The daemon opens nothing by another user's path, and sees no home: contents and descriptors cross the socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, Refused
from millpond.base.sizes import SLOWEST
from millpond.host.api import daemon
from millpond.host.client.connection import ANSWER_SECONDS, DaemonConnection
from millpond.host.records import device_set
from millpond.train.job.file import describe
from millpond.train.job.files import MOST_FILES, JobFile
from millpond.train.job.folder import manifest_of
from millpond.train.job.spec import Job
from millpond.train.protocol import FileContents, MissingFiles
from millpond.wire.channel import FileSlice
from millpond.wire.messages import Ok

LAY_OUT_SECONDS = COPY_SECONDS = 600.0
MUCH_BYTES = 64 << 20
"""Bytes of files that may take more than a moment."""
BeginSending = Callable[[str, int], Callable[[int], None]]
INITIAL = "initial.safetensors"
"""The name of a copy of another job's model among a job's files."""


def _unwatched(_name: str, _total: int) -> Callable[[int], None]:
    return lambda _count: None


class JobSubmission(DaemonConnection):
    """A connection by which jobs are submitted and models fetched."""

    _begin: BeginSending = staticmethod(_unwatched)

    def submit(self, job: Job, paths: Mapping[str, Path], begin: BeginSending = _unwatched) -> int:
        """Queue a job whose files lie at ``paths``, by name, and return its number. A job whose model begins
        with that of another job gets a copy of it, and the test folder is sent unless the daemon reads it in
        its place. ``begin`` is called before much is read or sent, with its name and its bytes, and what it
        returns with the bytes of each part.
        """
        self._begin = begin
        if not all(map(device_set.is_one, job.devices)):
            job = replace(job, devices=self.fleet.named(",".join(job.devices)))
        files = describe(paths, job.name)
        self._send_contents({file.sha256: (file, paths[name]) for name, file in files.items()})
        if isinstance(job.code.initial, int):
            files[INITIAL] = self._keep_model(job.code.initial, f"{job.table}: initial")
            code = replace(job.code, initial=INITIAL)
            job = replace(job, task=code) if job.task else replace(job, model=code)
        test = self._hand_over(Path(job.data.test), job.name) if job.data.test else ""
        return self._call(daemon.Submit(job, files, test), daemon.Submitted, self._deadline).id

    def _keep_model(self, number: int, where: str) -> JobFile:
        deadline = Deadline.after(COPY_SECONDS)
        try:
            return self._call(daemon.KeepModel(number), daemon.KeptModel, deadline).file
        except Refused as error:
            raise Refused("", error.code, f"{where}: {error.text}") from None

    def _hand_over(self, folder: Path, where: str) -> str:
        """Return the digest of the manifest of a folder, which is sent; "" if the daemon reads the folder in
        its place.
        """
        where = f"{where}: data: test"
        try:
            found = folder.stat()
        except OSError as error:
            raise LocalError(f"{where}: {folder}: {error.strerror}") from None
        look = daemon.LookForFolder(str(folder), found.st_dev, found.st_ino)
        if self._call(look, daemon.FolderSeen, self._deadline).in_place:
            return ""
        listed = manifest_of(
            folder, where, lambda total: self._begin_much(f"reading the test data in {folder}", total)
        )
        manifest = JobFile(hashlib.sha256(listed.data).hexdigest(), len(listed.data))
        if self._call(daemon.AnnounceFolder(manifest), MissingFiles, self._deadline).digests:
            self._send_contents({file.sha256: (file, folder / name) for name, file in listed.files.items()})
            with tempfile.NamedTemporaryFile() as text:
                text.write(listed.data)
                text.flush()
                self._send_contents({manifest.sha256: (manifest, Path(text.name))})
            self._call(daemon.LayOutFolder(manifest), Ok, Deadline.after(LAY_OUT_SECONDS))
        return manifest.sha256

    def _send_contents(self, known: Mapping[str, tuple[JobFile, Path]]) -> None:
        """Send those contents, by digest, that the daemon does not have."""
        for digests in _batches(known):
            files = {digest: known[digest][0] for digest in digests}
            deadline = Deadline.after(ANSWER_SECONDS + sum(file.size for file in files.values()) / SLOWEST)
            missing = self._call(daemon.AnnounceFiles(files), MissingFiles, deadline).digests
            total = sum(known[digest][0].size for digest in missing)
            advance = self._begin_much("sending the job's files", total)
            for together in _together([known[digest] for digest in missing]):
                self._send_files(together)
                advance(sum(file.size for file, _ in together))

    def _begin_much(self, name: str, total: int) -> Callable[[int], None]:
        return (self._begin if total >= MUCH_BYTES else _unwatched)(name, total)

    def _send_files(self, files: Sequence[tuple[JobFile, Path]]) -> None:
        """Send small files at once, a single one, or those that cannot be stored at once one by one: then the
        error names one.
        """
        if len(files) > 1:
            contents = b"".join(_read(file, path) for file, path in files)
            with contextlib.suppress(Refused):
                request = daemon.SmallFiles(tuple(file for file, _ in files))
                self._call(request, Ok, Deadline.after(COPY_SECONDS), contents)
                return
        for file, path in files:
            self._send_file(file, path)

    def _send_file(self, file: JobFile, path: Path) -> None:
        deadline = Deadline.after(ANSWER_SECONDS + file.size / SLOWEST)
        try:
            with path.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size != file.size:
                    raise _changed(path)
                contents = FileSlice(opened.fileno(), 0, file.size)
                self._call(FileContents(file.sha256), Ok, deadline, contents)
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
        except Refused as error:
            raise Refused("", error.code, f"{path}: {error.text}") from None

    def open_model(self, job: int, *, best: bool = False) -> BinaryIO:
        """Return the model of a job that is done, or that of the ``best`` score so far, as an open file."""
        self._call(daemon.OpenModel(job, best), Ok, self._deadline)
        return os.fdopen(self._receive_descriptor(), "rb")

    def save_model(
        self, job: int, path: Path, *, best: bool = False, begin: BeginSending = _unwatched
    ) -> None:
        """Write the model of a job that is done, or that of the ``best`` score so far, to a file of this
        process's user: whole, or not at all. ``begin`` is as for ``submit``. Raises LocalError, Refused.
        """
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            with self.open_model(job, best=best) as model, contextlib.ExitStack() as unless_whole:
                with fresh.open("xb") as out:
                    unless_whole.callback(fresh.unlink)
                    _copy(model, out, begin)
                    out.flush()
                    os.fsync(out.fileno())
                fresh.replace(path)
                unless_whole.pop_all()
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None


def _copy(model: BinaryIO, out: BinaryIO, begin: BeginSending) -> None:
    size = os.fstat(model.fileno()).st_size
    advance = (begin if size >= MUCH_BYTES else _unwatched)("the model", size)
    while part := model.read(1 << 20):
        advance(out.write(part))


def _together(files: Iterable[tuple[JobFile, Path]]) -> Iterator[list[tuple[JobFile, Path]]]:
    """Yield files in lists that a message may have: many small ones, or a large one."""
    batch, size = list[tuple[JobFile, Path]](), 0
    for each in files:
        size += each[0].size
        if batch and (size > daemon.SMALL_BYTES or len(batch) == daemon.MOST_SMALL):
            yield batch
            batch, size = [], each[0].size
        batch.append(each)
    if batch:
        yield batch


def _read(file: JobFile, path: Path) -> bytes:
    """Return the contents of a small file. Raises LocalError."""
    try:
        with path.open("rb") as opened:
            contents = opened.read(file.size + 1)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    if len(contents) != file.size:
        raise _changed(path)
    return contents


def _changed(path: Path) -> LocalError:
    return LocalError(f"{path}: it has changed meanwhile; submit the job again")


def _batches(digests: Mapping[str, object]) -> Iterator[list[str]]:
    left = iter(digests)
    while batch := list(islice(left, MOST_FILES)):
        yield batch
