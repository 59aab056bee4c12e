# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes): checks whether a volume keeps its promises, as far as the host can see. Changes nothing."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from millpond.base.deadline import Deadline
from millpond.base.text import printable
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.status import StatusIs
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

_UNFINISHED = re.compile(r"\..{1,60}\.[0-9a-f]{12}\.part", re.DOTALL)
_HIDDEN = (errno.ENOENT, errno.EINVAL, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_COPYING_SECONDS = 60.0
_PROBE_SECONDS = 10.0
_UNKNOWN_NODE = 1 << 40  # a node number that no server has issued

_OUT = PRIVATE.encode()
_PROBES: tuple[tuple[bytes, ...], ...] = (
    (_OUT,),
    (_OUT, b"."),
    (b"..",),
    (b"..", b"..", b"etc"),
    (b"", _OUT),
    (b"/",),
    (b"/etc/passwd",),
    (b".." + b"/" + _OUT,),
    (PUBLIC.encode(), b"..", _OUT),
    (PUBLIC.encode() + b"/../" + _OUT,),
    (_OUT + b"\0",),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a volume, and its remedy."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


@dataclass(slots=True)
class _File:
    """A file with several names: its attributes, and the names found."""

    attributes: Attributes
    names: list[str] = field(default_factory=list)


class TreeWalk:
    """Checks all files of a volume below a folder. ``files`` counts them, ``findings`` are the problems."""

    def __init__(self, volume: PathAdapter, clock: Callable[[], float] = time.time) -> None:
        self._volume, self._clock = volume, clock
        self._linked: dict[int, _File] = {}
        self.files = 0
        self.findings: list[Finding] = []

    def check(self, top: str = PUBLIC) -> None:
        """Walk the tree below ``top``. A file that vanishes meanwhile is no problem."""
        left = [top]
        while left:
            path = left.pop()
            try:
                left += self._check_path(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE) or path == top:
                    self.findings.append(_unreadable(path, error))
        for inode, file in self._linked.items():
            self._compare(inode, file)

    def _check_path(self, path: str) -> list[str]:
        """Check one path. Returns the paths below it."""
        found = self._volume.getattr(path)
        self.files += 1
        if stat.S_ISDIR(found.mode):
            return [f"{path}/{entry.name}" for entry in self._volume.readdir(path)]
        if found.links > 1:
            self._linked.setdefault(found.inode, _File(found)).names.append(path)
        idle = self._clock() - found.mtime / 1e9
        if _UNFINISHED.fullmatch(path.rpartition("/")[2]) and idle > _COPYING_SECONDS:
            problem = f"{printable(path)} is an unfinished copy, last written {_age(idle)} ago"
            self.findings.append(Finding(problem, "the same 'millpond cp' goes on with it, or remove it"))
        elif stat.S_ISREG(found.mode):
            handle = self._volume.open(path, os.O_RDONLY)
            try:
                self._volume.read(handle, 1, 0)
            finally:
                self._volume.release(handle)
        elif stat.S_ISLNK(found.mode):
            self._volume.readlink(path)
        return []

    def _compare(self, inode: int, file: _File) -> None:
        """Compare the link count with the names found, unless the file has changed since."""
        if file.attributes.links == len(file.names):
            return
        try:
            now = self._volume.getattr(file.names[0])
        except OSError:  # the file is gone meanwhile
            return
        if (now.inode, now.ctime, now.links) != (inode, file.attributes.ctime, file.attributes.links):
            return
        problem = f"{printable(file.names[0])} has {now.links} links, and {len(file.names)} names were found"
        remedy = (
            "the others lie in directories that cannot be read here; if all can, check the flash with fsck"
        )
        self.findings.append(Finding(problem, remedy))


def _unreadable(path: str, error: OSError) -> Finding:
    problem = f"{printable(path)} cannot be read: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return Finding(problem, "give the user of the volume's server a right to it on the device")
    return Finding(problem, "look at the flash's health and at the kernel's log on the device")


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def probe(channel: Channel) -> list[Finding]:
    """Try to reach files outside the public part, on a connection for this alone. Returns findings."""
    welcome = channel.call(p.SessionHello(os.urandom(16), os.urandom(16)), p.SessionWelcome, _deadline())
    found = []
    for names in _PROBES:
        answer = _answer(channel, p.Walk(welcome.root, names))
        if not (isinstance(answer, p.Error) and answer.errno in _HIDDEN):
            path = printable(os.fsdecode(b" > ".join(names)))
            found.append(Finding(f"the host gets '{answer.NAME}' for {path}", _LEAK))
    for request in (p.GetAttributes(_UNKNOWN_NODE), p.ReadFile(_UNKNOWN_NODE, 1, 0)):
        if not isinstance(_answer(channel, request), p.Error):
            found.append(Finding("the host may guess the numbers of files", _LEAK))
    channel.call(p.Goodbye(), p.Done, _deadline())
    return found


_LEAK = "unmount it everywhere and stop the agent: the private part may be open"


def _deadline() -> Deadline:
    return Deadline.after(_PROBE_SECONDS)


def _answer(channel: Channel, request: Message) -> Message:
    channel.send(request, _deadline())
    answer = channel.receive(_deadline()).message
    channel.receive_payload(MAX_TRANSFER, _deadline())
    return answer


def check_status(status: StatusIs) -> Iterator[Finding]:
    """Check a server's status."""
    if not status.device:
        yield Finding(
            "the device's own mount has not reported to the server, so that the host keeps nothing",
            "see 'millpond logs' of the device; the agent starts again with a mount that died",
        )
    for client in status.clients:
        if client.kept and client.heard is None and not client.connected:
            yield Finding(
                f"client {client.number} is gone, and {client.kept} files still count as kept by it",
                "check again in two minutes: by then it must be forgotten",
            )
    if status.quota is not None and status.used is not None and status.used > status.quota:
        yield Finding(
            f"the public part has {status.used - status.quota} bytes more than its quota",
            "the device wrote them: remove files there, or raise public_quota",
        )
