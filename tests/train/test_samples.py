# SPDX-License-Identifier: Apache-2.0
"""Labelled images from folders, in each format, rows read as they are needed, and the errors of bad files."""

from __future__ import annotations

import gzip
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from millpond.train.data import rows
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages, load
from millpond.train.data.rows import ArrayRows, FileRows
from millpond.train.job.variation import Variation
from millpond.train.task.task import Task

from .wrong_samples import FOLDER, WRONG, data_error

PIXELS = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 2], np.uint8)


def images(dataset: LabelledImages) -> NDArray[np.float32]:
    found: NDArray[np.float32] = dataset.__getitems__(range(len(dataset)))[0].numpy()
    return found


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
    samples = load(tmp_path, "private/digits", "npy")
    assert samples.shape == (1, 4, 5)
    found, labels = samples.__getitems__([2, 0])
    assert (found.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert found.shape == (2, 1, 4, 5)
    assert (found[:, 0].numpy() == PIXELS[[2, 0]].astype(np.float32) / 255).all()
    assert labels.tolist() == [2, 7]
    assert torch.equal(samples[-1][0], found[0]) and int(samples[-1][1]) == 2
    with pytest.raises(IndexError):
        samples[3]


def test_a_head_with_a_negative_length_is_refused(tmp_path: Path) -> None:
    write_npy(tmp_path, PIXELS, LABELS)
    whole = (tmp_path / "images.npy").read_bytes()
    (tmp_path / "images.npy").write_bytes(whole.replace(b"(3, 4, 5), ", b"(-3, 4, 5),"))
    with pytest.raises(DataError, match=r"images\.npy is not a whole \.npy file"):
        load(tmp_path, ".", "npy")


def test_npy_floats_are_kept(tmp_path: Path) -> None:
    write_npy(tmp_path, PIXELS.astype(np.float64), LABELS)
    assert (images(load(tmp_path, ".", "npy"))[:, 0] == PIXELS).all()


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
    stored = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    write_npy(tmp_path, stored, np.zeros((2, 1), np.int32))
    samples = load(tmp_path, ".", "npy")
    assert images(samples).shape == (2, *samples.shape) == (2, *expected)
    pixels = stored if shape[1:] == expected else stored.transpose(0, 3, 1, 2)
    assert np.array_equal(images(samples), pixels.astype(np.float32) / 255) and pixels.any()
    assert samples.labels.shape == (2,)


def test_bytes_behind_an_array_are_ignored(tmp_path: Path) -> None:
    write_npy(tmp_path, PIXELS, LABELS)
    write_idx(tmp_path, "train-images-idx3-ubyte", PIXELS)
    write_idx(tmp_path, "train-labels-idx1-ubyte.gz", LABELS, packed=True)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() + b"canary 0123456789")
    for format_ in ("npy", "idx"):
        assert len(load(tmp_path, ".", format_)) == 3


def test_shards_are_joined_in_order(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, np.full(3, 2), "-0002")
    write_npy(tmp_path / "a", 100 + PIXELS, np.full(3, 1), "-0001")
    samples = load(Path("nowhere"), str(tmp_path / "a"), "npy")
    assert samples.labels.tolist() == [1] * 3 + [2] * 3
    found, labels = samples.__getitems__([4, 0, 3, 2])
    expected = np.stack([PIXELS[1], 100 + PIXELS[0], PIXELS[0], 100 + PIXELS[2]]).astype(np.float32) / 255
    assert np.array_equal(found[:, 0].numpy(), expected) and labels.tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("name", ["images.npy", "t-images-idx3-ubyte"])
def test_rows_of_a_large_file_are_read_when_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_npy(tmp_path / "npy", PIXELS.astype(">f4"), LABELS)
    write_idx(tmp_path / "idx", "t-images-idx3-ubyte", PIXELS)
    write_idx(tmp_path / "idx", "t-labels-idx1-ubyte", LABELS)
    (path,) = tmp_path.rglob(name)
    small = load(tmp_path, path.parent.name, path.parent.name)
    monkeypatch.setattr(rows, "IN_MEMORY", 10)
    large = load(tmp_path, path.parent.name, path.parent.name)
    assert np.array_equal(images(large), images(small)) and images(small).any()
    path.write_bytes(path.read_bytes()[:-1])
    assert len(large.__getitems__([0, 1])[0]) == 2
    with pytest.raises(DataError, match=f"^{path.parent.name}/{name} is shorter than it was$"):
        large.__getitems__([0, 2])
    with pytest.raises(DataError, match="is not a whole "):
        load(tmp_path, path.parent.name, path.parent.name)


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path: Path, packed: bool) -> None:
    gz = ".gz" if packed else ""
    write_idx(tmp_path, f"train-images-idx3-ubyte{gz}", PIXELS, packed=packed)
    write_idx(tmp_path, f"train-labels-idx1-ubyte{gz}", LABELS, packed=packed)
    samples = load(tmp_path, ".", "idx")
    assert (images(samples)[:, 0] == PIXELS.astype(np.float32) / 255).all()
    assert samples.labels.tolist() == [7, 0, 2]


def test_idx_beside_its_packed_copy_is_read_once(tmp_path: Path) -> None:
    for gz in ("", ".gz"):
        write_idx(tmp_path, f"train-images-idx3-ubyte{gz}", PIXELS, packed=bool(gz))
        write_idx(tmp_path, f"train-labels-idx1-ubyte{gz}", LABELS, packed=bool(gz))
    assert len(load(tmp_path, ".", "idx")) == 3


def save_picture(path: Path, mode: str, size: tuple[int, int] = (5, 4), value: int = 51) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_images_have_a_folder_per_class(tmp_path: Path) -> None:
    save_picture(tmp_path / "dog/1.png", "RGB")
    save_picture(tmp_path / "cat/1.PNG", "RGB")
    save_picture(tmp_path / "cat/2.jpeg", "RGB")
    (tmp_path / "cat/notes.txt").write_text("not a picture")
    samples = load(tmp_path, ".", "images")
    assert images(samples).shape == (3, 3, 4, 5)
    assert samples.labels.tolist() == [0, 0, 1]
    assert images(samples)[0, :, 0, 0].tolist() == pytest.approx([0.2, 0, 0])


def test_grey_pictures_have_one_channel(tmp_path: Path) -> None:
    save_picture(tmp_path / "zero/1.png", "L")
    assert images(load(tmp_path, ".", "images")).shape == (1, 1, 4, 5)


def test_classes_of_the_job_give_the_labels(tmp_path: Path) -> None:
    save_picture(tmp_path / "a/dog/1.png", "L")
    assert load(tmp_path, "a", "images", ("cat", "dog")).labels.tolist() == [1]
    with pytest.raises(DataError, match="a/dog is not one of the job's classes"):
        load(tmp_path, "a", "images", ("cat",))


def test_folders_of_other_shapes_are_told(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS)
    write_npy(tmp_path / "public/digits", PIXELS[:, :, 1:], LABELS)
    parts = [load(tmp_path, folder, "npy") for folder in ("private/digits", "public/digits")]
    with pytest.raises(DataError) as caught:
        linear(8).check(parts, linear(8).model())
    text = "public/digits holds samples of 1x4x4, private/digits of 1x4x5"
    assert (str(caught.value), caught.value.discreet) == (text, text)


def linear(classes: int) -> Task:
    class User:
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(20, classes))

    return Task(User())


def test_grey_pictures_of_16_bits_keep_them(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    values = np.array([[0, 255, 256], [1000, 40000, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "zero/1.png")
    assert images(load(tmp_path, ".", "images")) == pytest.approx(values[None, None] / 65535, abs=1e-7)
    save_picture(tmp_path / "zero/2.png", "L", (3, 2))
    with pytest.raises(DataError, match=r"2\.png is 3x2 grey; the images before it are 3x2 grey of 16 bits"):
        load(tmp_path, ".", "images")


@pytest.mark.parametrize("what", WRONG)
def test_a_folder_that_holds_no_samples_is_named(tmp_path: Path, what: str) -> None:
    assert str(data_error(tmp_path, what)).replace(FOLDER, "F").startswith(what)


@pytest.mark.parametrize("factor", [np.nan, 1e300])
def test_values_that_are_not_finite_are_found_when_they_are_read(tmp_path: Path, factor: float) -> None:
    write_npy(tmp_path / "a", PIXELS.astype(float), LABELS, "-1")
    write_npy(tmp_path / "a", PIXELS * factor, LABELS, "-2")
    found = load(tmp_path, "a", "npy")
    assert len(found.__getitems__([0, 2])[0]) == 2
    with pytest.raises(DataError, match=r"^a/images-2\.npy holds values that are not finite$") as caught:
        found.__getitems__([0, 4])
    assert caught.value.discreet == "a file of the samples holds values that are not finite"


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", PIXELS, LABELS)
    np.save(tmp_path / "a/images.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a/images\.npy is not a whole \.npy file of numbers"):
        load(tmp_path, "a", "npy")


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
        load(tmp_path, folder, "idx" if folder == "gz" else folder)


def test_names_found_on_a_device_can_be_left_out(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS - 1, suffix="-of-a-patient")
    (tmp_path / "private/digits/labels-of-a-patient.npy").write_bytes(b"no array")
    with pytest.raises(DataError) as caught:
        load(tmp_path, "private/digits", "npy")
    assert "labels-of-a-patient.npy" in str(caught.value)
    assert caught.value.discreet == "a file of the samples is not a whole .npy file of numbers"


def test_names_that_every_device_has_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        write_npy(tmp_path / "private/digits", PIXELS, LABELS)
        (tmp_path / "private/digits/labels.npy").unlink()
        load(tmp_path, "private/digits", "npy")
    assert caught.value.discreet == "missing data: private/digits has no labels.npy"


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


def photos(folder: Path) -> Path:
    random = np.random.default_rng(5)
    for number, size in enumerate([(40, 30), (20, 64), (33, 33), (50, 20)]):
        (folder / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number % 2}" / f"{number}.png")
    return folder


def test_pictures_of_unequal_sizes_are_scaled_and_cropped(tmp_path: Path) -> None:
    variation = Variation(resize=24, crop=16, flip=True)
    whole = load(photos(tmp_path), ".", "images", variation=Variation(resize=24))
    cropped = load(tmp_path, ".", "images", variation=variation)
    assert (whole.shape, cropped.shape) == ((3, 24, 24), (3, 16, 16))
    assert (images(cropped) == images(whole)[:, :, 4:20, 4:20]).all()  # the middle, where a model is scored
    one, again, other = (cropped.varied(draws) for draws in ("7 1 csd0", "7 1 csd0", "7 2 csd0"))
    assert (images(one) == images(again)).all() and (images(one) != images(other)).any()
    assert (one[3][0].numpy() == images(one)[3]).all()  # whatever else is in the batch
    places = {_place(cropped.varied(f"{epoch}"), whole) for epoch in range(30)}
    assert len(places) > 20 and {mirrored for *_, mirrored in places} == {False, True}


def test_grey_pictures_of_16_bits_are_scaled_with_their_greys(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    values = np.full((8, 8), 16384, np.uint16)
    Image.fromarray(values).save(tmp_path / "zero/1.png")
    whole = load(tmp_path, ".", "images", variation=Variation(resize=4))
    assert images(whole) == pytest.approx(np.full((1, 3, 4, 4), 0.25), abs=0.01)


def _place(varied: LabelledImages, whole: LabelledImages) -> tuple[int, int, bool]:
    """Where in the whole first image the varied one lies, and whether it is mirrored."""
    (part, _), (all_of_it, _) = varied[0], whole[0]
    for mirrored in (False, True):
        wanted = part.flip(2) if mirrored else part
        for top in range(9):
            for left in range(9):
                if torch.equal(all_of_it[:, top : top + 16, left : left + 16], wanted):
                    return top, left, mirrored
    raise AssertionError("it is no part of the image")


def test_arrays_are_cropped_too_and_small_ones_are_told(tmp_path: Path) -> None:
    write_npy(tmp_path / "private/digits", PIXELS, LABELS)
    assert load(tmp_path, "private/digits", "npy", variation=Variation(crop=3)).shape == (1, 3, 3)
    with pytest.raises(DataError, match="holds images of 1x4x5, smaller than the job's crop of 6"):
        load(tmp_path, "private/digits", "npy", variation=Variation(crop=6))
