# SPDX-License-Identifier: Apache-2.0
"""Edge (files): results of exhibits: ``papers.json`` of a run, and what docs/papers has of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.papers.exhibit import Value


@dataclass(frozen=True, slots=True)
class Result:
    """An exhibit as it was measured; ``picture`` is the name of its file, "" for none. ``quick`` is for a
    short and coarse run, ``seconds`` is what it took.
    """

    title: str
    rows: tuple[Value, ...]
    emulation: str
    difference: str
    picture: str
    quick: bool
    seconds: float


Results = Mapping[str, Result]
"""Results by ``PAPER/EXHIBIT``."""


def read(path: Path) -> dict[str, Result]:
    """Return the results in a file, none if there is no such file."""
    if not path.exists():
        return {}
    return {name: _result(fields) for name, fields in json.loads(path.read_text()).items()}


def _result(fields: dict[str, Any]) -> Result:
    rows = tuple(Value(**row) for row in fields.pop("rows"))
    return Result(rows=rows, **fields)


def write(results: Results, path: Path) -> None:
    """Write a file of results, whole or not at all."""
    fresh = path.with_suffix(".new")
    fields = {name: asdict(result) for name, result in results.items()}
    fresh.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    fresh.rename(path)


def published(folder: Path) -> dict[str, Result]:
    """Return the results that the documents have: a file for each paper."""
    found = dict[str, Result]()
    for path in sorted(folder.glob("*.json")):
        found |= read(path)
    return found
