# SPDX-License-Identifier: Apache-2.0
"""The root of a volume on its device, with what is mounted in the private part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from millpond.fs.mount.volume_root import lay_out, take_away
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls

_SAFE = os.ST_NOSUID | os.ST_NODEV


def _flags(path: Path) -> int:
    return os.statvfs(path).f_flag & (_SAFE | os.ST_RDONLY)


def test_nothing_in_a_volume_is_set_uid_or_a_device(
    tmp_path: Path, in_namespace: Callable[[Callable[[], None]], None]
) -> None:
    def body() -> None:
        backing, root = tmp_path / "flash", tmp_path / "volume"
        root.mkdir()
        syscalls.mount("tmpfs", backing, "tmpfs", 0)
        syscalls.mount("", backing, "", syscalls.MS_SHARED)  # as systemd leaves all mounts
        prepare(backing)
        inner, later = backing / "private" / "inner", backing / "private" / "later"
        for place in (inner, later):
            place.mkdir()
        syscalls.mount("tmpfs", inner, "tmpfs", 0)
        (inner / "below").mkdir()
        syscalls.mount("tmpfs", inner / "below", "tmpfs", 0)
        lay_out(backing, root)
        try:
            assert _flags(root) == _SAFE | os.ST_RDONLY
            for place in (".", "inner", "inner/below"):
                assert _flags(root / "private" / place) == _SAFE
            (root / "private" / "inner" / "f").write_text("inside")
            assert (inner / "f").read_text() == "inside"
            syscalls.mount("tmpfs", later, "tmpfs", 0)
            assert _flags(root / "private" / "later") == _SAFE
            assert not os.path.ismount(root / "private" / "later")
        finally:
            take_away(root)
        assert list(root.iterdir()) == []
        assert _flags(inner) == _flags(inner / "below") == 0  # those of the flash itself stay

    (tmp_path / "flash").mkdir()
    in_namespace(body)
