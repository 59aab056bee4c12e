# SPDX-License-Identifier: Apache-2.0
"""Edge: a write intent in the hands of the operation that changes files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.fs.coherence.delegation_table import Inode, WriteIntent

if TYPE_CHECKING:
    from millpond.fs.coherence.manager import DelegationManager


class AnnouncedChange:
    """A write intent that has begun."""

    def __init__(self, delegations: DelegationManager, change: WriteIntent) -> None:
        self._delegations, self._change = delegations, change

    def recall(self, *inodes: int) -> None:
        """Add these inodes to the intent and wait until no other client holds a delegation of them. Raises
        WouldBlock and OSError.
        """
        self._delegations.add(self._change, [Inode(inode) for inode in inodes], alone=False)
