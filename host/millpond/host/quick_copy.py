# SPDX-License-Identifier: Apache-2.0
"""Entry: a plain ``millpond cp`` without the rest of the command line, which takes longer to load than a copy
with little to do.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_VALUED = ("--fleet", "--format")


@dataclass(frozen=True, slots=True)
class CopyCommand:
    """A command line; ``fleet`` is empty where none is named."""

    paths: tuple[str, ...]
    fleet: str = ""
    recursive: bool = False
    as_json: bool = False


def parse(words: Sequence[str]) -> CopyCommand | None:
    """Return what stands behind ``millpond cp``; None for all that the whole command line has to look at:
    help, mistakes, and ways to write options that are rare.
    """
    paths, values, recursive, left = list[str](), dict[str, str](), False, list(words)
    while left:
        word = left.pop(0)
        if word in ("-r", "--recursive"):
            recursive = True
        elif word in _VALUED and left:
            values[word] = left.pop(0)
        elif word.startswith("-"):
            return None
        else:
            paths.append(word)
    if len(paths) < 2 or values.get("--format", "text") not in ("text", "json"):
        return None
    fleet, as_json = values.get("--fleet", ""), values.get("--format") == "json"
    return CopyCommand(tuple(paths), fleet, recursive, as_json)


def main(words: Sequence[str]) -> None:
    """Copy and exit; return if the whole command line is needed."""
    command = parse(words)
    if command is None:
        return
    gc.disable()  # loading makes no garbage, only much to look through
    from millpond.host.cli.exits import missing, run

    try:
        from millpond.host.cli import copy
        from millpond.host.fleet.directory import default_directory
    except ModuleNotFoundError as error:
        missing(error)

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fleet = Path(command.fleet or os.environ.get("MILLPOND_FLEET") or default_directory())
    try:
        run(lambda: copy.run(fleet, command.paths, recursive=command.recursive, as_json=command.as_json))
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(int(end.code or 0))  # all is closed: to take every module apart takes a tenth of the time
