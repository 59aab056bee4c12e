# SPDX-License-Identifier: Apache-2.0
"""Blocks of the documents: each is one that a test runs or checks, or says why not."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from documents.blocks import Block, blocks, faults, in_prose
from documents.configuration import FILES
from documents.site import ROOT, followed
from documents.types import fields, inner, inner_tables

PAGES = followed()
ALL = [(page, block) for page in PAGES for block in blocks(page.read_text())]


def _named(pairs: list[tuple[Path, Block]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("page", "block"), pairs, ids=[f"{page.relative_to(ROOT)}:{block.line}" for page, block in pairs]
    )


def test_a_block_without_a_mark_that_no_test_knows_is_a_fault() -> None:
    (plain,) = blocks("```\nmillpond devices\n```\n")
    (strange,) = blocks("```zsh\nmillpond devices\n```\n")
    (excuse,) = blocks("<!-- not run: no time -->\n```bash\nmillpond devices\n```\n")
    (elsewhere,) = blocks("<!-- run by: tests/system/test_0_gone.py -->\n```bash\nmake demo\n```\n")
    (good,) = blocks("<!-- not run: board -->\n```bash\nmillpond flash\n```\n")
    found = [list(faults(each)) for each in (plain, strange, excuse, good)]
    assert [len(each) for each in found] == [1, 1, 1, 0]
    assert _gone(elsewhere) and not _gone(good)


def test_a_console_has_commands_and_their_output() -> None:
    (block,) = blocks("```console\n$ millpond run csd0 -- \\\n  uname\nLinux\n$ ls\n```\n")
    assert block.commands == "millpond run csd0 -- \\\n  uname\nls"


def test_prose_is_changed_and_blocks_are_not() -> None:
    text = "a\n```text\na\n```\na\n````text\n```\na\n````\n"
    assert in_prose(text, str.upper) == "A\n```text\na\n```\nA\n````text\n```\na\n````\n"


def test_the_documents_have_no_faults() -> None:
    found = [
        f"{page.relative_to(ROOT)}:{block.line}: the block {fault}"
        for page, block in ALL
        for fault in (*faults(block), *_gone(block))
    ]
    assert not found, "\n".join(found)


def _gone(block: Block) -> list[str]:
    name = block.marks.get("run by")
    return [] if name is None or (ROOT / name).exists() else [f"is run by {name}, which is not there"]


@_named([pair for pair in ALL if pair[1].language == "python"])
def test_python_is_python(page: Path, block: Block) -> None:
    ast.parse(block.text)


@_named([pair for pair in ALL if pair[1].language == "toml"])
def test_toml_has_keys_of_the_product(page: Path, block: Block) -> None:
    document = tomllib.loads(block.text)
    unknown = {name: list(_unknown(document, cls)) for name, cls in FILES.items()}
    assert not all(unknown.values()), f"its keys are of none of the files: {unknown}"


def _unknown(document: dict[str, Any], cls: Any) -> list[str]:
    """Return the keys that a part of a file has, and its dataclass has not."""
    hints, known = get_type_hints(cls), {field.name for field in fields(cls)}
    found = [key for key in document if key not in known]
    for key in document.keys() & known:
        below = inner(hints[key])
        parts = document[key] if isinstance(document[key], list) else [document[key]]
        for part in parts if below else ():
            found += [f"{key}.{each}" for each in _unknown(part, below)] if isinstance(part, dict) else []
    return found


def test_toml_tables_of_a_file_are_found() -> None:
    assert "[[device]]" in dict(inner_tables(FILES["fleet.toml"]))
