# SPDX-License-Identifier: Apache-2.0
"""The keys of a job file as their page shows them; ``python -m tests.train.job_reference`` writes them."""

from __future__ import annotations

import json
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from millpond.base.keys import keys_of
from millpond.train.job.spec import Job, SynchronousSpec

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-job-file.md"
_COLUMN = 31


def job_keys() -> str:
    """Return all keys of a federated job, its own first, then its tables, in the order of a job's fields."""
    hints = typing.get_type_hints(Job).items()
    tables = {name: next(filter(is_dataclass, (hint, *typing.get_args(hint))), None) for name, hint in hints}
    own = [_line(Job, field) for field in fields(Job) if not tables[field.name]]
    others = [
        _table(name, cls) for name, cls in tables.items() if cls and name not in ("task", "synchronous")
    ]
    return "\n\n".join(["\n".join(own), *others])


def _table(name: str, cls: Any) -> str:
    about = keys_of(Job)[name].about
    heading = f"[{name}]".ljust(_COLUMN) + f"# {about}" if about else f"[{name}]"
    found = sorted(fields(cls), key=lambda field: field.kw_only)  # as in the constructor
    return "\n".join([heading, *(_line(cls, field) for field in found)])


def _line(cls: Any, field: Field[Any]) -> str:
    """Return a key with its example or default, commented out if it is left out otherwise."""
    key, default = keys_of(cls)[field.name], field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    shown = key.example or json.dumps(list(default) if isinstance(default, tuple) else default)
    return f"{'# ' if default is None else ''}{field.name} = {shown}".ljust(_COLUMN) + f"# {key.about}"


def in_place(text: str) -> str:
    """Return the page's text with the keys as they are."""
    for keys in (job_keys(), _table("synchronous", SynchronousSpec)):
        first = keys.partition("#")[0].rstrip().partition("\n")[0]
        begin = text.index(f"```toml\n{first}") + len("```toml\n")
        text = text[:begin] + keys + text[text.index("\n```", begin) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(in_place(PAGE.read_text()))
