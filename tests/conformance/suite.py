# SPDX-License-Identifier: Apache-2.0
"""Edge: pjdfstest, the suite of POSIX tests, run on a directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.tap import Outcome, Outcomes, parse
from millpond.linux import syscalls

_SECONDS = 600.0  # the longest file sleeps for most of five minutes
_AT_ONCE = 4


def why_not_built(folder: Path | None) -> str:
    """What to do before the suite in ``folder`` can run; nothing, if it can."""
    if folder and os.access(folder / "pjdfstest", os.X_OK) and (folder / "tests" / "misc.sh").exists():
        return ""
    where = f"{folder} holds none" if folder else "none was named"
    return (
        f"needs a built pjdfstest (pjd/pjdfstest), and {where}: in a copy of it run autoreconf -ifs, "
        "./configure and make, then make conformance PJDFSTEST=DIR"
    )


class Suite:
    """The tests of a built ``folder`` whose names hold ``match``. ``file_system`` is what they take every
    directory's to be, for some do only what they know it can; where that is changed, the caller must have
    mounts of its own.
    """

    def __init__(self, folder: Path, match: str, file_system: str, scratch: Path) -> None:
        self._tests = folder.resolve() / "tests"
        names = (str(path.relative_to(self._tests)) for path in self._tests.glob("*/*.t"))
        self._names = sorted(name for name in names if match in name)
        settings = scratch / "conf"
        settings.write_text((self._tests / "conf").read_text() + f"\nfs={file_system.upper()}\n")
        syscalls.bind(settings, self._tests / "conf")

    def run(self, directory: Path) -> Outcomes:
        """Run all, each in an own directory made in ``directory``."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda name: self._run(name, directory), self._names)
            return dict(zip(self._names, found, strict=True))

    def _run(self, name: str, directory: Path) -> Outcome:
        place = directory / name.replace("/", "-")
        try:
            place.mkdir()
        except OSError as error:  # the mount is dead: so is every other test
            return parse("", f"no directory can be made for it: {error.strerror}")
        text, late = capture(["sh", str(self._tests / name)], place, _SECONDS)
        return parse(text, f"it was stopped after {_SECONDS:.0f} s" if late else "")


def capture(argv: Sequence[str], place: Path, seconds: float) -> tuple[str, bool]:
    """What a program that runs in ``place`` says, and whether it, and all it started, had to be stopped."""
    process = subprocess.Popen(
        argv,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0].decode(errors="replace"), False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=5)[0].decode(errors="replace"), True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0].decode(errors="replace"), True
