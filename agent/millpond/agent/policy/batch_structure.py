# SPDX-License-Identifier: Apache-2.0
"""Pure: the structure of a batch that a worker reports, rebuilt from a closed set: the job's own code runs in
the worker, and could put anything into it.

A name in it is a word of the job's files, a type is torch's or Python's. Lengths leave where they are of a
folder's images, which have one shape; those of a task's own batch could be of single samples, such as texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import BatchPart
from millpond.train.task.structure import GUESSED_IMAGES

_MOST_PARTS, _MOST_LENGTHS, _LONGEST = 16, 4, 1 << 16
_HIDDEN = "?"
_TYPES = frozenset(
    ["bool", "bfloat16", "complex64", "complex128"]
    + ["str", "bytes", "int", "float", "NoneType", "list", "tuple"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float{bits}" for bits in (16, 32, 64)]
)


def rebuilt(parts: Sequence[BatchPart], work: WorkSpec, code: Mapping[str, str]) -> tuple[BatchPart, ...]:
    """Return what may leave of the parts of a batch of ``work``, whose files are ``code``."""
    images = not work.task or (work.model.factory == GUESSED_IMAGES and not code)
    known = "\n".join(code.values())
    return tuple(_part(part, known, images=images) for part in parts[:_MOST_PARTS])


def _part(part: BatchPart, known: str, *, images: bool) -> BatchPart:
    lengths = None
    if part.shape is not None:
        lengths = tuple(
            length if images and 0 < length <= _LONGEST else -1 for length in part.shape[:_MOST_LENGTHS]
        )
    return BatchPart(_place(part.place, known), part.type if part.type in _TYPES else _HIDDEN, lengths)


def _place(place: str, known: str) -> str:
    """Return a place whose keys are numbers up to 99 and words of the job's files."""
    if place == "batch":
        return place
    found = re.findall(r"\[[0-9]{1,2}\]|[^.\[\]]+", place)[:_MOST_LENGTHS]
    told = [each if each.startswith("[") or is_word(each, known) else _HIDDEN for each in found]
    return re.sub(r"\.\[", "[", ".".join(told))


def is_word(name: str, text: str) -> bool:
    """Return whether ``name`` is an identifier and a word of ``text``."""
    return bool(name) and name.isidentifier() and bool(re.search(rf"\b{re.escape(name)}\b", text))
