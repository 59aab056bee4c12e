# SPDX-License-Identifier: Apache-2.0
"""Pure: Markdown of docstrings and tables, as GitHub and the site both show it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_ITEM = re.compile(r"(- |\d+\. |\||    |>>> |\.\.\. )")


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: one line for each paragraph and item, code in single backticks."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", inspect.cleandoc(docstring or "")):
        lines = _joined(paragraph.splitlines())
        if lines and lines[0].startswith(">>> "):
            lines = ["```python", *(line[4:] for line in lines), "```"]
        found.append("\n".join(_inline(line) for line in lines))
    return "\n\n".join(found)


def _joined(lines: Iterable[str]) -> list[str]:
    """Join the lines of a sentence; items and rows of a table keep theirs."""
    found: list[str] = []
    for line in lines:
        if found and not _ITEM.match(line):
            found[-1] = f"{found[-1]} {line.strip()}"
        else:
            found.append(line)
    return found


def _inline(line: str) -> str:
    return _LITERAL.sub(lambda match: f"`{match[1]}`", line)


def summary(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return prose(docstring).partition("\n\n")[0].replace("\n", " ")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a column in which nothing stands is left out."""
    body = [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    kept = [number for number in range(len(headings)) if any(row[number] for row in body)]
    shown = [list(headings), ["---"] * len(headings), *body]
    return "\n".join(f"| {' | '.join(row[number] for number in kept)} |" for row in shown)


def code(text: str) -> str:
    """Return a text as code within a line, "" for none."""
    return f"`{text}`" if text else ""


def page(title: str, *sections: str) -> str:
    """Return a page of the reference."""
    made = "<!-- `make reference` writes this page from the code: change the code. -->"
    return "\n\n".join([made, f"# {title}", *(section for section in sections if section)]) + "\n"
