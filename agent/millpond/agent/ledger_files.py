# SPDX-License-Identifier: Apache-2.0
"""Edge: the gate's counters in files, which the agent's main process opens for all."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from millpond.agent.gate import KINDS, LedgerCounters, Pattern

log = logging.getLogger(__name__)


def open_ledger(folder: Path, process: str, patterns: Sequence[Pattern]) -> LedgerCounters:
    """Open the counters of ``process`` in a file, which goes on counting when the agent starts again.

    Other patterns, or kinds, begin a new file: its counters would mean something else.
    """
    digest = hashlib.sha256(repr((*KINDS, *patterns)).encode()).hexdigest()[:16]
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / f"{process}-{digest}", flags, 0o600)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)  # a hole would end the agent when the flash is full
    except OSError as error:
        log.warning("the ledger cannot be kept, and begins anew: %s", error.strerror)
        return LedgerCounters.in_memory()
    return LedgerCounters(descriptor)
