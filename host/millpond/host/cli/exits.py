# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): exit codes, the end of the help's text, and the end of a command that has failed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.base.text import escaped, printable
from millpond.host.terminal import printing

CODES: Final = {
    "0": "done",
    "1": "a device or the daemon failed or refused",
    "2": "wrong usage, configuration or input",
    "3": "the job failed or was stopped",
    "130": "interrupted",
    "141": "the reader of the output has ended",
    "255": "no SSH connection",
}
"""The meaning of each exit code."""
OTHER_CODES = """\
'run' and 'shell' exit with the code of the command that they ran, 128 + N if signal N ended it. 'run' on
several devices exits with the greatest of their codes. At its --timeout 'run' exits with 124.
"""
EXIT_CODES = f"Exit codes: {'; '.join(f'{code} {about}' for code, about in CODES.items())}. {OTHER_CODES}"
FLEET_DIRECTORY = """\
The fleet's directory is that of --fleet, else that of the variable MILLPOND_FLEET. Without both it is
/var/lib/millpond for root, and for users of its group who have no fleet of their own;
~/.local/state/millpond for others.
"""
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "fuse": "fuse-python"}
"""The names of packages for pip, where they differ from those of their modules."""
_EXTRAS = {
    **dict.fromkeys(("textual", "plotille"), "'millpond[top]'"),
    **dict.fromkeys(("jinja2", "starlette", "uvicorn"), "'millpond[dashboard]'"),
    "prometheus_client": "'millpond[metrics]'",
}
"""The extras that bring packages which one command alone needs."""
REMOTE, LOCAL, JOB, INTERRUPTED, SSH = 1, 2, 3, 130, 255


class Interrupted(LocalError):
    """Ctrl-C interrupted a command; the text says how it left things."""


def fail(text: str, code: int, *, document: bool = True) -> NoReturn:
    """Exit with ``code`` and one line, without control characters, on standard error; print a JSON
    ``document`` of the same if JSON was asked for.
    """
    if document and _json_wanted(sys.argv[1:]):
        try:
            printing.print_json({"error": text, "exit_code": code})
            sys.stdout.flush()
        except OSError:  # the line on standard error tells it all the same
            _forget_output()
    print(f"millpond: {printable(text, len(text))}", file=sys.stderr)
    raise SystemExit(code)


def _json_wanted(arguments: list[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--format=json" in own or ("--format", "json") in itertools.pairwise(own)


def missing(error: ModuleNotFoundError) -> NoReturn:
    """Exit: a package that the command needs is not installed."""
    if error.name is None or error.name.startswith("millpond"):
        raise error
    package = error.name.partition(".")[0]
    wanted = _EXTRAS.get(package) or _DISTRIBUTIONS.get(package, package)
    fail(f"the package '{package}' is not installed: pip install {wanted}", LOCAL)


def exit_code(error: MillpondError) -> int:
    """Return the exit code of a command that has failed so."""
    is_usage = isinstance(error, Refused) and error.code in ("unknown", "local", "state")
    return LOCAL if isinstance(error, LocalError) or is_usage else REMOTE


def run(command: Callable[[], object], code_of: Callable[[MillpondError], int] = exit_code) -> NoReturn:
    """Run a command and exit; every error is one line on standard error. A number that it returns is its exit
    code.
    """
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended; a daemon must not die of it, so no signal
        _forget_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except MillpondError as error:
        fail(str(error), code_of(error))
    except OSError as error:
        if _output_fails(error):
            fail(f"standard output: {error.strerror or error}", LOCAL, document=False)
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), LOCAL)
    except ModuleNotFoundError as error:
        missing(error)
    except UnicodeEncodeError as error:  # of a file's name or an argument
        fail(f"'{escaped(str(error.object))}' cannot be written in {error.encoding}", LOCAL)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)


def _output_fails(error: OSError) -> bool:
    """Return whether a full disk below standard output may be the reason, and forget the output then."""
    if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return False
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _forget_output()
        return True
    return False


def _forget_output() -> None:
    """Have standard output go nowhere, also what waits to be written when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Let Ctrl-C just end the process within the block, which imports modules: an extension that is being
    loaded may swallow an exception.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP within the block into SystemExit, so that it ends as by Ctrl-C; the
    exit code is 128 + N.
    """

    def leave(number: int, _frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
