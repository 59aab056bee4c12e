# SPDX-License-Identifier: Apache-2.0
"""Published data sets become shares for devices; what is missing or pickled is told in one line."""

from __future__ import annotations

import io
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from millpond.base.errors import LocalError
from millpond.train.data.conversion import convert
from millpond.train.data.labelled_images import load

RANDOM = np.random.default_rng(3)


def cifar(count: int, labels: int = 1) -> bytes:
    rows = RANDOM.integers(0, 256, (count, labels + 3072), np.uint8)
    rows[:, :labels] %= 10
    return rows.tobytes()


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-batches/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_cifar_10_is_divided_among_devices(tmp_path: Path) -> None:
    files = {f"data_batch_{k}.bin": cifar(4) for k in (1, 2)} | {"test_batch.bin": cifar(3), "x.txt": b"x"}
    source = packed(tmp_path / "cifar-10-binary.tar.gz", files)
    totals, done = dict[str, int](), dict[str, list[int]]()

    def begin(name: str, total: int) -> Callable[[int], None]:
        totals[name], done[name] = total, []
        return done[name].append

    counts = convert(source, tmp_path / "shares", 3, begin)
    assert counts == {"share-0": 3, "share-1": 3, "share-2": 2, "test": 3}
    assert totals == {f"reading {source}": source.stat().st_size, f"writing {tmp_path}/shares": 11 * 3072}
    assert all(len(done[name]) > 1 and sum(done[name]) == total for name, total in totals.items())
    found = load(tmp_path / "shares", "share-1", "npy")
    row = np.frombuffer(files["data_batch_1.bin"], np.uint8)[3073 : 2 * 3073]
    assert found.shape == (3, 32, 32) and found.labels[0] == row[0]
    assert (found.stored([0])[0].reshape(-1) == row[1:]).all()
    with pytest.raises(LocalError, match="shares exists: name a new folder"):
        convert(source, tmp_path / "shares", 3)


def test_cifar_100_has_its_fine_labels(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    content = {"train.bin": cifar(4, 2), "test.bin": cifar(2, 2)}
    for name, data in content.items():
        (tmp_path / "cifar-100-binary" / name).write_bytes(data)
    assert convert(tmp_path / "cifar-100-binary", tmp_path / "new", 1) == {"share-0": 4, "test": 2}
    fine = np.frombuffer(content["train.bin"], np.uint8).reshape(4, -1)[:, 1]
    assert (load(tmp_path / "new", "share-0", "npy").labels == fine).all()


def test_mnist_is_divided_among_devices(tmp_path: Path) -> None:
    for part, count in (("train", 5), ("t10k", 2)):
        images, labels = RANDOM.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack("!HBB", 0, 8, array.ndim) + struct.pack(f"!{array.ndim}I", *array.shape)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    assert convert(tmp_path, tmp_path / "new", 2) == {"share-0": 3, "share-1": 2, "test": 2}
    assert load(tmp_path / "new", "share-0", "npy").labels.tolist() == [0, 2, 4]


def test_folders_of_classes_are_divided_and_keep_their_pictures(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 1)):
        for label in ("n01440764", "n01443537"):
            (tmp_path / "imagenet" / part / label).mkdir(parents=True)
            for number in range(count):
                path = tmp_path / "imagenet" / part / label / f"{number}.png"
                Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    totals, told = list[int](), list[int]()
    found = convert(
        tmp_path / "imagenet", tmp_path / "new", 2, lambda _name, total: totals.append(total) or told.append
    )
    assert found == {"share-0": 4, "share-1": 2, "test": 2}
    assert len(told) == 8 and totals == [sum(told)]
    assert load(tmp_path / "new", "share-1", "images").labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "cifar-10-python.tar.gz",
            b"",
            "cifar-10-python.tar.gz has pickled objects, which may run code: take ",
        ),
        ("data_batch_1", b"", "data_batch_1 has pickled objects"),
        ("cifar.tar.gz", b"no tar file", "cifar.tar.gz is not a whole tar file"),
    ],
)
def test_what_is_no_data_set_is_told(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LocalError, match=re.escape(text)):
        convert(tmp_path / name, tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", [0.02, 0.5])
def test_a_packed_file_that_was_damaged_is_told(tmp_path: Path, place: float) -> None:
    path = packed(tmp_path / "cifar.tar.gz", {"data_batch_1.bin": cifar(9), "test_batch.bin": cifar(5)})
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(LocalError, match="is not a whole tar file"):
        convert(path, tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


def test_what_is_missing_is_told_with_where_it_is_from(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"missing data: .*: put it there\. It is one of: cifar-10-bin"):
        convert(tmp_path / "cifar-10-binary.tar.gz", tmp_path / "new", 1)
    for files, text in (
        ({"data_batch_1.bin": b"short", "test_batch.bin": cifar(1)}, "data_batch_1.bin is not a whole file"),
        ({"data_batch_1.bin": cifar(1)}, "lacks the files of the test"),
        ({"notes": b""}, "is none of: cifar-10-binary"),
        ({"data_batch_1": b""}, "data_batch_1 has pickled objects"),
    ):
        source = packed(tmp_path / "some.tar.gz", files)
        with pytest.raises(LocalError, match=text):
            convert(source, tmp_path / "new", 1)
