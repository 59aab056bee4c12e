# SPDX-License-Identifier: Apache-2.0
"""The numbers of files in a volume of several file systems."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.fs.store.identity import FileIdentity

NUMBERS = st.integers(0, (1 << 62) - 1)


def test_files_of_the_volumes_own_file_system_have_their_inode_numbers() -> None:
    assert FileIdentity(7).number((7, 256)) == 256


@given(st.sets(st.tuples(st.integers(0, (1 << 64) - 1), NUMBERS), max_size=20))
def test_no_two_files_have_one_number(keys: set[tuple[int, int]]) -> None:
    numbers = {FileIdentity(7).number(key) for key in keys}
    assert len(numbers) == len(keys) and all(0 <= number < 1 << 63 for number in numbers)


def test_a_number_is_the_same_in_each_process() -> None:
    assert FileIdentity(7).number((8, 256)) == FileIdentity(9).number((8, 256)) == 0x56CF737903D4C7D1
