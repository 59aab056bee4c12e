# SPDX-License-Identifier: Apache-2.0
"""Edge: the files of jobs on the device: taken from the host, kept by digest, laid out for workers."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.agent.config import AgentConfig
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, ProtocolError, Refused
from millpond.base.sizes import SLOWEST
from millpond.train.job.file_cache import DamagedFile, FileCache
from millpond.train.job.files import JobFile, contents, laid_out, wheels_of
from millpond.train.job.overlays import Overlays
from millpond.train.job.wheels import fitting
from millpond.train.protocol import FileContents, MissingFiles
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

SECONDS = 60.0
_MOST_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class LaidOutFiles:
    """The files of one job, for its worker."""

    worker: WorkerFiles
    names: tuple[str, ...]

    def sources(self) -> dict[str, str]:
        """Return the texts of the job's modules by name, the first MiB of them all: the host chooses them,
        and reports of errors may have any of their words.
        """
        found, left = dict[str, str](), _MOST_TEXT
        for name in sorted(self.names):
            if name.endswith(".py") and left:
                with (self.worker.folder / name).open("rb") as file:
                    data = file.read(left)
                found[name], left = data.decode(errors="replace"), left - len(data)
        return found


class JobFiles:
    """The files of all jobs of the device, in folders of its state directory or where it is told to."""

    def __init__(self, config: AgentConfig) -> None:
        base = Path(config.files or config.state)
        self._cache = FileCache(base / "files", config.files_cache)
        self._overlays = Overlays(base / "overlays", config.files_cache)
        self._largest = config.policy.largest_files
        self._folders = base / "code"
        self._folders.mkdir(mode=0o700, exist_ok=True)
        for folder in self._folders.iterdir():  # of an agent that was killed
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def laid_out(self, files: Mapping[str, JobFile], host: Channel) -> Iterator[LaidOutFiles]:
        """Have the host send the contents that are needed and not here, unpack wheels that fit the device and
        lay the other files out, for as long as the context lasts. Raises Refused, LocalError, RemoteError.
        """
        own, packed = laid_out(files), wheels_of(files)
        packed = {name: packed[name] for name in fitting(packed)}
        with contextlib.ExitStack() as stack:
            overlay = stack.enter_context(self._overlays.held(packed))
            needed = own if overlay.exists() else own | packed
            stack.enter_context(self._cache.held(needed.values()))
            self._fetch(needed, host)
            if packed:
                self._overlays.install(overlay, packed, self._cache.path, self._largest)
            try:
                place = stack.enter_context(tempfile.TemporaryDirectory(dir=self._folders))
            except OSError as error:
                raise LocalError(f"a job's files cannot be laid out: {error.strerror}") from None
            folder = Path(place, "code")
            self._cache.link(own, folder)
            yield LaidOutFiles(WorkerFiles(folder, overlay if packed else None), tuple(own))

    def _fetch(self, files: Mapping[str, JobFile], host: Channel) -> None:
        missing = {digest: file for digest, file in contents(files).items() if not self._cache.has(file)}
        host.send(MissingFiles(tuple(missing)), Deadline.after(SECONDS))
        for digest, file in missing.items():
            request = host.receive(Deadline.after(SECONDS))
            if request.message != FileContents(digest) or request.payload_size != file.size:
                raise ProtocolError(f"the host sent '{request.message.NAME}' where a job's file belongs")
            try:
                self._cache.add(file, host.receive_parts(Deadline.after(SECONDS + file.size / SLOWEST)))
            except DamagedFile:
                name = next(name for name, found in files.items() if found == file)
                text = f"the host's copy of '{name}' is damaged: its SHA-256 is not what the host said"
                raise Refused("", "model", text) from None
            host.send(Ok(), Deadline.after(SECONDS))
