# SPDX-License-Identifier: Apache-2.0
"""Data sets of Parquet and tar files."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import default_collate

from millpond.base.errors import LocalError
from millpond.train.data.errors import DataError
from millpond.train.data.parquet import ParquetRows
from millpond.train.data.tar import TarSamples

ROWS, GROUP = 25, 4


def write_parquet(path: Path, start: int, count: int) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: millpond[parquet]")
    from pyarrow import parquet

    numbers = range(start, start + count)
    table = arrow.table(
        {
            "number": arrow.array(numbers, arrow.int32()),
            "half": arrow.array([number / 2 for number in numbers], arrow.float32()),
            "text": [f"row {number}" for number in numbers],
            "raw": [bytes([number % 256]) * 3 for number in numbers],
            "list": arrow.array([[number] * (number % 3) for number in numbers], arrow.list_(arrow.int64())),
            "maybe": [None if number % 5 == 0 else number for number in numbers],
        }
    )
    parquet.write_table(table, path, row_group_size=GROUP)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ParquetRows:
    """Two files with row groups of four and fewer rows."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(folder / "b.parquet", 10, ROWS - 10)
    write_parquet(folder / "a.parquet", 0, 10)
    (folder / "notes.txt").write_text("not a row")
    return ParquetRows(folder)


def number_of(sample: Mapping[str, Any]) -> int:
    number = int(sample["number"])
    assert sample["half"] == number / 2
    assert sample["text"] == f"row {number}"
    assert sample["raw"] == bytes([number]) * 3
    assert sample["list"].tolist() == [number] * (number % 3)
    assert sample["maybe"] == (None if number % 5 == 0 else number)
    return number


@given(some.lists(some.integers(0, ROWS - 1)))
def test_any_rows_of_all_files_in_any_order(rows: ParquetRows, indices: list[int]) -> None:
    assert len(rows) == ROWS
    assert [number_of(sample) for sample in rows.__getitems__(indices)] == indices


def test_rows_of_chosen_columns_become_tensors_of_their_types(rows: ParquetRows) -> None:
    chosen = ParquetRows(rows._files, ["half", "number"])
    batch = default_collate(chosen.__getitems__([3, 24]))
    assert list(batch) == ["half", "number"]
    assert batch["number"].dtype == torch.int32
    assert batch["half"].tolist() == [1.5, 12]
    assert chosen[-1]["number"] == ROWS - 1
    with pytest.raises(IndexError):
        chosen[ROWS]


def test_a_row_group_is_read_once_by_many_threads_and_few_are_kept(rows: ParquetRows) -> None:
    small = ParquetRows(rows._files, cache=1)
    reads = []
    read = small._read
    small._read = lambda number: reads.append(number) or read(number)  # type: ignore[method-assign]
    begin = threading.Barrier(8)
    found: list[int] = []

    def fetch() -> None:
        begin.wait()
        found.extend(number_of(sample) for sample in small.__getitems__([8, 9]))

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 8 * [8, 9]
    assert reads == [2]
    small[0]
    assert list(small._cached) == [0]
    whole = ParquetRows(rows._files)
    whole.__getitems__(range(ROWS))
    assert len(whole._cached) == len(whole._groups)


def test_parquet_files_that_are_cut_are_named(tmp_path: Path) -> None:
    path = tmp_path / "patient-4711.parquet"
    write_parquet(path, 0, ROWS)
    opened = ParquetRows(tmp_path)
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is not a whole Parquet file") as caught:
            ParquetRows(tmp_path)
        assert str(path) in str(caught.value)
        assert "4711" not in caught.value.discreet
    os.truncate(path, 10)
    with pytest.raises(DataError, match="is not a whole Parquet file"):
        opened[0]
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        opened[ROWS - 1]
    path.write_bytes(whole)
    assert number_of(opened[ROWS - 1]) == ROWS - 1


def test_parquet_without_what_is_wanted_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^missing data: {tmp_path} has no \*\.parquet$"):
        ParquetRows(tmp_path)
    write_parquet(tmp_path / "a.parquet", 0, 3)
    with pytest.raises(DataError, match=r"has no column 'label'$"):
        ParquetRows(tmp_path, ["number", "label"])


def test_without_pyarrow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LocalError, match=r"install millpond\[parquet\]"):
        ParquetRows(tmp_path)


SAMPLES: list[dict[str, bytes]] = [
    {"jpg": bytes([number]) * (700 * number), "cls": b"%d" % (number % 3)} for number in range(6)
]


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def write_tar(path: Path, start: int, stop: int, form: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as shard:
        directory = tarfile.TarInfo("images")
        directory.type = tarfile.DIRTYPE
        shard.addfile(directory)
        add(shard, "README", b"no sample: it has no extension")
        for number in range(start, stop):
            for extension, content in SAMPLES[number].items():
                add(shard, f"images/{'long' * 40}{number:04}.{extension.upper()}", content)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> TarSamples:
    folder = tmp_path_factory.mktemp("tar")
    write_tar(folder / "shard-1.tar", 4, 6, tarfile.PAX_FORMAT)
    write_tar(folder / "shard-0.tar", 0, 4)
    return TarSamples(folder)


@given(some.lists(some.integers(0, len(SAMPLES) - 1)))
def test_any_samples_of_all_shards_in_any_order(samples: TarSamples, indices: list[int]) -> None:
    assert len(samples) == len(SAMPLES)
    assert samples.__getitems__(indices) == [SAMPLES[index] for index in indices]


def test_one_sample_by_its_number(samples: TarSamples) -> None:
    assert samples[-1] == SAMPLES[-1]
    with pytest.raises(IndexError):
        samples[len(SAMPLES)]


def test_tar_files_that_are_cut_are_named(tmp_path: Path) -> None:
    path = tmp_path / "patient-4711.tar"
    write_tar(path, 0, 6)
    opened = TarSamples(tmp_path)
    whole = path.read_bytes()
    with tarfile.open(path) as shard:
        used = shard.getmembers()[-1].offset_data + 512
    # in the first head, between a head and its file, in a file, in a head, and without the mark of the end
    for size in (0, 100, 512 + 100, used - 4000, used - 612, used, used - 1024):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is not a whole tar file") as caught:
            TarSamples(tmp_path)
        assert "4711" not in caught.value.discreet
    assert opened[0] == SAMPLES[0]
    with pytest.raises(DataError, match="is shorter than it was"):
        opened[5]
    damaged = bytearray(whole)
    with tarfile.open(fileobj=io.BytesIO(whole)) as shard:
        damaged[shard.getmembers()[5].offset] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="is not a whole tar file"):
        TarSamples(tmp_path)


def test_a_folder_without_tar_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^missing data: {tmp_path} has no \*\.tar$"):
        TarSamples(tmp_path)
