# SPDX-License-Identifier: Apache-2.0
"""Entry: tests the volume's mounts for POSIX and durability, ``make conformance``: ``conformance.json``."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conformance.context import Context
from conformance.places import make_flash
from conformance.posix import MOUNTS
from conformance.run import PARTS, Run
from conformance.suite import why_not_built
from millpond.base.errors import MillpondError
from millpond.linux.confinement.sandbox import Sandbox, accept_signals, exit_code, spawn

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Exit codes: 0 done, 1 something broke, 2 wrong arguments or nothing to run."""
    arguments = _parser().parse_args()
    if reason := _why_not(arguments):
        print(f"conformance: {reason}", file=sys.stderr)
        return 2
    arguments.output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        return _contain(functools.partial(_inside, arguments, Path(scratch)))


def _contain(body: Callable[[], int]) -> int:
    """Run it in mounts and pids of its own. A signal ends it before this returns: a directory that is removed
    while others have mounts in it keeps those for ever.
    """
    me, ended = os.getpid(), list[int]()

    def end(number: int, _frame: object) -> None:
        if os.getpid() != me:
            os._exit(128 + number)
        ended.append(number)  # and nothing is raised: while a process forks that would be lost

    for number in _ENDS:
        signal.signal(number, end)
    pid = spawn(Sandbox(own_pids=True), body)
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.1)
        if ended:  # again and again: a process that has just been forked may lose one
            os.kill(pid, signal.SIGTERM)
    return 128 + ended[0] if ended else exit_code(found[1])


def _why_not(arguments: argparse.Namespace) -> str:
    named = arguments.pjdfstest or arguments.fsx or arguments.fsstress
    needed = arguments.part == ["posix"] and not named  # there would be nothing to run
    if (arguments.pjdfstest or needed) and (reason := why_not_built(arguments.pjdfstest)):
        return reason
    if os.geteuid() != 0:
        return "needs root: it mounts, and most tests are about users"
    for name in ("fsx", "fsstress"):
        folder: Path | None = getattr(arguments, name)
        if folder and not os.access(folder / name, os.X_OK):
            return f"{folder} holds no program {name}: build it there"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make conformance", description="What the volume's mounts are to keep: POSIX and their promises."
    )
    parser.add_argument("--pjdfstest", type=Path, metavar="DIR", help="pjdfstest's folder, built")
    parser.add_argument("--fsx", type=Path, metavar="DIR", help="a folder with a program fsx")
    parser.add_argument("--fsstress", type=Path, metavar="DIR", help="a folder with a program fsstress")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="this part only")
    parser.add_argument("--only", action="append", choices=MOUNTS, help="POSIX tests on this mount only")
    parser.add_argument("--match", default="", help="only those files of the suite whose names hold this")
    parser.add_argument("--operations", type=int, default=100_000, help="of fsx; a tenth of it of fsstress")
    parser.add_argument("--cuts", type=int, default=50, help="of power under load; and as many kills")
    parser.add_argument(
        "--seed", type=int, default=1, help="of what is written around the cuts, and when they are"
    )
    parser.add_argument("--transactions", type=int, default=200, help="of the database, in each direction")
    parser.add_argument("--output", type=Path, default=Path(".bench"), help="folder for conformance.json")
    return parser


def _inside(arguments: argparse.Namespace, scratch: Path) -> int:
    for number in _ENDS:
        signal.signal(number, lambda got, _frame: os._exit(128 + got))  # and with it all that it started
    accept_signals()
    os.umask(0o022)
    try:
        run = Run(Context(arguments, scratch, *make_flash(scratch)))
    except MillpondError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1
    whole = run.all()
    run.report()
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
