# SPDX-License-Identifier: Apache-2.0
"""The stripping of the libraries of Python's packages."""

from __future__ import annotations

import pytest

from millpond.images.build import python

HEAD = "  Type           Offset   VirtAddr           PhysAddr           FileSiz  MemSiz   Flg Align\n"


@pytest.mark.parametrize(
    ("lines", "good"),
    [
        (
            "  LOAD           0x000000 0x0000000000000000 0x0000000000000000 0x01000 0x01000 R E 0x10000\n",
            True,
        ),
        (
            "  LOAD           0x0200a8 0x00000000000300a8 0x00000000000300a8 0x01000 0x01000 RW  0x10000\n",
            True,
        ),
        (
            "  LOAD           0x0010a8 0x00000000000300a8 0x00000000000300a8 0x01000 0x01000 RW  0x10000\n",
            False,
        ),
        ("  DYNAMIC        0x001000 0x0000000000030000 0x0000000000030000 0x00100 0x00100 RW  0x8\n", False),
    ],
)
def test_what_no_loader_takes_is_noticed(lines: str, good: bool) -> None:
    assert python.loadable(HEAD + lines) is good
