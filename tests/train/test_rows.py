# SPDX-License-Identifier: Apache-2.0
"""Rows of files that are read as they are needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.train.data import rows
from millpond.train.data.errors import DataError
from millpond.train.data.rows import ArrayRows, FileRows

COUNT = 40
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 5), dtype=np.uint8)
SHM = Path("/dev/shm")  # no disk below


@pytest.fixture(scope="module", params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of a disk, and one of a file system without."""
    if request.param == "disk":
        yield tmp_path_factory.mktemp("rows")
        return
    if not os.access(SHM, os.W_OK):
        pytest.skip(f"{SHM} is not usable")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def file_rows(folder: Path) -> FileRows:
    path = folder / "images"
    path.write_bytes(b"head" + IMAGES.tobytes())
    return FileRows(path, "images", 4, IMAGES.shape, IMAGES.dtype)


@given(some.lists(some.integers(0, COUNT - 1) | some.sampled_from([3, 4, 5])))
def test_any_rows_in_any_order_are_those_of_the_array(file_rows: FileRows, indices: list[int]) -> None:
    found = file_rows.read(indices)
    assert found.dtype == IMAGES.dtype
    np.testing.assert_array_equal(found, IMAGES[np.array(indices, np.int64)])


@pytest.mark.parametrize("indices", [range(COUNT), [COUNT - 1, 0]])
def test_a_file_that_was_cut_is_named(tmp_path: Path, indices: list[int]) -> None:
    path = tmp_path / "images"
    path.write_bytes(IMAGES.tobytes())
    opened = FileRows(path, "a/images.npy", 0, IMAGES.shape, IMAGES.dtype)
    os.truncate(path, IMAGES.nbytes - 1)
    with pytest.raises(DataError, match=r"^a/images.npy is shorter than it was$"):
        opened.read(indices)


def test_a_small_npy_file_is_kept_in_memory_and_a_large_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "images.npy", IMAGES)
    small = rows.npy(tmp_path, "images.npy")
    monkeypatch.setattr(rows, "IN_MEMORY", IMAGES.nbytes - 1)
    large = rows.npy(tmp_path, "images.npy")
    assert isinstance(small, ArrayRows)
    assert isinstance(large, FileRows)
    for found in (small, large):
        np.testing.assert_array_equal(found.read([7, 2]), IMAGES[[7, 2]])
