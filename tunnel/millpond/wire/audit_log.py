# SPDX-License-Identifier: Apache-2.0
"""Pure: the audit log of a device: entries in a hash chain, and the text of its signed checkpoints.

An entry is a line of JSON in ASCII. Its ``previous`` is the SHA-256 of the line before it, so the number and
the digest of the last line fix all lines before. A device signs both as a checkpoint; RFC 6962 calls the same
a signed tree head.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from millpond.base.errors import ConfigError, ProtocolError
from millpond.base.schema import dump, load

NAMESPACE: Final = "millpond-audit"
"""The namespace of signatures, see ssh-keygen(1): one of a checkpoint signs nothing else."""
LONGEST_LINE: Final = 1 << 17
"""The most bytes of a line."""
MOST_ENTRIES: Final = 1 << 18
"""More entries than a device keeps."""
PAGE_BYTES: Final = 1 << 18
"""The most bytes of the lines of one message, and one line more."""
MOST_BYTES: Final = 1 << 27
"""More bytes than the logs of a device have together."""
_NONCE: Final = re.compile(r"[0-9A-Za-z._-]{16,128}")
_LARGEST = 1 << 63
_DEEPEST = 16
LATEST: Final = 1e11
"""The latest time (s since 1970) of an entry, in the year 5138."""

Role = Literal["job", "launch", "node", "data service", "shared folder", "question", "control", "volume"]
State = Literal["begins", "goes on", "ends"]


@dataclass(frozen=True, slots=True)
class Started:
    """The agent has started. ``ledger`` has the bytes by kind that the privacy ledger had counted by then."""

    software: str
    ledger: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The agent has ended in good order: all that it had counted is in the entries before."""


@dataclass(frozen=True, slots=True)
class InForce:
    """The device's certificate (DER in base64), and the rules of its policy, whose digest is ``policy``.
    Written when the agent starts, when the certificate or the roster has changed, and at the begin of each
    file.
    """

    certificate: str
    policy: str
    rules: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to one ``peer``, since the last entry of the same ``session``: ``exchanges``, the
    ``samples`` that they covered by folder, the bytes ``sent`` by kind, and the exchanges that were
    ``refused``. ``run`` is that of a job, ``code`` the digest of its code, ``signer`` the owner's key that
    signed it, ``policy`` the digest of the policy in force.
    """

    role: Role
    name: str = ""
    session: int = 0
    state: State = "goes on"
    peer: str = ""
    run: str = ""
    code: str = ""
    signer: str = ""
    policy: str = ""
    exchanges: int = 0
    refused: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests that the policy has refused since the last such entry, with some of the reasons."""

    count: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Signed:
    """The signature of the checkpoint behind an earlier entry."""

    number: int
    digest: str
    signature: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The agent cut ``size`` bytes, with this digest, that continued no entry: it had been killed, or the
    device had lost its power, in the middle of an entry.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The log had its full length: the entries up to ``last``, which has this digest, are removed."""

    last: int
    digest: str


Event = Started | Stopped | InForce | Answered | Refusals | Signed | Cut | Dropped
_EVENTS: Final[dict[str, type[Event]]] = {
    "started": Started,
    "stopped": Stopped,
    "in force": InForce,
    "answered": Answered,
    "refusals": Refusals,
    "signed": Signed,
    "cut": Cut,
    "dropped": Dropped,
}
_WORDS: Final = {kind: word for word, kind in _EVENTS.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry: its number from 1 on, its time (s since 1970, by the device's clock), and its event."""

    number: int
    time: float
    event: Event


@dataclass(frozen=True, slots=True)
class LogHead:
    """The number of the last entry of a log, and the digest of its line; those of an empty log."""

    number: int = 0
    digest: str = ""


def digest_of(line: str) -> str:
    """Return the SHA-256 of a line, in hexadecimal digits."""
    return hashlib.sha256(line.encode()).hexdigest()


def encode(head: LogHead, time: float, event: Event) -> str:
    """Return the line behind ``head``."""
    found = described(Entry(head.number + 1, round(time, 3), event)) | {"previous": head.digest}
    return json.dumps(found, separators=(",", ":"))


def described(entry: Entry) -> dict[str, Any]:
    """Return an entry as plain data, its event by name."""
    event = entry.event
    return {
        "number": entry.number,
        "time": entry.time,
        "event": _WORDS[type(event)],
        "about": dump(event),
    }


def checkpoint(device: str, head: LogHead, nonce: str = "", oldest: int = 0) -> str:
    """Return the text that a device signs for the head of its log. For whoever asks it has the number of the
    ``oldest`` entry, so that nobody can cut the front of a copy, and the ``nonce`` of the question, which no
    earlier signature can have. The signatures in the log itself have neither.
    """
    text = f"millpond audit log of {device}\n{head.number}\n{head.digest}\n"
    return f"{text}{oldest}\n{nonce}\n" if nonce else text


def is_nonce(text: str) -> bool:
    """Return whether a text may be a nonce: 16 to 128 letters, digits, points, hyphens and underscores."""
    return bool(_NONCE.fullmatch(text))


class ChainReader:
    """Reads lines in order from behind ``head`` on; without a ``head`` the first line may be any."""

    def __init__(self, head: LogHead | None) -> None:
        self.head = head

    def take(self, line: str) -> Entry:
        """Return the entry of the next line. Raises ProtocolError for a line that does not continue the
        chain.
        """
        number = self.head.number + 1 if self.head else None
        which = f"entry {number}" if number else "the first entry"
        if len(line) > LONGEST_LINE or not line.isascii():
            raise ProtocolError(f"{which} of the audit log is no entry")
        try:
            previous, entry = _decoded(line)
        except (ValueError, TypeError, KeyError, ConfigError, RecursionError):
            raise ProtocolError(f"{which} of the audit log is no entry") from None
        if self.head and (entry.number, previous) != (number, self.head.digest):
            raise ProtocolError(f"{which} of the audit log does not continue the chain: it has been changed")
        if entry.number == 1 and previous:
            raise ProtocolError("the first entry of the audit log continues another one")
        self.head = LogHead(entry.number, digest_of(line))
        return entry


def _decoded(line: str) -> tuple[str, Entry]:
    found = json.loads(line, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    event = load(_EVENTS[found["event"]], found["about"], "entry", strict=False)
    number, time, previous = found["number"], found["time"], found["previous"]
    if type(number) is not int or number < 1 or not isinstance(previous, str):
        raise ValueError
    if type(time) not in (int, float) or not 0 <= time <= LATEST:
        raise ValueError
    if isinstance(event, InForce):
        _check_depth(event.rules, _DEEPEST)
    return previous, Entry(number, float(time), event)


def _check_depth(value: object, left: int) -> None:
    """Raise ValueError for rules that are nested deeper: what reads an entry goes down by recursion."""
    if isinstance(value, dict | list):
        if not left:
            raise ValueError
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, left - 1)


def _whole(text: str) -> int:
    value = int(text)
    if not 0 <= value < _LARGEST:
        raise ValueError
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
