# SPDX-License-Identifier: Apache-2.0
"""Rules of documents: their size, the cells of their tables, their links; and of what GitHub runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

LONGEST_CELL = 300
_FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->")
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_MAKE = re.compile(r"(?:sudo )?make ([a-z-]+)( [A-Z]+=.+)?")
_HEADING = re.compile(r"^#+ +(.+?)#* *$", re.MULTILINE)
_FOLDERS = (".", "agent", "fs", "host", "images", "tests", "tunnel", "docs/**")


def documents(root: Path) -> Iterator[Path]:
    """Yield the documents of a tree, but not those that the product writes into projects."""
    for folder in _FOLDERS:
        yield from sorted(root.glob(f"{folder}/*.md"))


def large_documents(root: Path, limits: Mapping[str, int]) -> list[str]:
    """Return the documents that have more bytes than their limit."""
    sizes = {name: (root / name).stat().st_size for name in limits}
    large = {name: size for name, size in sizes.items() if size > limits[name]}
    return [f"{name} has {size} bytes of {limits[name]}" for name, size in large.items()]


def long_cells(root: Path) -> list[str]:
    """Return the cells of tables that nobody reads to their end."""
    found = []
    for path in documents(root):
        for line in _prose(path.read_text()).splitlines():
            cells = _COMMENT.sub("", line).split("|") if line.startswith("|") else ()
            found += [
                f"{path.relative_to(root)}: a cell of {len(cell.strip())} characters: {cell.strip()[:40]}"
                for cell in cells
                if len(cell.strip()) > LONGEST_CELL
            ]
    return found


def broken_links(root: Path) -> list[str]:
    """Return the links to files, and to headings of documents, that are not there."""
    found = []
    for path in documents(root):
        for target in _LINK.findall(_CODE.sub("", _prose(path.read_text()))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = Path(os.path.normpath(path.parent / name)) if name else path
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                found.append(f"{path.relative_to(root)} links to {target}, which is not there")
    return found


def _prose(text: str) -> str:
    return _FENCED.sub("", text)


def _anchors(path: Path) -> set[str]:
    """Return the names of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(_prose(path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def not_made(root: Path) -> list[str]:
    """Return the commands of GitHub's workflows that are no targets of the Makefile, as a person has them."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (root / "Makefile").read_text(), re.MULTILINE))
    return [
        f"{path.relative_to(root)} runs '{command}', which is no target of the Makefile"
        for path in sorted(root.glob(".github/workflows/*.yml"))
        for command in re.findall(r"^ +(?:- )?run: (.*)$", path.read_text(), re.MULTILINE)
        if not ((found := _MAKE.fullmatch(command)) and found[1] in targets)
    ]
