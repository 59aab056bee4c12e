# SPDX-License-Identifier: Apache-2.0
"""Edge (files): what a data service keeps of its runs, in memory or, to outlive its process, in a folder.

In a folder each run is a small file, replaced at once: a process that is killed leaves the old one or the new
one. The folder has what a run was leased and has committed before any consumer hears of it. It is not synced
to the disk: after a power cut a run may be as it was some seconds before.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgpack

from millpond.base.errors import LocalError
from millpond.base.schema import dump, load
from millpond.data.streaming.protocol.service import KeptRun
from millpond.linux.files import later_than_all

_MOST, _MOST_FILES = 1024, 16384
"""Runs in memory and in a folder, those that changed last."""


class KeptRuns:
    """Keeps all runs in ``folder``, which is made if it is not there; without one the last ones in memory.
    A folder keeps _MOST_FILES runs from one process to the next.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._last: dict[str, KeptRun] = {}
        self._changed = 0
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._changed = later_than_all(folder)
            for path in sorted(folder.glob("*.run"), key=lambda path: path.stat().st_mtime_ns)[:-_MOST_FILES]:
                path.unlink()

    def get(self, key: str, /) -> KeptRun | None:
        """Return a run; None if none is kept. Raises LocalError."""
        if (found := self._last.get(key)) or not self._folder:
            return found
        path = self._folder / f"{key}.run"
        try:
            return load(KeptRun, msgpack.unpackb(path.read_bytes()), path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, msgpack.UnpackException) as error:
            raise LocalError(f"{path} is no state of a run: {error}") from None

    def keep(self, key: str, run: KeptRun) -> None:
        """Write a run if it has changed. Raises LocalError, such as on a full disk."""
        if self._last.get(key) == run:
            return
        if self._folder:
            self._write(self._folder, key, run)
        self._last.pop(key, None)
        self._last[key] = run
        if len(self._last) > _MOST:
            del self._last[next(iter(self._last))]

    def _write(self, folder: Path, key: str, run: KeptRun) -> None:
        fresh = folder / f"{key}.new"
        try:
            fresh.write_bytes(msgpack.packb(dump(run)))
            self._changed = max(self._changed + 1, time.time_ns())  # also where the clock was set back
            os.utime(fresh, ns=(self._changed, self._changed))
            fresh.rename(folder / f"{key}.run")
        except OSError as error:
            raise LocalError(f"the state of a run cannot be kept: {error.strerror}") from None
