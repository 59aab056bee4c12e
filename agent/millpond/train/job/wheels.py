# SPDX-License-Identifier: Apache-2.0
"""Pure: wheels (PEP 427): which of a job's fit this Python, and which of their files are installed."""

from __future__ import annotations

import stat
import sys
import zipfile
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from millpond.base.errors import ConfigError
from millpond.train.job.files import check_name

MOST_DIRECTORY = 16 << 20
"""The most bytes of a wheel's directory, all of which zipfile takes into memory."""
_OWN = frozenset(
    {"millpond", "msgpack", "numpy", "pil", "pillow", "psutil", "pyroute2", "safetensors", "torch"}
)
"""Distributions and modules that workers are made of."""
_END = 22  # bytes of the record at the end of an archive
_LOCATOR = 20  # bytes of the one before it, of an archive that is too large for the other


def fitting(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the wheels that fit this Python and machine, of each distribution the best one.
    Raises ConfigError for what is no wheel, for one of what workers are made of, and for a distribution
    without a wheel that fits.
    """
    if not names:
        return ()
    from packaging import tags, utils  # most jobs have no wheels

    ranks = {tag: rank for rank, tag in enumerate(tags.sys_tags())}
    found: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(names):
        try:
            distribution, _, _, own = utils.parse_wheel_filename(PurePosixPath(name).name)
        except utils.InvalidWheelFilename:
            raise ConfigError(f"wheels: {name}: this is no name of a wheel") from None
        if distribution in _OWN:
            raise ConfigError(f"wheels: {name}: workers have their own {distribution}; leave it out")
        fits = [(ranks[tag], name) for tag in own if tag in ranks]
        found.setdefault(distribution, []).extend(fits)
    for wanted, fits in found.items():
        if not fits:
            here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {next(tags.platform_tags())}"
            raise ConfigError(f"wheels: there is none of {wanted} for {here}")
    return tuple(sorted(min(fits)[1] for fits in found.values()))


def check_end(tail: bytes, where: str) -> None:
    """Check the last bytes of an archive, _END + _LOCATOR or all. Raises ConfigError unless they are those of
    one whose directory is small.
    """
    end = tail[-_END:]
    is_plain = end[:4] == b"PK\5\6" and end[-2:] == b"\0\0" and tail[-_END - _LOCATOR :][:4] != b"PK\6\7"
    if not is_plain or int.from_bytes(end[12:16], "little") > MOST_DIRECTORY:
        raise ConfigError(f"{where}: this is no wheel")


def members(entries: Sequence[zipfile.ZipInfo], where: str) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a wheel that are installed, by the names under which they are. Scripts, headers
    and data are not. Raises ConfigError for names that lead elsewhere, links, and modules that would take the
    place of Python's or of those that workers are made of.
    """
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        if entry.is_dir():
            continue
        check_name(entry.filename, where)
        if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
            raise ConfigError(f"{where}: '{entry.filename}' is not a regular file")
        if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ConfigError(f"{where}: '{entry.filename}' is packed as in no wheel")
        name = _installed_name(entry.filename)
        if not name:
            continue
        module = name.partition("/")[0].partition(".")[0]
        if module.lower() in _OWN or module in sys.stdlib_module_names:
            raise ConfigError(f"{where}: it would replace '{module}', which workers have of their own")
        if name in found:
            raise ConfigError(f"{where}: '{name}' is in it twice")
        found[name] = entry
    return found


def _installed_name(name: str) -> str:
    first, *rest = PurePosixPath(name).parts
    if not rest:
        return "" if name.endswith(".pth") else name  # which would run code wherever Python starts
    if first.endswith(".data"):
        return "/".join(rest[1:]) if rest[0] in ("purelib", "platlib") else ""
    return name
