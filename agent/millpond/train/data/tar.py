# SPDX-License-Identifier: Apache-2.0
"""Edge (tarfile): samples in tar files as a map-style data set, for the ``dataset`` of a task."""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from millpond.train import error_texts
from millpond.train.data import shards
from millpond.train.data.errors import DataError
from millpond.train.data.rows import unreadable
from millpond.train.data.shards import Where

Sample = dict[str, bytes]


class TarSamples:
    """Samples in tar files as WebDataset writes them: those of a folder by name, or as listed. Files in a row
    with the same name up to its first dot are a sample, a dict of extension to content: ``0001.jpg`` and
    ``0001.cls`` are ``{"jpg": ..., "cls": ...}``. Packed tar files cannot be read in any order; links, a name
    that comes twice, and files of a sample that do not follow each other are refused.

    The heads of all files are read at first, their contents as needed. Several threads may read. Raises
    DataError.
    """

    thread_safe = True

    def __init__(self, where: Where) -> None:
        self._shards = shards.find(where, ".tar")
        self._extensions: list[str] = []
        known: dict[str, int] = {}
        starts, first = array("q"), array("q")  # of samples: the first file, and the number of the shard
        places, sizes, kinds = array("q"), array("q"), array("q")  # of files
        for number, path in enumerate(self._shards):
            last = None
            for key, extension, place, size in _checked_members(path):
                if key != last:
                    last = key
                    starts.append(len(places))
                    first.append(number)
                if extension not in known:
                    known[extension] = len(known)
                places.append(place)
                sizes.append(size)
                kinds.append(known[extension])
        self._extensions = list(known)
        self._starts = np.array([*starts, len(places)])
        self._shard_of = np.array(first)
        self._places, self._sizes, self._kinds = map(np.array, (places, sizes, kinds))

    def __len__(self) -> int:
        return len(self._shard_of)

    @property
    def shards(self) -> tuple[int, ...]:
        """The samples of each file: those of a file follow each other."""
        return tuple(np.bincount(self._shard_of, minlength=len(self._shards)).tolist())

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return samples. Raises DataError."""
        wanted = np.asarray(indices, np.int64)
        shard_of = self._shard_of[wanted]
        found: list[Sample] = [{}] * len(wanted)
        for number in np.unique(shard_of).tolist():
            path = self._shards[number]
            try:
                with path.open("rb", buffering=0) as file:
                    for place in np.flatnonzero(shard_of == number).tolist():
                        found[place] = self._sample(file.fileno(), path, int(wanted[place]))
            except OSError as error:
                raise unreadable(str(path), error) from None
        return found

    def _sample(self, descriptor: int, path: Path, index: int) -> Sample:
        """Read a sample at once, with the heads between its files."""
        files = range(int(self._starts[index]), int(self._starts[index + 1]))
        start, last = int(self._places[files[0]]), files[-1]
        size = int(self._places[last] + self._sizes[last]) - start
        data = _read(descriptor, size, start)
        if len(data) < size:
            raise DataError(error_texts.SHORTER(path), str(path))
        sample = {}
        for number in files:
            place = int(self._places[number]) - start
            sample[self._extensions[self._kinds[number]]] = data[place : place + int(self._sizes[number])]
        return sample


def _read(descriptor: int, size: int, start: int) -> bytes:
    """Return so many bytes of a file, fewer only at its end: one call reads 2 GiB at most."""
    data = os.pread(descriptor, size, start)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), start + len(data))):
        data += more
    return data


def _checked_members(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield what ``_members`` does. Raises DataError also for a sample whose files do not follow each other,
    and for a name that comes twice.
    """
    last, keys, own = None, set[str](), set[str]()
    for key, extension, place, size in _members(path):
        if key != last:
            if key in keys:
                text = f"the files of sample {key} do not follow each other: sort them by name"
                raise DataError(f"{path}: {text}", str(path), key)
            last = key
            keys.add(key)
            own.clear()
        if extension in own:
            raise DataError(f"{path} holds {key}.{extension} twice", str(path), key)
        own.add(extension)
        yield key, extension, place, size


def _members(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield the name up to its first dot, extension, place and size of each file of a shard. Raises
    DataError.
    """
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as shard:
            for member in shard:
                shard.members = []  # type: ignore[attr-defined]  # it would keep them all
                folder, slash, name = member.name.removeprefix("./").rpartition("/")
                base, _, extension = name.partition(".")
                if member.issparse():
                    raise DataError(error_texts.SPARSE(path), str(path))
                if member.islnk() or member.issym():
                    text = f"{path}: {member.name} is a link: pack the files themselves (tar --dereference)"
                    raise DataError(text, str(path), member.name)
                if member.isreg() and base and extension:
                    yield folder + slash + base, extension.lower(), member.offset_data, member.size
            if not _is_end(file, shard.offset):
                raise tarfile.ReadError
    except tarfile.TarError:
        raise DataError(error_texts.NOT_WHOLE_TAR(path), str(path)) from None
    except OSError as error:
        raise unreadable(str(path), error) from None


def _is_end(file: BinaryIO, place: int) -> bool:
    """Return whether the end of a tar file is here: tarfile takes what it does not understand for it."""
    file.seek(place)
    return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
