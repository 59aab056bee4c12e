# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the values of one column of a folder, one for each sample, in parts.

| folder with     | columns                                                                     |
|-----------------|-----------------------------------------------------------------------------|
| labelled images | ``label``, and ``image``: the mean of its pixels, of bytes from 0 to 1      |
| ``*.csv``       | those of the first line; ``0``, ``1``, ... if there are numbers in it alone |
| ``*.parquet``   | its own; a list counts by its mean                                          |

A value that is empty or no number is missing: NaN. Where the question has classes, a text that is one of them
counts by its place among them.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from millpond.train import error_texts
from millpond.train.data import labelled_images
from millpond.train.data.errors import DataError
from millpond.train.questions.sums import Values
from millpond.train.task.guessed_images import format_of

_PART = 4096
_IMAGES = 256
LABEL, IMAGE = "label", "image"


def values(root: Path, folder: str, column: str, classes: Sequence[str] = ()) -> Iterator[Values]:
    """Yield the values of a column, "" for any number of each sample, of a folder (absolute or below
    ``root``). Raises DataError.
    """
    place = root / folder
    if not place.is_dir():
        raise DataError(error_texts.NO_FOLDER(folder))
    if tables := sorted(place.glob("*.csv")):
        return _csv(folder, tables, column, classes)
    if next(place.glob("*.parquet"), None):
        return _parquet(folder, place, column, classes)
    return _images(root, folder, column, classes)


def _images(root: Path, folder: str, column: str, classes: Sequence[str]) -> Iterator[Values]:
    if column not in ("", LABEL, IMAGE):
        raise DataError(error_texts.NO_COLUMN(folder, column))
    found = labelled_images.load(root, folder, format_of(root / folder), classes)
    if column != IMAGE:
        yield found.labels.astype(np.float64)
        return
    for start in range(0, len(found), _IMAGES):
        images, _ = found.__getitems__(range(start, min(start + _IMAGES, len(found))))
        yield images.numpy().astype(np.float64).mean(axis=(1, 2, 3))


def _csv(folder: str, tables: Sequence[Path], column: str, classes: Sequence[str]) -> Iterator[Values]:
    for table in tables:
        try:
            with table.open(newline="", encoding="utf-8", errors="replace") as file:
                rows = (row for row in csv.reader(file) if row)
                first = next(rows, [])
                headed = any(map(_is_text, first))
                names = [cell.strip() for cell in first] if headed else [str(n) for n in range(len(first))]
                if column and column not in names:
                    raise DataError(error_texts.NO_COLUMN(folder, column))
                place = names.index(column) if column else 0
                if not headed and first:
                    yield np.array([_cell(first, place, classes)])
                while part := list(islice(rows, _PART)):
                    yield np.array([_cell(row, place, classes) for row in part])
        except csv.Error:
            raise DataError(error_texts.NOT_WHOLE_CSV(folder)) from None
        except OSError as error:
            raise DataError(error_texts.UNREADABLE(folder, error.strerror)) from None


def _cell(row: Sequence[str], place: int, classes: Sequence[str]) -> float:
    return _value(row[place], classes) if place < len(row) else math.nan


def _parquet(folder: str, place: Path, column: str, classes: Sequence[str]) -> Iterator[Values]:
    from millpond.train.data.parquet import ParquetRows  # imports pyarrow, which not all devices have

    rows = ParquetRows(place)
    if column:
        if column not in rows.columns:
            raise DataError(error_texts.NO_COLUMN(folder, column))
        rows = ParquetRows(place, [column])
    for start in range(0, len(rows), _PART):
        part = range(start, min(start + _PART, len(rows)))
        if not column:
            yield np.zeros(len(part))
            continue
        samples = rows.__getitems__(part)
        yield np.array([_value(sample[column], classes) for sample in samples])


def _is_text(cell: str) -> bool:
    return bool(cell.strip()) and cell.strip().lower() != "nan" and math.isnan(_value(cell, ()))


def _value(found: Any, classes: Sequence[str]) -> float:
    """Return a value as a number, NaN for what is none."""
    text = found.strip() if isinstance(found, str) else found
    if isinstance(text, str) and text in classes:
        return float(classes.index(text))
    if isinstance(text, np.ndarray):
        return float(text.mean()) if text.size and text.dtype.kind in "biuf" else math.nan
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return math.nan
