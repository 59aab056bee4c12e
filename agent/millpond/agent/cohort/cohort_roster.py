# SPDX-License-Identifier: Apache-2.0
"""Edge (a file, ssh-keygen): for which devices this one masks: those that it has pinned, those of the newest
roster that its owners have signed, or any.

A host carries a roster to its devices. It can keep a newer one back, and changes none: the device keeps the
roster with the largest number that it was given, and takes none with a smaller one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from millpond.agent.policy.rules import refused
from millpond.agent.policy.settings import Policy
from millpond.aggregate.masking import roster
from millpond.aggregate.masking.roster import CohortRoster, SignedRoster
from millpond.base.errors import ConfigError, LocalError, Refused
from millpond.linux import ssh_signatures
from millpond.linux.files import write_durably
from millpond.wire.control_messages import CohortInForce
from millpond.wire.tls import stamp

FILE = "cohort.roster"
_LOCK = threading.Lock()  # two hosts' requests, or one's, may come at the same time


def take(policy: Policy, state: Path, text: str) -> int:
    """Keep the roster in the ``text`` of a file durably in the directory of the agent's ``state``, and return
    its number. Raises Refused for one that no owner has signed, and for one that is not newer than the last.
    """
    if not policy.by_owners:
        raise refused("cohort", "this device takes no signed roster: its cohort is not ['owners']")
    found = _verified(policy.owners, text)
    try:
        with _LOCK:
            kept = _kept(state)
            if kept and found.number <= kept.number and found != kept:
                last = f"the device has roster {kept.number}"
                raise refused("cohort", f"roster {found.number} is not newer, or another one: {last}")
            write_durably(state / FILE, text.encode(), 0o600)
    except OSError as error:
        raise refused("cohort", f"{FILE}: {error.strerror}") from None
    return found.number


class DeviceCohort:
    """The devices for which one with a ``policy`` masks, in the directory of the agent's ``state``."""

    def __init__(self, policy: Policy, state: Path) -> None:
        self._policy, self._file = policy, state / FILE
        self._stamp, self._roster = stamp(self._file), CohortRoster(policy.least_devices, policy.pinned)
        if policy.by_owners:
            self._roster = self._read()

    def now(self) -> CohortRoster:
        """Return these devices. Raises Refused where owners are to have signed a roster, and there is none
        that one of them has.
        """
        found = stamp(self._file)
        if self._policy.by_owners and found != self._stamp:
            self._roster, self._stamp = self._read(), found
        return self._roster

    def _read(self) -> CohortRoster:
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            told = "no roster of its owners is here yet: `millpond roster send` brings it"
            raise refused("cohort", told) from None
        except (OSError, ValueError) as error:
            raise refused("cohort", f"{FILE}: it cannot be read: {error}") from None
        found = _verified(self._policy.owners, text)
        return CohortRoster(self._policy.least_devices, found.devices, found.number)


def described(policy: Policy, state: Path) -> CohortInForce:
    """Return what the host shows of the device's cohort."""
    if not policy.by_owners:
        return CohortInForce(len(policy.cohort))
    kept = _shown(state)
    return CohortInForce(len(kept.devices), kept.number) if kept else CohortInForce(0, 0)


def noted(state: Path) -> dict[str, str | int]:
    """Return what the audit log says of the roster that is kept: its number and the digest of its text."""
    kept = _shown(state)
    return {"number": kept.number, "sha256": hashlib.sha256(kept.text.encode()).hexdigest()} if kept else {}


def _shown(state: Path) -> SignedRoster | None:
    """Return the roster that is kept, None without one that can be read."""
    try:
        return _kept(state)
    except (OSError, Refused):
        return None


def _kept(state: Path) -> SignedRoster | None:
    try:
        return _read((state / FILE).read_text())[0]
    except FileNotFoundError:
        return None


def _read(text: str) -> tuple[SignedRoster, str]:
    try:
        return roster.read(text, "the roster")
    except ConfigError as error:
        raise refused("cohort", str(error)) from None


def _verified(owners: Sequence[str], text: str) -> SignedRoster:
    """Return the roster in a text, which one of the owners has signed. Raises Refused."""
    found, signature = _read(text)
    try:
        signer = ssh_signatures.verify(owners, roster.NAMESPACE, found.text, signature) if signature else ""
    except LocalError as error:
        raise refused("cohort", f"the device cannot check signatures: {error}") from None
    if not signer:
        raise refused("cohort", f"no owner of the device has signed roster {found.number}")
    return found
