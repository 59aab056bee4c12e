# SPDX-License-Identifier: Apache-2.0
"""Components of paths, the layout of a volume's directory, the numbers of files of several file systems."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from millpond.fs.store.identity import FileIdentity
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.fs.store.usage import private_bytes
from millpond.fs.vfs.path_api import components

NUMBERS = st.integers(0, (1 << 62) - 1)


@given(st.text(alphabet="ab./\0"))
def test_components_are_plain_or_refused(path: str) -> None:
    try:
        names = components(path)
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        assert "/".join(names) == path
        assert not {"", ".", ".."} & set(names)


def test_layout(tmp_path: Path) -> None:
    backing = tmp_path / "flash" / "backing"
    prepare(backing)
    assert stat.S_IMODE((backing / PUBLIC).stat().st_mode) == 0o777
    assert stat.S_IMODE((backing / PRIVATE).stat().st_mode) == 0o700
    (backing / PUBLIC).chmod(0o755)
    prepare(backing)
    assert stat.S_IMODE((backing / PUBLIC).stat().st_mode) == 0o755
    (backing / PUBLIC / "x").write_bytes(b"1234")
    (backing / PRIVATE / "deep").mkdir()
    (backing / PRIVATE / "deep" / "y").write_bytes(b"123")
    (backing / PRIVATE / "z").hardlink_to(backing / PRIVATE / "deep" / "y")
    (backing / PRIVATE / "link").symlink_to("z")
    assert private_bytes(backing) == 3


def test_files_of_the_volumes_own_file_system_have_their_inode_numbers() -> None:
    assert FileIdentity(7).number((7, 256)) == 256


@given(st.sets(st.tuples(st.integers(0, (1 << 64) - 1), NUMBERS), max_size=20))
def test_no_two_files_have_one_number(keys: set[tuple[int, int]]) -> None:
    numbers = {FileIdentity(7).number(key) for key in keys}
    assert len(numbers) == len(keys) and all(0 <= number < 1 << 63 for number in numbers)


def test_a_number_is_the_same_in_each_process() -> None:
    assert FileIdentity(7).number((8, 256)) == FileIdentity(9).number((8, 256)) == 0x56CF737903D4C7D1
