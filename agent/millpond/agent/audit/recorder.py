# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): writes the device's audit log: each minute what was answered, and checkpoints.

An exchange costs no write: it is counted, and the counts of a minute are one entry. A job begins only once
the log says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from millpond.agent.audit.log_file import AuditLog
from millpond.agent.audit.sessions import AuditSession, is_empty
from millpond.agent.audit.signer import DeviceSigner
from millpond.agent.cohort import cohort_roster
from millpond.agent.config import AgentConfig
from millpond.agent.gate import LedgerCounters
from millpond.base.errors import LocalError, Refused
from millpond.base.schema import dump
from millpond.wire.audit_log import (
    NAMESPACE,
    Answered,
    Event,
    InForce,
    LogHead,
    Refusals,
    Role,
    Signed,
    Started,
    Stopped,
    checkpoint,
    is_nonce,
)
from millpond.wire.control_messages import AuditEntries, AuditHead

log = logging.getLogger(__name__)

MINUTE, HOUR, RETRY = 60.0, 3600.0, 10.0
MANY_BYTES = 1 << 20
"""Of what belongs to no job there is an entry each hour, and each minute in which so many bytes are new."""
_MOST_REASONS, _LONGEST_REASON = 8, 200
_LONGEST_RULES = 1 << 14


def rules_of(config: AgentConfig) -> dict[str, Any]:
    """Return the rules by which the device answers; of canaries and tracers the names alone, of a roster that
    owners have signed its number and digest.
    """
    privacy = dump(config.privacy)
    for patterns in ("canaries", "tracers"):
        privacy[patterns] = sorted(privacy[patterns])
    rules: dict[str, Any] = {"policy": dump(config.policy), "privacy": privacy}
    if config.policy.by_owners:
        rules["roster"] = cohort_roster.noted(Path(config.state))
    return rules


class AuditRecorder:
    """Writes the audit log of a device of ``config`` from ``start`` to ``stop``. Raises OSError, LocalError
    where no log can be begun.
    """

    def __init__(self, config: AgentConfig, signer: DeviceSigner) -> None:
        self._name, self._signer, self._config = config.name, signer, config
        self._in_force = self._rules(signer.certificate())
        self._lock, self._signing = threading.Lock(), threading.Lock()
        self._log = AuditLog(Path(config.state, "audit"), lambda: (self._in_force,))
        self._sessions = list[AuditSession]()
        self._standing = list[AuditSession]()
        self._refused, self._reasons = 0, list[str]()
        self._wake, self._stopping, self._error = threading.Event(), False, ""
        self._closed = False
        self._signed = self._log.head
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)

    def _rules(self, certificate: str) -> InForce:
        rules = rules_of(self._config)
        text = json.dumps(rules, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return InForce(certificate, digest, rules if len(text) <= _LONGEST_RULES else {})

    @property
    def policy(self) -> str:
        """The digest of the rules in force."""
        return self._in_force.policy

    def rules_changed(self) -> None:
        """Note that other rules are in force: a newer roster."""
        with self._lock:
            self._in_force = self._rules(self._in_force.certificate)
        self._append(self._in_force)

    @property
    def fault(self) -> str:
        """Why the log cannot be written, "" if it can."""
        return self._error

    def standing(self, role: Role, counters: LedgerCounters) -> AuditSession:
        """Account for the bytes of ``counters``, which belong to no job, as long as the agent runs."""
        made = AuditSession(Answered(role, peer="host", policy=self.policy), counters)
        self._standing.append(made)
        return made

    def start(self, software: str, totals: Mapping[str, int]) -> None:
        """Begin to write. ``totals`` are those of the privacy ledger. On a full disk there is a fault, and
        the agent answers what makes room.
        """
        self._append(Started(software, dict(totals)))
        self._append(self._in_force)
        self._thread.start()

    def stop(self) -> None:
        """Write and sign all that is left, and write no more."""
        if self._closed:
            return
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write_all(ended=True)
        self._append(Stopped())
        self._sign()
        with self._lock, contextlib.suppress(OSError):
            self._closed = True  # sessions may end after this
            self._log.close()

    @contextlib.contextmanager
    def session(self, about: Answered) -> Iterator[AuditSession]:
        """Account for a job or a launch, once the disk has an entry that it begins. Raises Refused if the log
        cannot be written.
        """
        about = replace(about, policy=self.policy, state="begins")
        with self._lock:
            made = AuditSession(replace(about, session=self._log.head.number + 1))
            about = made.about
            try:
                self._log.append(about)
                self._log.sync()
            except OSError as error:
                self._note(error)
                self._wake.set()
                raise Refused("", "device", self._error) from None
            self._sessions.append(made)
        try:
            yield made
        finally:
            made.ended = True
            self._write(made)
            self._wake.set()

    def refused(self, name: str, reason: str) -> None:
        """Note a request about ``name`` that the policy has refused."""
        with self._lock:
            self._refused += 1
            text = f"{name}: {reason}"[:_LONGEST_REASON]
            if len(self._reasons) < _MOST_REASONS and text not in self._reasons:
                self._reasons.append(text)

    def head(self, nonce: str) -> AuditHead:
        """Return the head, signed with a ``nonce``, with all entries on the disk; without a nonce it is not
        signed. Raises Refused.
        """
        if not nonce:
            return self._unsigned("it was asked for without a nonce")
        if not is_nonce(nonce):
            raise Refused("", "protocol", "a nonce has 16 to 128 letters, digits, '.', '-' and '_'")
        try:
            oldest, head, signature = self._sign_head(nonce)
        except LocalError as error:
            return self._unsigned(str(error))
        return AuditHead(oldest, head.number, head.digest, signature)

    def _unsigned(self, reason: str) -> AuditHead:
        with self._lock:
            oldest, head = self._log.oldest, self._log.head
        return AuditHead(oldest, head.number, head.digest, "", reason)

    def entries(self, first: int) -> AuditEntries:
        """Return lines from the entry ``first`` on. Raises Refused."""
        with self._lock:
            try:
                return AuditEntries(self._log.lines(first))
            except OSError as error:
                raise Refused("", "device", f"the audit log cannot be read: {error.strerror}") from None

    def _run(self) -> None:
        minute, hour = time.monotonic() + MINUTE, time.monotonic() + HOUR
        while not self._stopping:
            has_ended = self._wake.wait(RETRY if self._error else max(0.0, minute - time.monotonic()))
            self._wake.clear()
            now = time.monotonic()
            is_hour = now >= hour
            if now >= minute or self._error:
                minute, hour = now + MINUTE, now + HOUR if is_hour else hour
                self._write_all(ended=is_hour or bool(self._error))
            if has_ended or is_hour:
                self._sign()

    def _write_all(self, *, ended: bool) -> None:
        """Write what is new of each session, and of the standing ones if the hour has ``ended``, and have it
        on the disk.
        """
        with self._lock:
            current, count, reasons = list(self._sessions), self._refused, tuple(self._reasons)
        for each in (*current, *(one for one in self._standing if ended or one.untold >= MANY_BYTES)):
            self._write(each)
        with self._lock:
            over = [each for each in current if each.told_end and not each.untold]
            self._sessions = [each for each in self._sessions if each not in over]
        if count and self._append(Refusals(count, reasons)):
            with self._lock:
                self._refused -= count
                self._reasons = [text for text in self._reasons if text not in reasons]
        with self._lock, contextlib.suppress(OSError):  # an entry that fails tells it
            self._log.sync()

    def _write(self, session: AuditSession) -> None:
        """Write what is new of a session; of one that has ended also that it has, once."""
        found = session.taken()
        if is_empty(found) and (not session.ended or session.told_end):
            return
        if self._append(found):
            session.told_end = session.ended
        else:
            session.put_back(found)

    def _append(self, event: Event) -> bool:
        with self._lock:
            if self._closed:
                return False
            try:
                self._log.append(event)
            except OSError as error:
                self._note(error)
                return False
            self._error = ""
            return True

    def _note(self, error: OSError) -> None:
        text = f"the audit log cannot be written: {error.strerror or error}"
        if text != self._error:
            log.error("%s", text)
        self._error = text

    def _sign(self) -> None:
        """Sign what is not signed yet, with an entry that says so."""
        if self._log.head == self._signed:
            return
        try:
            _, head, signature = self._sign_head()
        except LocalError as error:
            log.warning("the audit log is not signed: %s", error)
            return
        if self._append(Signed(head.number, head.digest, signature)):
            with self._lock:
                self._signed = self._log.head if self._log.head.number == head.number + 1 else head

    def _sign_head(self, nonce: str = "") -> tuple[int, LogHead, str]:
        """Return the number of the oldest entry, the head and its signature. A new certificate has an entry
        first. Raises LocalError.
        """
        with self._signing:
            certificate = self._signer.certificate()
            while True:
                oldest, head = self._synced(certificate)
                text = checkpoint(self._name, head, nonce, oldest)
                signature, certificate = self._signer.sign(NAMESPACE, text)
                if certificate == self._in_force.certificate:
                    return oldest, head, signature

    def _synced(self, certificate: str) -> tuple[int, LogHead]:
        """Return the number of the oldest entry and the head, with all entries on the disk, the last of which
        are of the ``certificate``.
        """
        with self._lock:
            try:
                if certificate != self._in_force.certificate:
                    self._in_force = replace(self._in_force, certificate=certificate)
                    self._log.append(self._in_force)
                self._log.sync()
            except OSError as error:
                self._note(error)
                raise LocalError(self._error) from None
            return self._log.oldest, self._log.head


Begin = Callable[[Answered], contextlib.AbstractContextManager[AuditSession]]
"""``AuditRecorder.session``, for what accounts for a session and writes no log."""
