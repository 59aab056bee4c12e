# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the seed of a device: its identity, for its first boot.

It is a header of 512 bytes (magic, version, length and SHA-256 of what follows) and a plain tar of the
device's own ``etc``: names without folders, modes kept, nobody's names or times.
"""

from __future__ import annotations

import hashlib
import io
import stat
import struct
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from millpond.base.errors import LocalError

HEADER = 512
MAGIC = b"millpond-seed\0"
VERSION = 1
WIPED = b"millpond-wiped\0".ljust(HEADER, b"\0")
"""What a device leaves of its seed when it has taken it over, before the zeros over all the rest."""
MAX_TAR = (1 << 20) - HEADER
MAX_MEMBERS = 64
_LAYOUT = struct.Struct(f"<{len(MAGIC)}sIQ32s")


@dataclass(frozen=True, slots=True)
class Member:
    """A file of an identity."""

    name: str
    mode: int
    data: bytes


def seed(directory: Path, more: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Return the seed with the files of ``directory``, and ``more`` in their place; the same files give the
    same bytes.

    Raises LocalError for a file that no seed may hold, OSError.
    """
    members = [_member_of(path) for path in sorted(directory.iterdir()) if path.name not in more]
    members += [Member(name, 0o644, data) for name, data in more.items()]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for member in sorted(members, key=lambda member: member.name):
            _check_name(member.name, str(directory))
            _add(tar, member)
    content = archive.getvalue()
    if len(content) > MAX_TAR or len(members) > MAX_MEMBERS:
        most = f"{MAX_TAR} bytes and {MAX_MEMBERS} files"
        raise LocalError(f"{directory} is too large for a seed: {most} at most")
    header = _LAYOUT.pack(MAGIC, VERSION, len(content), hashlib.sha256(content).digest())
    return header.ljust(HEADER, b"\0") + content


def _member_of(path: Path) -> Member:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise LocalError(f"{path} is no regular file, which alone can be in a seed")
    return Member(path.name, stat.S_IMODE(found.st_mode) & 0o777, path.read_bytes())


def _add(tar: tarfile.TarFile, member: Member) -> None:
    about = tarfile.TarInfo(member.name)
    about.size, about.mode = len(member.data), member.mode
    try:
        tar.addfile(about, io.BytesIO(member.data))
    except ValueError as error:
        raise LocalError(f"{member.name} can not be in a seed: {error}") from None


def read(file: BinaryIO) -> tuple[Member, ...]:
    """Return the identity in a seed; () if there is none, or none any more.

    Raises LocalError for a seed that is damaged, of another version, or with files that no identity has.
    """
    header = file.read(HEADER)
    if not header.strip(b"\0") or header == WIPED:
        return ()
    if len(header) < HEADER or not header.startswith(MAGIC):
        raise LocalError("the seed's header is none: flash the image again")
    _, version, length, digest = _LAYOUT.unpack_from(header)
    if version != VERSION:
        raise LocalError(f"the seed is of version {version}, not {VERSION}: flash a newer image")
    if length > MAX_TAR:
        raise LocalError(f"the seed claims {length} bytes: flash the image again")
    content = file.read(length)
    if len(content) != length or hashlib.sha256(content).digest() != digest:
        raise LocalError("the seed is damaged: flash the image again")
    return _members(content)


def _members(content: bytes) -> tuple[Member, ...]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = tuple(_member(tar, about) for about in tar)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise LocalError(f"the seed's tar is damaged: {error}") from None
    names = [member.name for member in members]
    if len(set(names)) < len(names) or len(names) > MAX_MEMBERS:
        raise LocalError("the seed holds a name twice, or too many")
    return members


def _member(tar: tarfile.TarFile, about: tarfile.TarInfo) -> Member:
    _check_name(about.name, "the seed")
    plain = about.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not about.pax_headers
    if not plain or about.mode & ~0o777 or about.size > MAX_TAR:
        raise LocalError(f"the seed: {about.name!r:.40} is no regular file")
    file = tar.extractfile(about)
    assert file is not None
    data = file.read()
    if len(data) != about.size:
        raise LocalError(f"the seed: {about.name!r:.40} is cut short")
    return Member(about.name, about.mode, data)


def _check_name(name: str, where: str) -> None:
    good = name.isascii() and name.isprintable() and 0 < len(name) <= 100
    if not good or "/" in name or name in (".", ".."):
        raise LocalError(f"{where}: {name!r:.40} can not be the name of a file of a seed")
