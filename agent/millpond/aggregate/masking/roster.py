# SPDX-License-Identifier: Apache-2.0
"""Pure: a roster, the devices that may be one cohort and their lasting public keys: as owners sign it, and as
a device decides by it.

A file has the roster's text, then the signature of it (PROTOCOL.sshsig of OpenSSH). The text is a line with
the roster's number, and for each device one with its name and its key, as ``cohort.pub`` has it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from millpond.aggregate.masking.messages import LASTING_BYTES, LEAST_COHORT, MOST_COHORT
from millpond.base.errors import ConfigError, Refused

NAMESPACE = "millpond-roster"
"""The namespace of signatures, see ssh-keygen(1): a signature of code is none of a roster."""
MOST_BYTES = 1 << 18
"""Bytes of a file: a line of a device has at most 152 characters, a signature some 3,000."""
MOST_NUMBER = 1 << 53
_HEADING, _SIGNATURE = "millpond roster", "-----BEGIN SSH SIGNATURE-----"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """The keys of ``devices`` by name. A roster with a larger ``number`` takes the place of one before."""

    number: int
    devices: Mapping[str, bytes]

    @property
    def text(self) -> str:
        """The text that owners sign."""
        lines = [f"{name} {base64.b64encode(key).decode()}" for name, key in sorted(self.devices.items())]
        return "\n".join([f"{_HEADING} {self.number}", *lines, ""])


@dataclass(frozen=True, slots=True)
class CohortRoster:
    """The decision of a device: the fewest devices of a sum, and the lasting public keys of the members that
    it accepts, by name; none ``pinned``: any that the host names. Owners have signed those of a roster with a
    ``number``.
    """

    least: int = LEAST_COHORT
    pinned: Mapping[str, bytes] = field(default_factory=dict)
    number: int = 0

    def check(self, members: Mapping[str, bytes]) -> None:
        """Raise Refused for members among which there may be none."""
        if len(members) < max(self.least, LEAST_COHORT):
            refuse(f"least_devices: {len(members)} devices are in the cohort; it needs {self.least}")
        if len(members) > MOST_COHORT:
            refuse(f"cohort: {len(members)} devices are more than {MOST_COHORT}")
        if self.pinned:
            odd = next((each for each, key in members.items() if self.pinned.get(each) != key), None)
            if odd is not None:
                place = f"in roster {self.number}" if self.number else "pinned"
                refuse(f"cohort: '{odd}' is not {place} with this key")


def refuse(text: str) -> NoReturn:
    """Raise Refused by the device's policy."""
    raise Refused("", "policy", f"policy.{text}")


def read(text: str, where: str) -> tuple[SignedRoster, str]:
    """Return the roster in the text of a file, and its signature, "" if it has none. A file without a number
    has 0. Raises ConfigError, naming ``where``.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{where}: it has more than {MOST_BYTES} bytes, which no roster has")
    listed, begin, signature = text.partition(_SIGNATURE)
    number, devices = 0, dict[str, bytes]()
    for place, line in enumerate(filter(None, map(str.strip, listed.splitlines()))):
        if not place and line.startswith(f"{_HEADING} "):
            number = _number(line.removeprefix(_HEADING).strip(), where)
            continue
        name, key = _device(line, where)
        if name in devices or key in devices.values():
            raise ConfigError(f"{where}: '{name}' or its key is there twice")
        devices[name] = key
    if not 0 < len(devices) <= MOST_COHORT:
        raise ConfigError(f"{where}: a roster has 1 to {MOST_COHORT} devices; it has {len(devices)}")
    return SignedRoster(number, devices), begin + signature


def _number(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,16}", text) or not int(text) < MOST_NUMBER:
        raise ConfigError(f"{where}: '{text[:40]}' is no number of a roster")
    return int(text)


def _device(line: str, where: str) -> tuple[str, bytes]:
    name, _, key = line.partition(" ")
    try:
        found = base64.b64decode(key.strip(), validate=True)
    except ValueError:
        found = b""
    if not _NAME.fullmatch(name) or len(found) != LASTING_BYTES:
        raise ConfigError(
            f"{where}: '{line[:80]}' is no line of a device's cohort.pub, such as 'csd0 3q2+...='"
        )
    return name, found
