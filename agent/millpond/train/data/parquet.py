# SPDX-License-Identifier: Apache-2.0
"""Edge (pyarrow): rows of Parquet files as a map-style data set, for the ``dataset`` of a task."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data import shards
from millpond.train.data.errors import DataError
from millpond.train.data.rows import unreadable
from millpond.train.data.shards import Where

CACHE = 64 << 20
Sample = dict[str, Any]


class ParquetRows:
    """Rows of Parquet files: those of a folder by name, or as listed. A sample is a dict of ``columns``, all
    if left out: numbers are numpy's, lists are arrays, texts and bytes as they are; None where nothing is. A
    number that is missing in a list is NaN, and refused in a list of integers. Columns have one type in all
    files.

    Row groups are read whole when a row of them is needed, and the last ones are kept in ``cache`` bytes. In
    random order each batch needs many: write files for training with small groups, of some hundred rows.
    Several threads may read. Raises DataError, and LocalError where pyarrow is not installed.
    """

    thread_safe = True

    def __init__(self, where: Where, columns: Sequence[str] | None = None, cache: int = CACHE) -> None:
        self._parquet = _pyarrow()
        self._files = shards.find(where, ".parquet")
        self._cache_bytes = cache
        self._groups: list[tuple[int, int]] = []  # file and row group
        self._metadata = []
        counts = []
        self._job_names = columns is not None
        types: dict[str, Any] = {}
        for number, path in enumerate(self._files):
            with self._opened(number) as file:
                schema = file.schema_arrow
                columns = schema.names if columns is None else columns
                for name in columns:
                    if fault := _column_fault(path, schema, name, types):
                        raise self._column_error(fault, name, path)
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
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

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
        return [self._values(number, name, chosen.column(name)) for name in self._columns]

    def _values(self, number: int, name: str, column: Any) -> Sequence[Any]:
        """Return the values of a column of a row group as they are in samples. Raises DataError."""
        file = self._groups[number][0]
        try:
            return _values(column)
        except _MissingNumberError:
            path = self._files[file]
            fault = f"{path}: a number is missing in a list of column '{name}'"
            raise self._column_error(fault, name, path) from None
        except ValueError as error:  # a text that is none
            raise self._broken(file, error) from None

    def _column_error(self, text: str, name: str, path: Path) -> DataError:
        """Return the error of a column: its name is the job's own, or one that was found."""
        return DataError(text, str(path), *(() if self._job_names else (f"'{name}'",)))

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
        return DataError(error_texts.NOT_WHOLE_PARQUET(name), name)


def _is_read(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _pyarrow() -> Any:
    try:
        from pyarrow import parquet  # an optional extra, and slow to import
    except ImportError:
        missing = "Parquet files need pyarrow: pip install 'millpond[parquet]' where workers run"
        raise LocalError(missing) from None
    return parquet


class _MissingNumberError(Exception):
    """An array of whole numbers has no value for what is missing."""


def _column_fault(path: Path, schema: Any, name: str, types: dict[str, Any]) -> str:
    """Return why a column cannot be used beside those in ``types``, of the files before: it is not there
    once, or has another type. Empty if it can be used.
    """
    if (count := schema.names.count(name)) != 1:
        return f"{path} has {count} columns '{name}'" if count else f"{path} has no column '{name}'"
    kind = schema.field(name).type
    before = types.get(name)
    if _compared(before) is None:
        types[name] = kind
    elif _compared(kind) not in (None, _compared(before)):
        return f"column '{name}' is {kind} in {path}, and {before} in the files before it"
    return ""


def _compared(kind: Any) -> object:
    """Return what two types have in common if their values are alike in samples; None if there are none."""
    from pyarrow import types

    if kind is None or types.is_null(kind):
        return None
    if types.is_dictionary(kind):
        return _compared(kind.value_type)
    if _is_list(kind):
        return "list", _compared(kind.value_type)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return str(kind).removeprefix("large_")
    return str(kind)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return any((types.is_list(kind), types.is_large_list(kind), types.is_fixed_size_list(kind)))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return any((types.is_integer(kind), types.is_floating(kind), types.is_boolean(kind)))


def _values(column: Any) -> Sequence[Any]:
    """Return a column's values as they are in samples. Raises _MissingNumberError, ValueError."""
    if _is_list(column.type):
        return [_array(each.values) if each.is_valid else None for each in column]
    if not _is_number(column.type):
        found: list[Any] = column.to_pylist()
        return found
    if not column.null_count:
        numbers: Sequence[Any] = column.to_numpy()
        return numbers
    filled = column.fill_null(False if str(column.type) == "bool" else 0).to_numpy()
    missing = column.is_null().to_numpy()
    return [None if absent else value for absent, value in zip(missing, filled, strict=True)]


def _array(values: Any) -> NDArray[Any]:
    """Return a list's values; a floating number that is missing is NaN."""
    from pyarrow import types

    if values.null_count and _is_number(values.type) and not types.is_floating(values.type):
        raise _MissingNumberError
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found if found.flags.writeable else found.copy()  # torch warns of arrays that it must not write
