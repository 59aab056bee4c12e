# SPDX-License-Identifier: Apache-2.0
"""Entry: runs the tests in two passes, each of which ends with pytest's own closing line.

``run.py [--coverage] quick|full [ARGUMENT...]`` runs first, in three processes, the tests that may share the
machine, as ``schedule.py`` divides them, and then, in one, those that are marked ``serial``, also where the
first pass failed. The arguments are pytest's. The exit code is 0 only if neither pass failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from millpond.linux.syscalls import killed_with_parent

SHARED = ("-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder", "-m", "not serial")
ALONE = ("-m", "serial")
MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "ARGS", "EFFORT")
NO_TESTS = 5  # pytest's exit code where none was selected


def main() -> int:
    arguments = sys.argv[1:]
    argv = [str(Path(sys.executable).with_name("pytest"))]
    if arguments[:1] == ["--coverage"]:
        argv = [str(Path(sys.executable).with_name("coverage")), "run", *argv]
        del arguments[0]
    effort, *arguments = arguments
    interrupts: list[int] = []  # the terminal sends Ctrl-C to pytest, too, which ends by itself
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    codes = []
    for chosen in (SHARED, ALONE):
        if not interrupts:
            codes.append(_run([*argv, f"--effort={effort}", *chosen, *arguments]))
    return 130 if interrupts else overall(codes)


def overall(codes: list[int]) -> int:
    """Return the exit code of the passes together: that one of them had no tests is no failure."""
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def _run(argv: list[str]) -> int:
    # The makes that tests start do not get the variables of the command line of ``make test``.
    env = {name: value for name, value in os.environ.items() if name not in MAKE}
    code = subprocess.Popen(argv, env=env, preexec_fn=killed_with_parent()).wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
