# SPDX-License-Identifier: Apache-2.0
"""Samples from folders, in each format, and the errors of bad files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from millpond.train.data import samples as datasets
from millpond.train.data.errors import DataError

PIXELS = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 2], np.uint8)


def write_npy(
    folder: Path, images: NDArray[np.generic], labels: NDArray[np.generic], suffix: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"images{suffix}.npy", images)
    np.save(folder / f"labels{suffix}.npy", labels)


def write_idx(folder: Path, name: str, array: NDArray[np.uint8], *, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = struct.pack("!HBB", 0, 8, array.ndim) + struct.pack(f"!{array.ndim}I", *array.shape)
    content += array.tobytes()
    (folder / name).write_bytes(gzip.compress(content) if packed else content)


def test_npy_bytes_are_scaled(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS)
    samples = datasets.load(tmp_path, ["private/digits"], "npy")
    assert samples.images.dtype == np.float32
    assert samples.images.shape == (3, 1, 4, 5)
    assert (samples.images[:, 0] == PIXELS.astype(np.float32) / 255).all()
    assert samples.labels.dtype == np.int64
    assert samples.labels.tolist() == [7, 0, 2]


def test_npy_floats_are_kept(tmp_path: Path) -> None:
    write_npy(tmp_path, PIXELS.astype(np.float64), LABELS)
    assert (datasets.load(tmp_path, ["."], "npy").images[:, 0] == PIXELS).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4, 5), (3, 4, 5)),
        ((2, 5, 6, 3), (3, 5, 6)),
        ((2, 8, 8, 1), (1, 8, 8)),
        ((2, 1, 1, 1), (1, 1, 1)),
    ],
)
def test_channels_come_first(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    write_npy(tmp_path, np.zeros(shape, np.uint8), np.zeros((2, 1), np.int32))
    samples = datasets.load(tmp_path, ["."], "npy")
    assert samples.images.shape == (2, *expected)
    assert samples.labels.shape == (2,)


def test_bytes_behind_an_array_are_ignored(tmp_path: Path) -> None:
    write_npy(tmp_path, PIXELS, LABELS)
    write_idx(tmp_path, "train-images-idx3-ubyte", PIXELS)
    write_idx(tmp_path, "train-labels-idx1-ubyte.gz", LABELS, packed=True)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() + b"canary 0123456789")
    for format_ in ("npy", "idx"):
        assert len(datasets.load(tmp_path, ["."], format_)) == 3


def test_shards_and_folders_are_joined_in_order(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, np.full(3, 2), "-0002")
    write_npy(tmp_path / "a", PIXELS, np.full(3, 1), "-0001")
    write_npy(tmp_path / "b", PIXELS, np.full(3, 3))
    samples = datasets.load(tmp_path, ["a", str(tmp_path / "b")], "npy")
    assert samples.labels.tolist() == [1] * 3 + [2] * 3 + [3] * 3


def test_no_folders_are_no_samples(tmp_path: Path) -> None:
    assert len(datasets.load(tmp_path, [], "npy")) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path: Path, packed: bool) -> None:
    gz = ".gz" if packed else ""
    write_idx(tmp_path, f"train-images-idx3-ubyte{gz}", PIXELS, packed=packed)
    write_idx(tmp_path, f"train-labels-idx1-ubyte{gz}", LABELS, packed=packed)
    samples = datasets.load(tmp_path, ["."], "idx")
    assert (samples.images[:, 0] == PIXELS.astype(np.float32) / 255).all()
    assert samples.labels.tolist() == [7, 0, 2]


def test_idx_beside_its_packed_copy_is_read_once(tmp_path: Path) -> None:
    for gz in ("", ".gz"):
        write_idx(tmp_path, f"train-images-idx3-ubyte{gz}", PIXELS, packed=bool(gz))
        write_idx(tmp_path, f"train-labels-idx1-ubyte{gz}", LABELS, packed=bool(gz))
    assert len(datasets.load(tmp_path, ["."], "idx")) == 3


def save_picture(path: Path, mode: str, size: tuple[int, int] = (5, 4), value: int = 51) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_images_have_a_folder_per_class(tmp_path: Path) -> None:
    save_picture(tmp_path / "dog/1.png", "RGB")
    save_picture(tmp_path / "cat/1.PNG", "RGB")
    save_picture(tmp_path / "cat/2.jpeg", "RGB")
    (tmp_path / "cat/notes.txt").write_text("not a picture")
    samples = datasets.load(tmp_path, ["."], "images")
    assert samples.images.shape == (3, 3, 4, 5)
    assert samples.labels.tolist() == [0, 0, 1]
    assert samples.images[0, :, 0, 0].tolist() == pytest.approx([0.2, 0, 0])


def test_grey_pictures_have_one_channel(tmp_path: Path) -> None:
    save_picture(tmp_path / "zero/1.png", "L")
    assert datasets.load(tmp_path, ["."], "images").images.shape == (1, 1, 4, 5)


def test_classes_of_the_job_give_the_labels(tmp_path: Path) -> None:
    save_picture(tmp_path / "a/dog/1.png", "L")
    assert datasets.load(tmp_path, ["a"], "images", ("cat", "dog")).labels.tolist() == [1]
    with pytest.raises(DataError, match="a/dog is not one of the job's classes"):
        datasets.load(tmp_path, ["a"], "images", ("cat",))


def test_folders_of_one_worker_share_their_classes(tmp_path: Path) -> None:
    save_picture(tmp_path / "a/dog/1.png", "L")
    save_picture(tmp_path / "b/cat/1.png", "L")
    assert datasets.load(tmp_path, ["a", "b"], "images").labels.tolist() == [1, 0]


def test_each_folder_by_itself_has_the_labels_of_all_together(tmp_path: Path) -> None:
    save_picture(tmp_path / "a/cat/1.png", "L")
    save_picture(tmp_path / "b/ant/1.png", "L")
    save_picture(tmp_path / "b/cat/1.png", "L")
    found = datasets.load_each(tmp_path, ["a", "b"], "images")
    assert [part.labels.tolist() for part in found] == [[1], [0, 1]]
    assert [len(part) for part in datasets.load_each(tmp_path, ["a", "b"], "images", ["cat", "ant"])] == [
        1,
        2,
    ]


def test_folders_of_other_shapes_are_named_also_by_a_device(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS)
    write_npy(tmp_path / "public/digits", PIXELS[:, :, 1:], LABELS)
    with pytest.raises(DataError) as caught:
        datasets.load_each(tmp_path, ["private/digits", "public/digits"], "npy")
    text = "public/digits holds samples of 1x4x4, private/digits of 1x4x5"
    assert (str(caught.value), caught.value.discreet) == (text, text)


def test_pictures_of_two_sizes_are_refused(tmp_path: Path) -> None:
    save_picture(tmp_path / "a/cat/1.png", "L")
    save_picture(tmp_path / "a/cat/2.png", "RGB", (6, 4))
    with pytest.raises(DataError, match=r"^a/cat/2\.png is 6x4 RGB; the images before it are 5x4 grey$"):
        datasets.load(tmp_path, ["a"], "images")


@pytest.mark.parametrize("format_", ["npy", "idx", "images"])
def test_a_missing_folder_is_named(tmp_path: Path, format_: str) -> None:
    with pytest.raises(DataError, match=r"^missing data: there is no folder private/digits$"):
        datasets.load(tmp_path, ["private/digits"], format_)


@pytest.mark.parametrize(
    ("format_", "missing"),
    [("npy", "no images.npy"), ("idx", r"no \*-images-idx3-ubyte"), ("images", "no sub-folder per class")],
)
def test_an_empty_folder_is_named(tmp_path: Path, format_: str, missing: str) -> None:
    (tmp_path / "private/digits").mkdir(parents=True)
    with pytest.raises(DataError, match=f"^missing data: private/digits has {missing}$"):
        datasets.load(tmp_path, ["private/digits"], format_)


def test_missing_labels_are_named(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, LABELS, "-1")
    (tmp_path / "a/labels-1.npy").unlink()
    with pytest.raises(DataError, match=r"^missing data: a has no labels-1\.npy$"):
        datasets.load(tmp_path, ["a"], "npy")


BAD_ARRAYS = [
    (PIXELS[:2], LABELS, "2 images have labels of uint8 in shape"),
    (PIXELS, LABELS.astype(float), "labels of float64"),
    (PIXELS, LABELS.astype(int) - 3, "a label is negative"),
    (PIXELS[0], LABELS, "holds uint8 of shape"),
    (PIXELS[:0], LABELS[:0], "missing data: a/images.npy holds no samples"),
    (PIXELS * np.nan, LABELS, "values that are not finite"),
    (PIXELS * 1e300, LABELS, "values that are not finite"),
    (PIXELS.astype("U3"), LABELS, "not images"),
]


@pytest.mark.parametrize(("images", "labels", "text"), BAD_ARRAYS)
def test_arrays_that_are_not_samples(
    tmp_path: Path, images: NDArray[np.generic], labels: NDArray[np.generic], text: str
) -> None:
    write_npy(tmp_path / "a", images, labels)
    with pytest.raises(DataError, match=text):
        datasets.load(tmp_path, ["a"], "npy")


def test_shapes_that_differ_name_both_files(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, LABELS)
    write_npy(tmp_path / "b", PIXELS[:, :3], LABELS)
    with pytest.raises(DataError, match=r"b/images.npy holds samples of 1x3x5, a/images.npy of 1x4x5"):
        datasets.load(tmp_path, ["a", "b"], "npy")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, LABELS)
    np.save(tmp_path / "a/images.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a/images\.npy is not a whole \.npy file of numbers"):
        datasets.load(tmp_path, ["a"], "npy")


@pytest.mark.parametrize("name", ["images.npy", "t-images-idx3-ubyte", "t-images-idx3-ubyte.gz", "cat/1.png"])
def test_a_file_cut_short_is_named(tmp_path: Path, name: str) -> None:
    write_npy(tmp_path / "npy", PIXELS, LABELS)
    write_idx(tmp_path / "idx", "t-images-idx3-ubyte", PIXELS)
    write_idx(tmp_path / "idx", "t-labels-idx1-ubyte", LABELS)
    write_idx(tmp_path / "gz", "t-images-idx3-ubyte.gz", PIXELS, packed=True)
    write_idx(tmp_path / "gz", "t-labels-idx1-ubyte", LABELS)
    save_picture(tmp_path / "images/cat/1.png", "L")
    (path,) = [path for path in tmp_path.rglob("*") if path.as_posix().endswith(f"/{name}")]
    path.write_bytes(path.read_bytes()[:40])
    folder = path.relative_to(tmp_path).parts[0]
    with pytest.raises(DataError, match=f"^{folder}/{name} is not a"):
        datasets.load(tmp_path, [folder], "idx" if folder == "gz" else folder)


def test_names_found_on_a_device_can_be_left_out(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS - 1, suffix="-of-a-patient")
    (tmp_path / "private/digits/labels-of-a-patient.npy").write_bytes(b"no array")
    with pytest.raises(DataError) as caught:
        datasets.load(tmp_path, ["private/digits"], "npy")
    assert "labels-of-a-patient.npy" in str(caught.value)
    assert caught.value.discreet == "a file of the samples is not a whole .npy file of numbers"


def test_names_that_every_device_has_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        write_npy(tmp_path / "private/digits", PIXELS, LABELS)
        (tmp_path / "private/digits/labels.npy").unlink()
        datasets.load(tmp_path, ["private/digits"], "npy")
    assert caught.value.discreet == "missing data: private/digits has no labels.npy"
