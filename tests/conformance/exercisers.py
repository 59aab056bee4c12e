# SPDX-License-Identifier: Apache-2.0
"""Edge: programs that do random operations on a directory: fsx on a file, fsstress on a tree."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from conformance.results import Survived
from conformance.suite import capture

_SECONDS = 1500.0
_PROCESSES = 2
_LONGEST_PAUSE = 4.0
_REACHED = re.compile(r"LOG DUMP \((\d+) total operations\)|testcalls = (\d+)")
_SEED = re.compile(r"seed( set to)? ", re.IGNORECASE)


def fsx(program: Path, place: Path, scratch: Path, operations: int) -> Survived:
    """Random reads, writes, maps and truncations of one file; each read is compared with what was written."""
    maps = _maps(place)
    argv = [str(program), "-q", "-c", "100", "-S", "1", "-N", str(operations), "-P", f"{scratch}/"]
    argv += [] if maps else ["-R", "-W"]
    text, late = capture([*_telling(argv), "fsx"], place, _SECONDS)
    how = "with maps" if maps else "without maps"
    if not (reason := _why(text, late)):
        return Survived(operations, how)
    reached = _REACHED.search(text)
    return Survived(int(next(filter(None, reached.groups()))) - 1 if reached else 0, f"{how}; {reason}")


def fsstress(program: Path, place: Path, below: Path, operations: int) -> Survived:
    """Random operations on a tree; then ``below``, where its files lie, must show the same tree."""
    count = operations // _PROCESSES
    argv = [str(program), "-d", str(place), "-s", "1", "-p", str(_PROCESSES), "-n", str(count)]
    argv += ["-f", "sync=0"]  # it would sync all file systems of this machine
    if reason := _why(*capture(_telling(argv), place, _SECONDS)):
        return Survived(0, reason)
    if different := _difference(place, below):
        return Survived(0, f"the file system below shows another tree: {different}")
    return Survived(count * _PROCESSES, f"{_PROCESSES} processes")


@contextlib.contextmanager
def looking(top: Path) -> Iterator[list[float]]:
    """All that is in a directory is looked at now and then; how many seconds each look took."""
    ended, looks = threading.Event(), list[float]()

    def look() -> None:
        dice = random.Random(1)
        while not ended.wait(dice.uniform(0, _LONGEST_PAUSE)):
            began = time.monotonic()
            subprocess.run(["find", ".", "-ls"], cwd=top, capture_output=True, check=False)
            looks.append(time.monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        ended.set()
        thread.join()


def _telling(argv: list[str]) -> list[str]:
    return ["sh", "-c", '"$0" "$@"; echo "status $?"', *argv]


def _why(text: str, late: bool) -> str:
    """What went wrong; nothing, if nothing did."""
    if late:
        return f"it was stopped after {_SECONDS:.0f} s"
    if text.endswith("status 0\n"):
        return ""
    return next((line for line in text.splitlines() if not _SEED.match(line)), "it said nothing")


def _maps(place: Path) -> bool:
    """Whether files there can be mapped as shared memory."""
    with (place / "map").open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return False
        return True


def _difference(one: Path, other: Path) -> str:
    """The first line in which two trees differ; nothing, if none does."""
    pairs = itertools.zip_longest(_listing(one), _listing(other), fillvalue="nothing")
    return next((f"{mine} | {its}" for mine, its in pairs if mine != its), "")


def _listing(top: Path) -> list[str]:
    """Names, types, modes, owners, links, sizes and contents."""
    format_ = r"%P %y %m %U %G %n %s %l\n"
    files = f"find . -not -type d -printf '{format_}' && find . -type d -printf '%P %m %U %G\\n'"
    contents = "find . -type f -exec cksum {} +"
    done = subprocess.run(["sh", "-c", f"{files} && {contents}"], cwd=top, capture_output=True, check=False)
    return [*sorted(os.fsdecode(done.stdout).splitlines()), f"exit code {done.returncode}"]
