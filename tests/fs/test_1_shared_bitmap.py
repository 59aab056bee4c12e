# SPDX-License-Identifier: Apache-2.0
"""The shared bitmap: memory of the confined server that the device's mount maps."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from millpond.fs.coherence.shared_bitmap import SharedBitmap, SharedBitmapView

from .support import errno_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize("size", [0, mmap.PAGESIZE, 1 << 20])
def test_the_size_of_the_memory_cannot_be_changed(size: int) -> None:
    """A page that is truncated away would kill the device's mount (SIGBUS) when it looks at its marks."""
    bitmap = SharedBitmap()
    assert errno_of(os.ftruncate, bitmap.descriptor(), size) == errno.EPERM


@pytest.mark.parametrize(("size", "seals"), [(1 << 20, 0), (0, SEALS)], ids=["may-shrink", "too-small"])
def test_other_memory_is_refused(size: int, seals: int) -> None:
    descriptor = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert errno_of(SharedBitmapView, descriptor) == errno.EPROTO


def test_a_file_is_refused(tmp_path: Path) -> None:
    """It has no seals."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 1 << 20)
    assert errno_of(SharedBitmapView, descriptor) == errno.EPROTO
