# SPDX-License-Identifier: Apache-2.0
"""Edge (files): published data sets of labelled images, divided into a share for each device.

| source                                                              | written                            |
|---------------------------------------------------------------------|------------------------------------|
| CIFAR-10, CIFAR-100: the binary version, ``.tar.gz`` or not         | ``images.npy`` and ``labels.npy``  |
| MNIST and what has its format: IDX files, ``.gz`` or not            | the same                           |
| a folder for each class below ``train`` and ``val``, as of ImageNet | the pictures, as links or copies   |

Nothing is fetched, and nothing is unpickled.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import LocalError
from millpond.train.data import folders
from millpond.train.job.file import class_names

_HOMES = {
    "cifar": "cifar-10-binary.tar.gz or cifar-100-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html",
    "mnist": "the four files train-images-idx3-ubyte.gz, train-labels-..., t10k-... of MNIST, in one folder",
    "imagenet": "the pictures of ImageNet, a folder for each class below train and val",
}
_CIFAR = re.compile(r"(data_batch_\d+|test_batch|train|test)\.bin")
_PICKLED = re.compile(r"data_batch_\d+|test_batch|cifar-100?-python.*")
_PIXELS, _SHAPE = 3 * 32 * 32, (3, 32, 32)
_LARGEST, _CHUNK = 1 << 30, 1 << 20
TEST = "test"


@dataclass(frozen=True, slots=True)
class _Samples:
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


Begin = Callable[[str, int], Callable[[int], None]]


def convert(
    source: Path, target: Path, shares: int, begin: Begin = lambda _name, _total: lambda _count: None
) -> dict[str, int]:
    """Write the data set ``source``, a file or folder, as folders of ``target``: ``share-0`` and so on of its
    training samples, and ``test``. ``begin`` is called with a name and the bytes that are read or written,
    and what it returns with those of each part. Returns the numbers of samples. Raises LocalError for a
    source that is missing or has another format.
    """
    if not source.exists():
        homes = "; ".join(_HOMES.values())
        raise LocalError(f"missing data: there is no {source}: put it there. It is one of: {homes}")
    if target.exists():
        raise LocalError(f"{target} exists: name a new folder")
    if source.is_dir() and (source / "train").is_dir():
        return _pictures(source, target, shares, begin)
    is_idx = source.is_dir() and any(source.glob("*idx3*"))
    train, test = _idx(source) if is_idx else _cifar(source, begin)
    parts = {f"share-{k}": _Samples(train.images[k::shares], train.labels[k::shares]) for k in range(shares)}
    parts[TEST] = test
    advance = begin(f"writing {target}", sum(samples.images.nbytes for samples in parts.values()))
    for name, samples in parts.items():
        (target / name).mkdir(parents=True)
        np.save(target / name / "images.npy", samples.images)
        np.save(target / name / "labels.npy", samples.labels)
        advance(samples.images.nbytes)
    return {name: len(samples.labels) for name, samples in parts.items()}


def _cifar(source: Path, begin: Begin) -> tuple[_Samples, _Samples]:
    files = dict(_contents(source, begin))
    if not files:
        raise LocalError(f"{source} is none of: {'; '.join(_HOMES.values())}")
    found = {name: _rows(files[name], name) for name in sorted(files)}
    test = [rows for name, rows in found.items() if name.startswith("test")]
    train = [rows for name, rows in found.items() if not name.startswith("test")]
    if not (train and test):
        raise LocalError(f"{source} lacks the files of {'training' if test else 'the test'}")
    return _joined(train), _joined(test)


def _contents(source: Path, begin: Begin) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of CIFAR's binary files in a folder, or in a tar file."""
    if _PICKLED.fullmatch(source.name):
        raise _refused(source.name)
    if source.is_dir():
        paths = sorted(source.iterdir())
        if pickled := next((path.name for path in paths if _PICKLED.fullmatch(path.name)), ""):
            raise _refused(pickled)
        paths = [path for path in paths if _CIFAR.fullmatch(path.name)]
        advance = begin(f"reading {source}", sum(path.stat().st_size for path in paths))
        for path in paths:
            yield path.name, path.read_bytes()
            advance(path.stat().st_size)
    else:
        yield from _unpacked(source, begin)


def _unpacked(source: Path, begin: Begin) -> Iterator[tuple[str, bytes]]:
    try:
        with source.open("rb") as packed, tarfile.open(fileobj=packed) as archive:
            advance, done = begin(f"reading {source}", source.stat().st_size), 0
            for member in archive:
                advance(packed.tell() - done)
                done = packed.tell()
                name = PurePath(member.name).name
                if _PICKLED.fullmatch(name) and member.isfile():
                    raise _refused(name)
                if _CIFAR.fullmatch(name) and member.isfile() and member.size <= _LARGEST:
                    file = archive.extractfile(member)
                    assert file is not None  # it is a plain file
                    yield name, file.read()
            assert archive.fileobj is not None
            while archive.fileobj.read(_CHUNK):  # up to the checksum of what is packed
                pass
            advance(packed.tell() - done)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise LocalError(f"{source} is not a whole tar file: {error}") from None


def _refused(name: str) -> LocalError:
    text = "has pickled objects, which may run code: take the binary version, cifar-10-binary.tar.gz"
    return LocalError(f"{name} {text}")


def _rows(content: bytes, name: str) -> _Samples:
    """Return the samples of a file: a label, for CIFAR-100 a coarse one before it, and the pixels."""
    labels = 2 if name in ("train.bin", "test.bin") else 1
    rows = np.frombuffer(content, np.uint8)
    if not len(rows) or len(rows) % (labels + _PIXELS):
        raise LocalError(f"{name} is not a whole file of CIFAR's binary version")
    rows = rows.reshape(-1, labels + _PIXELS)
    return _Samples(rows[:, labels:].reshape(-1, *_SHAPE), rows[:, labels - 1].astype(np.int64))


def _joined(parts: Iterable[_Samples]) -> _Samples:
    images, labels = zip(*((part.images, part.labels) for part in parts), strict=True)
    return _Samples(np.concatenate(images), np.concatenate(labels))


def _idx(source: Path) -> tuple[_Samples, _Samples]:
    train, test = list[_Samples](), list[_Samples]()
    for name, rows, labels in folders.parts(source, ".", "idx", ()):
        own = _Samples(rows.read(np.arange(len(rows))), labels.astype(np.int64))
        (test if PurePath(name).name.startswith("t10k") else train).append(own)
    if not (train and test):
        raise LocalError(f"{source} lacks one of {_HOMES['mnist']}")
    return _joined(train), _joined(test)


def _pictures(source: Path, target: Path, shares: int, begin: Begin) -> dict[str, int]:
    counts, wanted = dict[str, int](), list[tuple[Path, str, str]]()
    tests = next((name for name in ("val", "test") if (source / name).is_dir()), "")
    if not tests:
        raise LocalError(f"{source} lacks a folder val beside train")
    for part in ("train", tests):
        for label in class_names(source / part):
            files = sorted(path for path in (source / part / label).iterdir() if path.is_file())
            for number, path in enumerate(files):
                name = f"share-{number % shares}" if part == "train" else TEST
                wanted.append((path, name, label))
                counts[name] = counts.get(name, 0) + 1
    if not counts:
        raise LocalError(f"{source / 'train'} has no folder with pictures: it is not {_HOMES['imagenet']}")
    advance = begin(f"writing {target}", sum(path.stat().st_size for path, _, _ in wanted))
    for path, name, label in wanted:
        _link(path, target / name / label)
        advance(path.stat().st_size)
    return counts


def _link(path: Path, folder: Path) -> None:
    """Make a file one of ``folder``, without a copy where both are on one file system."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, folder / path.name)
    except OSError:
        shutil.copyfile(path, folder / path.name)
