# SPDX-License-Identifier: Apache-2.0
"""Pure: the fenced blocks of a page, and what the tests do with each.

A comment on the line before a block says what is not plain from its language:

    <!-- file: task.py -->           the block is the contents of a file, for the blocks behind it
    <!-- background -->              the block runs in another terminal, until the end of the page
    <!-- not run: board -->          no test can run it here, for one of REASONS
    <!-- run by: tests/x/test_y.py -->  another test does what it says
    <!-- again until: REGEX -->      the block is repeated until its output has this
    <!-- fails: 2 -->                the block ends with this exit code
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

COMMANDS: Final = ("bash", "console")
"""Languages whose blocks a test runs."""
SHOWN: Final = ("text", "json", "diff", "ini", "yaml")
"""Languages of what a reader looks at, and no one types."""
CHECKED: Final = ("toml", "python")
"""Languages whose blocks are parsed, and written to a file where they have a name."""
REASONS: Final = {
    "board": "needs a real board",
    "root": "changes the system it runs on",
    "network": "fetches packages from a registry",
    "long": "takes minutes, or builds an image",
    "hosts": "needs a second host",
    "gpu": "needs a GPU",
    "people": "needs a person at a terminal, or a key of theirs",
}
"""Why a block is not run here."""
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w-]*)[^`]*")
_MARK = re.compile(r" *<!-- (file|background|not run|run by|again until|fails)(?:: (.+?))? -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the ``line`` of its fence, its language, its text, and its marks by name."""

    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def runs(self) -> bool:
        """Whether a test runs it as commands, or writes it to a file."""
        return "file" in self.marks or (self.language in COMMANDS and not self.excused)

    @property
    def excused(self) -> bool:
        """Whether it has a mark that says why it does not run here."""
        return bool(self.marks.keys() & {"not run", "run by"})

    @property
    def commands(self) -> str:
        """The commands: of a console, the lines behind a prompt, each with its continuation."""
        if self.language != "console":
            return self.text
        found, goes_on = [], False
        for line in self.text.splitlines():
            if goes_on or line.startswith("$ "):
                found.append(line if goes_on else line[2:])
                goes_on = found[-1].endswith("\\")
        return "\n".join(found)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return list(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        if not (opened := FENCE.fullmatch(lines[number])):
            number += 1
            continue
        begin, fence, indent = number, opened["fence"], len(opened["indent"])
        number += 1
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        text = "\n".join(line[indent:] for line in lines[begin + 1 : number]) + "\n"
        yield Block(begin + 1, opened["language"], text, _marks(lines, begin))
        number += 1


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """Return a page of which all but the fenced blocks is changed."""
    parts: list[tuple[bool, str]] = [(True, "")]
    fence = ""
    for line in text.splitlines(keepends=True):
        opened = FENCE.fullmatch(line.rstrip("\n"))
        is_end = bool(fence) and line.strip() == fence
        fence = "" if is_end else fence or (opened["fence"] if opened else "")
        is_prose = not (fence or is_end)
        if parts[-1][0] is is_prose:
            parts[-1] = is_prose, parts[-1][1] + line
        else:
            parts.append((is_prose, line))
    return "".join(change(part) if is_prose else part for is_prose, part in parts)


def _marks(lines: list[str], fence: int) -> dict[str, str]:
    """Return the marks on the lines right before a fence."""
    found: dict[str, str] = {}
    number = fence - 1
    while number >= 0 and (match := _MARK.fullmatch(lines[number])):
        found[match[1]] = match[2] or ""
        number -= 1
    return found


def faults(block: Block) -> Iterator[str]:
    """Yield what is wrong with a block and its marks."""
    if not block.language:
        yield "has no language: bash, console, python, toml, or text for what nobody types"
    elif block.language not in (*COMMANDS, *SHOWN, *CHECKED):
        yield f"has the language '{block.language}', which no test knows"
    reason = block.marks.get("not run")
    if reason is not None and reason not in REASONS:
        yield f"is not run for '{reason}', which is none of {', '.join(REASONS)}"
    if block.marks and block.language in SHOWN and "file" not in block.marks:
        yield "has a mark, though nobody types it"
    if block.language == "console" and not block.commands:
        yield "is a console without a line that begins with '$ '"
