# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): exit codes, the end of the help's text, and the end of a command that has failed."""

from __future__ import annotations

import itertools
import sys
from typing import NoReturn

from millpond.host.terminal import tables

EXIT_CODES = """\
Exit codes: 0 done; 1 a device or the daemon failed or refused; 2 wrong usage, configuration or input;
3 the job failed or was stopped; 130 interrupted; 255 no SSH connection. 'run' and 'shell' exit as what
they ran; 'run' on several devices with the greatest of their codes; 124 at its --timeout.
"""
FLEET_DIRECTORY = """\
The fleet's directory is that of --fleet; without it that in the variable MILLPOND_FLEET; without both
/var/lib/millpond for root, ~/.local/state/millpond for others.
"""
REMOTE, LOCAL, JOB, INTERRUPTED, SSH = 1, 2, 3, 130, 255


def fail(text: str, code: int, *, document: bool = True) -> NoReturn:
    """Exit with ``code`` and one line on standard error; print a JSON ``document`` of the same if JSON was
    asked for.
    """
    if document and _json_wanted(sys.argv[1:]):
        tables.print_json({"error": text, "exit_code": code})
    print(f"millpond: {text}", file=sys.stderr)
    raise SystemExit(code)


def _json_wanted(arguments: list[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--format=json" in own or ("--format", "json") in itertools.pairwise(own)
