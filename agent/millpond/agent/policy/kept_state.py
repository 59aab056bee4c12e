# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the folder where the tasks of a job keep their state on the device, for a later worker."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from pathlib import Path

from millpond.agent.config import AgentConfig
from millpond.agent.policy.shown_volume import OWN
from millpond.fs.store.layout import PRIVATE

log = logging.getLogger(__name__)

_IN_USE = Counter[Path]()
"""The workers by their folder of states."""
_IN_USE_LOCK = threading.Lock()


def take(config: AgentConfig, job: str) -> Path | None:
    """Return the folder in the private part where the tasks of a job keep their state, None if there is no
    room for one, or if the policy lets jobs keep nothing: a later job of the name could tell of the samples
    that are in it, without noise or masks.
    """
    if config.policy.keeps_nothing:
        return None
    folder = Path(config.volume, PRIVATE, OWN, job)
    try:
        with _IN_USE_LOCK:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # there is one user alone
                os.chown(folder, config.users.worker, config.users.worker)
            _IN_USE[folder] += 1
    except OSError as error:
        log.warning("job %s: no state can be kept: %s", job, error.strerror)
        return None
    return folder


def leave(folder: Path | None) -> None:
    """Remove a worker's folder of states unless it holds one, with which the next worker goes on, or another
    worker of the job has it: a new one may come before the last one's end.
    """
    if folder:
        with _IN_USE_LOCK:
            _IN_USE[folder] -= 1
            if not _IN_USE[folder]:
                del _IN_USE[folder]
                with contextlib.suppress(OSError):
                    folder.rmdir()


def size(folder: Path | None) -> int:
    """Return the bytes of all files below a folder."""
    found = 0
    for place, _, names in os.walk(folder) if folder else ():
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it is written at this moment
                found += os.lstat(Path(place, name)).st_size
    return found
