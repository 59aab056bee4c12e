# SPDX-License-Identifier: Apache-2.0
"""Pure: tracks per file whether its writes are on the flash, through restarts of the device (NFS's write
verifier), and the errors of changes that were answered before they were done.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass


@dataclass(slots=True)
class WriteVerifier:
    """The unsynced changes of a file and the errors of lost ones, with Linux's errseq semantics.

    A device that was started again, or another file system, has lost changes that were not synced: each open
    file sees one EIO from fsync, also one opened after the loss but before its first report. ``changed`` and
    ``synced`` count changes, ``error_seq`` losses; ``reported_seq`` is the last loss that was reported.
    ``lost_seq`` is the last loss of gathered data, which a write and a close report, too; ``code`` is its
    errno.
    """

    changed: int = 0
    synced: int = 0
    error_seq: int = 0
    reported_seq: int = 0
    lost_seq: int = 0
    code: int = errno.EIO

    def change(self) -> None:
        """Count a change that has ended: a sync that began before does not cover it."""
        self.changed += 1

    def sync(self, changed: int) -> None:
        """Record that the flash has the first ``changed`` changes."""
        self.synced = max(self.synced, changed)

    def storage_changed(self) -> None:
        """Count a loss if there are unsynced changes."""
        if self.changed > self.synced:
            self.error_seq += 1
            self.synced = self.changed

    def fail(self, code: int) -> None:
        """Count the loss of gathered data, which could not be written for this errno."""
        self.error_seq += 1
        self.lost_seq, self.code = self.error_seq, code

    @property
    def error(self) -> int:
        """The errno of the newest loss."""
        return self.code if self.lost_seq == self.error_seq else errno.EIO

    def report(self, seen: int) -> int | None:
        """Return the newest loss if it is newer than ``seen``, and mark it as reported; else None."""
        if self.error_seq <= seen:
            return None
        self.reported_seq = self.error_seq
        return self.error_seq
