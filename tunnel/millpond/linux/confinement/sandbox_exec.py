# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.linux.confinement.sandbox_exec SPEC COMMAND...`` runs a command in a sandbox.

A process with threads must not build a sandbox in a fork of its own; it executes this instead.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Bind, Sandbox, accept_signals, become, exit_code, spawn

KEPT_VARIABLES = ["PATH", "LANG", "LC_ALL", "TZ"]
"""The variables of the environment that a sandboxed command gets."""


def confined(sandbox: Sandbox, command: list[str], *, is_first: bool = False) -> list[str]:
    """Return the command line that runs ``command`` in ``sandbox``. It dies with the thread that starts it.
    With ``is_first`` this process must start it, as PID 1 of a new PID namespace; see ``sandboxed_process``.
    """
    spec = serialized(sandbox)
    starter = str(Path("/proc/self").readlink()) if is_first else ""  # the pid that /proc knows it by
    return [sys.executable, "-m", "millpond.linux.confinement.sandbox_exec", starter, spec, *command]


def serialized(sandbox: Sandbox) -> str:
    """Serialize a sandbox for ``parsed``, with a session of its own: no terminal to type into."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(sandbox, new_session=True)), default=str)


def parsed(spec: str) -> Sandbox:
    """Parse a sandbox that ``serialized`` has made."""
    fields: dict[str, Any] = json.loads(spec)
    if fields["binds"] is not None:
        fields["binds"] = tuple(
            Bind(Path(item.pop("source")), Path(item.pop("target")), **item) for item in fields["binds"]
        )
    fields["tmpfs"] = tuple(Path(path) for path in fields["tmpfs"])
    if fields["only"] is not None:
        fields["only"] = tuple(fields["only"])
    return Sandbox(**fields)


def main() -> int:
    """Run the command and exit with its code; SIGTERM is forwarded to it."""
    starter, spec, *command = sys.argv[1:]
    if starter:
        _replace(parsed(spec), command, int(starter))
    return run(parsed(spec), command)


def _replace(sandbox: Sandbox, command: list[str], starter: int) -> NoReturn:
    """Execute the command in the place of this process, which is PID 1 of its PID namespace."""
    syscalls.die_with_parent(signal.SIGKILL)
    if parent_pid() != starter:  # the parent died before prctl
        sys.exit(70)
    become(sandbox, _execution(command), keep=_descriptors(), is_first=True)


def parent_pid() -> int:
    """Return the pid of this process's parent, from a /proc of the parent's PID namespace: getppid is 0 for a
    PID 1.
    """
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1])


def run(sandbox: Sandbox, command: list[str]) -> int:
    """Run ``command`` in ``sandbox``; returns its exit code. This process must have one thread and no other
    purpose: it dies with its parent, its descriptors become the command's, and SIGTERM is forwarded.
    """
    syscalls.die_with_parent(signal.SIGKILL)
    descriptors = _descriptors()
    pid = spawn(sandbox, _execution(command), keep=descriptors)
    for descriptor in descriptors:
        os.close(descriptor)  # a socket must not stay open here when the command closes it
    signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(pid, number))
    return exit_code(os.waitpid(pid, 0)[1])


def kept_environment() -> dict[str, str]:
    """Select the variables of this process's environment that a sandboxed command gets."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}


def _execution(command: list[str]) -> Callable[[], int]:
    def execute() -> NoReturn:
        accept_signals()
        environment = kept_environment() | {"HOME": "/tmp"}  # noqa: S108 - its own
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell

    return execute


def _descriptors() -> list[int]:
    """List the open descriptors besides the standard ones."""
    found = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]  # noqa: PTH208
    return [descriptor for descriptor in found if _is_open(descriptor)]  # listdir had one of its own


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
