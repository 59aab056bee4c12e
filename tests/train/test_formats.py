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

import numpy as np
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


def write_columns(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: millpond[parquet]")
    from pyarrow import parquet

    table = arrow.table({name: arrow.array(*values) for name, values in columns.items()})
    parquet.write_table(table, path)
    return path


def test_a_column_has_one_type_whatever_is_missing_in_its_batch(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    columns = {"x": ([1.5, None], arrow.float32()), "n": ([None, 3], arrow.int16()), "b": ([True, None],)}
    rows = ParquetRows(write_columns(tmp_path / "a.parquet", **columns))
    alone, (beside, missing) = rows[0], rows.__getitems__([0, 1])
    assert alone == beside and {type(row["x"]) for row in (alone, beside)} == {np.float32}
    assert (missing["x"], missing["b"], alone["n"]) == (None, None, None)
    assert type(missing["n"]) is np.int16 and beside["b"] is np.True_


def test_a_number_that_is_missing_in_a_list_is_no_other_number(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    floats = ([[1.5, None], [2]], arrow.list_(arrow.float32()))
    rows = ParquetRows(write_columns(tmp_path / "a.parquet", x=floats))
    first = rows[0]["x"]
    assert first.dtype == rows[1]["x"].dtype == np.float32 and first[0] == 1.5 and np.isnan(first[1])
    ids = ([[1, 2], [3, None]], arrow.list_(arrow.int64()))
    rows = ParquetRows(write_columns(tmp_path / "a.parquet", ids=ids))
    assert rows[0]["ids"].dtype == np.int64
    with pytest.raises(DataError, match=r"a\.parquet: a number is missing in a list of column 'ids'$"):
        rows[1]


def test_lists_become_tensors_without_a_warning(tmp_path: Path) -> None:
    rows = ParquetRows(write_columns(tmp_path / "a.parquet", x=([[1.0, 2.0], [3.0, 4.0]],)))
    assert default_collate([rows[0], rows[1]])["x"].tolist() == [[1, 2], [3, 4]]


def test_two_columns_of_a_name_are_refused_if_they_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.Table.from_arrays([arrow.array([n]) for n in (1, 2, 3)], names=["x", "x", "y"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has 2 columns 'x'$"):
        ParquetRows(tmp_path)
    assert ParquetRows(tmp_path, ["y"])[0] == {"y": 3}


def test_a_column_whose_type_differs_between_files_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    write_columns(tmp_path / "a.parquet", x=([1],), text=(["a"],), never=([None],))
    other = {"text": (["b"], arrow.large_string()), "never": ([1],)}
    write_columns(tmp_path / "b.parquet", x=([2],), **other)
    assert [row["text"] for row in (ParquetRows(tmp_path)[0], ParquetRows(tmp_path)[1])] == ["a", "b"]
    write_columns(tmp_path / "c.parquet", x=([0.5],), **other)
    with pytest.raises(
        DataError, match=r"^column 'x' is double in .*c\.parquet, and int64 in the files before it$"
    ):
        ParquetRows(tmp_path)
    assert len(ParquetRows(tmp_path, ["text"])) == 3


@pytest.mark.parametrize("suffix", [".parquet", ".tar"])
def test_hidden_files_are_no_data_and_files_in_folders_are_not_left_out_silently(
    tmp_path: Path, suffix: str
) -> None:
    write = write_parquet if suffix == ".parquet" else write_tar
    read = ParquetRows if suffix == ".parquet" else TarSamples
    write(tmp_path / f"a{suffix}", 0, 3)
    (tmp_path / f"._a{suffix}").write_bytes(b"what a Mac leaves")
    assert len(read(tmp_path)) == 3
    (tmp_path / "label=1").mkdir()
    write(tmp_path / "label=1" / f"b{suffix}", 0, 3)
    with pytest.raises(DataError, match="has a folder label=1 with") as caught:
        read(tmp_path)
    assert "label=1" not in caught.value.discreet


def test_without_pyarrow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LocalError, match=r"install .millpond\[parquet\]"):
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


def write_members(path: Path, names: str) -> Path:
    """Files whose contents are their numbers; ``a>b`` is a hard link to b."""
    with tarfile.open(path, "w") as shard:
        for number, name in enumerate(names.split()):
            name, link, target = name.partition(">")
            head = tarfile.TarInfo(name)
            head.size, head.linkname = (0, target) if link else (1, "")
            head.type = tarfile.LNKTYPE if link else tarfile.REGTYPE
            shard.addfile(head, io.BytesIO(b"%d" % number))
    return path


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("0.jpg 1.jpg 0.cls 1.cls", "the files of sample 0 do not follow each other"),
        ("0.jpg 0.cls 0.jpg 0.cls", "holds 0.jpg twice"),
        ("0.jpg 0.cls 1.jpg 1.cls>0.cls", "1.cls is a link"),
        ("./0.jpg 1.jpg 0.cls", "the files of sample 0 do not follow each other"),
    ],
)
def test_half_samples_are_refused_with_shard_and_name(tmp_path: Path, names: str, reason: str) -> None:
    path = write_members(tmp_path / "patient-4711.tar", names)
    with pytest.raises(DataError, match=reason) as caught:
        TarSamples(tmp_path)
    assert str(path) in str(caught.value) and "4711" not in caught.value.discreet


def test_names_with_and_without_the_folder_itself_are_the_same(tmp_path: Path) -> None:
    write_members(tmp_path / "a.tar", "./0.jpg 0.cls ./x/0.jpg x/0.cls x/._0.jpg")
    assert list(TarSamples(tmp_path)) == [{"jpg": b"0", "cls": b"1"}, {"jpg": b"2", "cls": b"3"}]


def test_a_sample_is_whole_where_the_kernel_reads_a_part_at_a_time(
    samples: TarSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread  # of which one call reads 2 GiB at most
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 1000), place))
    assert list(samples) == SAMPLES


def test_a_folder_without_tar_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^missing data: {tmp_path} has no \*\.tar$"):
        TarSamples(tmp_path)
