# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole: secrets are for their owner alone, or are not written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.linux.files import write_durably, write_secret

_fchmod = os.fchmod


def all_may_read(descriptor: int, _mode: int) -> None:
    _fchmod(descriptor, 0o755)


def refuse(descriptor: int, _mode: int) -> None:
    _fchmod(descriptor, 0o755)
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("fchmod", [all_may_read, refuse])
def test_no_secret_is_left_where_a_file_system_has_no_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fchmod: Callable[[int, int], None]
) -> None:
    """The authority's keys on a FAT stick were readable by all, and nobody was told."""
    (tmp_path / "ca.key").write_bytes(b"old")
    monkeypatch.setattr(os, "fchmod", fchmod)
    with pytest.raises(PermissionError, match=r"keeps no modes, so others could read it.*ca\.key"):
        write_secret(tmp_path / "ca.key", b"key")
    assert [path.name for path in tmp_path.iterdir()] == ["ca.key"]
    assert (tmp_path / "ca.key").read_bytes() == b"old"
    write_durably(tmp_path / "known", b"x", 0o755)


def test_a_secret_is_its_owners(tmp_path: Path) -> None:
    write_secret(tmp_path / "key", b"key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
