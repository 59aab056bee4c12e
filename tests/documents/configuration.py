# SPDX-License-Identifier: Apache-2.0
"""Pure: the keys of the product's TOML files."""

from __future__ import annotations

import typing
from typing import Any

from documents.markdown import page, prose
from documents.types import inner_tables, keys
from millpond.agent.config import AgentConfig
from millpond.host.fleet.directory import FleetConfig
from millpond.train.job.spec import Job

FILES: typing.Final[dict[str, Any]] = {
    "job.toml": Job,
    "fleet.toml": FleetConfig,
    "agent.toml": AgentConfig,
}
"""The root of each file."""


def toml_page(name: str) -> str:
    """Return the page of a TOML file: its own keys, then those of each table."""
    root = FILES[name]
    sections = [f"## {name}", prose(root.__doc__), keys(root)]
    known: dict[Any, str] = {}
    for heading, cls in inner_tables(root):
        sections.append(f"## `{heading}`")
        if cls in known:
            sections.append(f"The same keys as `{known[cls]}`.")
            continue
        known[cls] = heading
        sections += [prose(cls.__doc__), keys(cls)]
    intro = f"An unknown key in `{name}` is an error, and so is a value of another type or out of range."
    return page(name, intro, *sections)
