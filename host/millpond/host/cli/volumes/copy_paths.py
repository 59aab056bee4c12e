# SPDX-License-Identifier: Apache-2.0
"""Edge (this machine's files): the paths of a copy, on this machine or on devices, as a user writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.host.fleet.directory import Fleet
from millpond.host.records import device_set


@dataclass(frozen=True, slots=True)
class CopyEndpoint:
    """A path as given by the user, on a device, or on this machine if ``device`` is empty."""

    text: str
    device: str
    path: str

    @property
    def name(self) -> str:
        """The name as given by the user, also of a symbolic link."""
        given = self.text.rstrip("/").rpartition("/")[2]
        return given if given not in ("", ".", "..") and ":" not in given else self.path.rpartition("/")[2]


def endpoint(text: str, devices: Sequence[str]) -> CopyEndpoint:
    """Parse a path: ``csd0:public/x`` is on a device of the fleet, others are on this machine."""
    name, colon, path = text.partition(":")
    if colon and name in devices:
        return CopyEndpoint(text, name, path.strip("/"))
    if colon and "/" not in name and not Path(text).exists():
        raise LocalError(f"there is no device '{name}' in the fleet; write ./{text} for a file of that name")
    return CopyEndpoint(text, "", from_root(Path(text)))


def endpoints(text: str, fleet: Fleet) -> list[CopyEndpoint]:
    """Parse a path that may be on several devices: ``csd[0-2]:public/x``, ``@fast:public/x``."""
    devices, colon, path = text.partition(":")
    if not colon or "/" in devices or device_set.is_one(devices) or Path(text).exists():
        return [endpoint(text, [device.name for device in fleet.config.device])]
    return [CopyEndpoint(f"{name}:{path}", name, path.strip("/")) for name in fleet.named(devices)]


def from_root(path: Path) -> str:
    """Return the path below / without symbolic links on the way, which volumes do not follow. The file itself
    need not exist.
    """
    found = path.resolve() if path.exists() else path.parent.resolve() / path.name
    return str(found).lstrip("/")


def check(sources: Sequence[CopyEndpoint], targets: Sequence[CopyEndpoint]) -> None:
    """Raise LocalError for sources and targets that cannot be copied to each other."""
    for source in sources:
        _check_public(source, is_target=False)
        for target in targets:
            _check_public(target, is_target=True)
            if not source.device and not target.device:
                raise LocalError(
                    f"{source.text} and {target.text}: one of them must be on a device: csd0:public/..."
                )
            if source.device == target.device and f"{target.path}/".startswith(f"{source.path}/"):
                raise LocalError(f"{source.text} cannot be copied to {target.text}, into itself")
    if twice := [name for name, count in Counter(source.name for source in sources).items() if count > 1]:
        where = "; copy from one device at a time" if sources[0].device else ""
        raise LocalError(f"{targets[0].text}: two of the sources would be '{twice[0]}' there{where}")


def _check_public(at: CopyEndpoint, *, is_target: bool) -> None:
    """Raise LocalError for the private part of a device: no user of the host sees that it exists; and for a
    target outside its public part.
    """
    part = at.path.split("/")[0]
    if at.device and part == PRIVATE:
        way = f"tar c FOLDER | millpond run --admin {at.device} -- tar x -C /volume/{PRIVATE}"
        raise LocalError(
            f"{at.text}: only the device's owner reaches its private part, by the admin key: {way}"
        )
    if at.device and is_target and part != PUBLIC:
        raise LocalError(f"{at.text}: a device takes files below {at.device}:{PUBLIC}/ alone")
