# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): of which devices this one has helped to unmask a sum at a state, over jobs and restarts.

Two sums at one state, of cohorts that differ by one device, show its update by their difference. So a device
that has pinned its cohort gives its shares at one state for one set of devices, which it notes before.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from millpond.aggregate.masking import keys
from millpond.base.errors import Refused
from millpond.linux.files import write_durably

FILE = "cohort.sums"
_DIGEST = 32
_RECORD = 2 * _DIGEST
MOST_RECORDS = 1 << 14
_LOCK = threading.Lock()  # jobs of the device share the file


class ToldSums:
    """The record in the file ``cohort.sums`` of the directory of the agent's ``state``."""

    def __init__(self, state: Path) -> None:
        self._file = state / FILE

    def note(self, state: bytes, devices: tuple[str, ...]) -> None:
        """Note that the sum of ``devices`` at a ``state``, by its digest, is about to be told. Raises Refused
        if one of others was told at it, or if this cannot be noted.
        """
        fresh = keys.digest(state) + keys.digest(*sorted(devices))
        try:
            with _LOCK:
                records = self._read()
                told = {record[_DIGEST:] for record in records if record[:_DIGEST] == fresh[:_DIGEST]}
                if told - {fresh[_DIGEST:]}:
                    text = (
                        "policy.cohort: at this state a sum of other devices was told, in this job or another"
                    )
                    raise Refused("", "policy", f"{text}: a job that begins anew needs another seed")
                if not told:
                    self._append(records, fresh)
        except OSError as error:
            raise Refused("", "policy", f"policy.cohort: {self._file.name}: {error.strerror}") from None

    def _read(self) -> list[bytes]:
        """Return the whole records: a power cut may have left a part of one, which has let nothing leave."""
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return []
        return [data[start : start + _RECORD] for start in range(0, len(data) - _RECORD + 1, _RECORD)]

    def _append(self, records: list[bytes], fresh: bytes) -> None:
        size = len(records) * _RECORD
        if len(records) >= MOST_RECORDS or not size:  # the oldest half goes; a first file is there durably
            kept = records[len(records) - MOST_RECORDS // 2 :] if records else []
            write_durably(self._file, b"".join([*kept, fresh]), 0o600)
            return
        with self._file.open("r+b") as file:
            file.seek(size)
            file.write(fresh)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
