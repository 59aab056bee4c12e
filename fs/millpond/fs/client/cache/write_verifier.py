"""Pure: what of a file is surely on the flash, as far as its client knows, through restarts of the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WriteVerifier:
    """A server that was started again may have lost what was changed and not synced; whoever had the file
    open, or opens it before anybody was told, is told once.
    """

    changed: int = 0
    synced: int = 0
    doubts: int = 0
    told: int = 0

    def change(self) -> None:
        """A change has ended: one that was under way when a sync began is not in it."""
        self.changed += 1

    def sync(self, changed: int) -> None:
        """All is on the flash that was changed by then."""
        self.synced = max(self.synced, changed)

    def forgotten(self) -> None:
        """The server has been started again."""
        if self.changed > self.synced:
            self.doubts += 1
            self.synced = self.changed

    def tell(self, known: int) -> int | None:
        """The number of doubts if there are more than those ``known``: somebody is told of them now."""
        if self.doubts <= known:
            return None
        self.told = self.doubts
        return self.doubts
