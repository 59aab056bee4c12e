# SPDX-License-Identifier: Apache-2.0
"""Edge (pyarrow): rows of Parquet files as a map-style data set, for the ``dataset`` of a task."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np

from millpond.base.errors import LocalError
from millpond.train.balance.curve import Ints
from millpond.train.data import shards
from millpond.train.data.errors import DataError
from millpond.train.data.rows import unreadable
from millpond.train.data.shards import Where

CACHE = 64 << 20
Sample = dict[str, Any]


class ParquetRows:
    """Rows of Parquet files: those of a folder by name, or as listed. A sample is a dict of ``columns``, all
    if left out: numbers are numpy's, lists are arrays, texts and bytes as they are; None where nothing is.

    Row groups are read whole when a row of them is needed, and the last ones are kept in ``cache`` bytes. In
    random order each batch needs many: write files for training with small groups, of some hundred rows.
    Several threads may read. Raises DataError, and LocalError where pyarrow is not installed.
    """

    def __init__(self, where: Where, columns: Sequence[str] | None = None, cache: int = CACHE) -> None:
        self._parquet = _pyarrow()
        self._files = shards.find(where, ".parquet")
        self._cache_bytes = cache
        self._groups: list[tuple[int, int]] = []  # file and row group
        self._metadata = []
        counts = []
        for number, path in enumerate(self._files):
            with self._opened(number) as file:
                known = file.schema_arrow.names
                columns = known if columns is None else columns
                if missing := [name for name in columns if name not in known]:
                    raise DataError(f"{path} has no column '{missing[0]}'", str(path))
                self._metadata.append(file.metadata)
            for group in range(file.metadata.num_row_groups):
                self._groups.append((number, group))
                counts.append(file.metadata.row_group(group).num_rows)
        self._columns = list(columns or ())
        self._ends = np.cumsum([0, *counts])
        self._cached: OrderedDict[int, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def groups(self) -> tuple[int, ...]:
        """The rows of each row group: those of a group follow each other."""
        return tuple(np.diff(self._ends).tolist())

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return samples; each row group is read once at most. Raises DataError."""
        wanted = np.asarray(indices, np.int64)
        order = np.argsort(wanted, kind="stable")
        cuts = np.searchsorted(wanted[order], self._ends)
        found: list[Sample] = [{}] * len(wanted)
        for number, (start, stop) in enumerate(pairwise(cuts.tolist())):
            if start == stop:
                continue
            places = order[start:stop]
            values = self._rows(number, wanted[places] - self._ends[number])
            for place, row in zip(places.tolist(), zip(*values, strict=True), strict=True):
                found[place] = dict(zip(self._columns, row, strict=True))
        return found

    def _rows(self, number: int, places: Ints) -> list[Sequence[Any]]:
        """Return the columns of some rows of a row group."""
        chosen = self._group(number).take(places)
        try:
            return [_values(chosen.column(name)) for name in self._columns]
        except ValueError as error:  # a text that is none
            raise self._broken(self._groups[number][0], error) from None

    def _group(self, number: int) -> Any:
        """Return the table of a row group; it is read once if several threads need it."""
        with self._lock:
            future = self._cached.get(number)
            if reads := future is None:
                future = self._cached[number] = Future()
            self._cached.move_to_end(number)
        if reads:
            try:
                future.set_result(self._read(number))
            except BaseException as error:
                future.set_exception(error)
                with self._lock:
                    self._cached.pop(number, None)
                raise
            self._evict()
        return future.result()

    def _evict(self) -> None:
        """Drop the groups that were not needed for longest, until the others fit."""
        with self._lock:
            sizes = {key: each.result().nbytes for key, each in self._cached.items() if _is_read(each)}
            total = sum(sizes.values())
            for key, size in list(sizes.items())[:-1]:
                if total <= self._cache_bytes:
                    break
                del self._cached[key]
                total -= size

    def _read(self, number: int) -> Any:
        file, group = self._groups[number]
        with self._opened(file) as opened:
            try:
                return opened.read_row_group(group, columns=self._columns, use_threads=False)
            except (OSError, ValueError) as error:
                raise self._broken(file, error) from None

    def _opened(self, number: int) -> Any:
        """Open a file anew: one that is open cannot be read by several threads."""
        metadata = self._metadata[number] if number < len(self._metadata) else None
        try:
            return self._parquet.ParquetFile(self._files[number], metadata=metadata)
        except (OSError, ValueError) as error:
            raise self._broken(number, error) from None

    def _broken(self, number: int, error: OSError | ValueError) -> DataError:
        name = str(self._files[number])
        if isinstance(error, OSError) and error.errno and error.strerror:
            return unreadable(name, error)
        return DataError(f"{name} is not a whole Parquet file", name)


def _is_read(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _pyarrow() -> Any:
    try:
        from pyarrow import parquet  # an optional extra, and slow to import
    except ImportError:
        raise LocalError("Parquet files need pyarrow: install millpond[parquet] where workers run") from None
    return parquet


def _values(column: Any) -> Sequence[Any]:
    """Return a column's values as they are in samples."""
    from pyarrow import types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [each.values.to_numpy(zero_copy_only=False) if each.is_valid else None for each in column]
    if column.null_count or not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        found: list[Any] = column.to_pylist()
        return found
    numbers: Sequence[Any] = column.to_numpy()
    return numbers
