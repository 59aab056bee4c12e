# SPDX-License-Identifier: Apache-2.0
"""Edge (files): a fleet's directory that members of a group may enter, for the socket and ``fleet.toml``."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from pathlib import Path

from millpond.base.errors import ConfigError, LocalError

_CONFIGURATION = "fleet.toml"


def shared_with(directory: Path, group: str) -> int:
    """Let members of ``group`` enter ``directory`` and read its ``fleet.toml``, and nothing else that is in
    it. Returns the gid. Raises ConfigError for an unknown group, LocalError for one that this process is not
    in.

    Members cannot list the directory. What this process makes there later has no rights for them, either.
    """
    try:
        gid = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group '{group}' on this host") from None
    os.umask(0o077)
    try:
        for entry in directory.iterdir():
            _close(entry, gid)
        os.chown(directory, -1, gid)
        directory.chmod(0o710)
    except OSError as error:
        raise LocalError(f"{error.filename}: cannot be opened to '{group}': {error.strerror}") from None
    return gid


def opened_to(directory: Path, group: str) -> int | None:
    """Return the gid of the ``group`` that ``directory`` is shared with, None for "". Raises as
    ``shared_with``.
    """
    if group:
        return shared_with(directory, group)
    close_to_others(directory)
    return None


def close_to_others(directory: Path) -> None:
    """Let nobody enter ``directory`` but its owner and, if it is open to that, its group."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & stat.S_IRWXO:
        with contextlib.suppress(PermissionError):  # it is another user's, who has opened it so
            directory.chmod(mode & ~stat.S_IRWXO)


def _close(entry: Path, gid: int) -> None:
    mode = entry.lstat().st_mode
    if entry.name == _CONFIGURATION:
        os.chown(entry, -1, gid)
        entry.chmod(stat.S_IMODE(mode) | stat.S_IRGRP)
    elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        entry.chmod(stat.S_IMODE(mode) & stat.S_IRWXU)
