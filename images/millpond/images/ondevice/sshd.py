# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.sshd user|admin --identity DIR --public DIR`` runs sshd.

The user's is confined: the volume's public part and programs are all there is. The admin's stands in the
device's own root directory. Both run in the foreground: systemd starts them on a real board, and the same
command lines are what the init of an emulated board starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from millpond.images.ondevice import sshd_config
from millpond.images.ondevice.sshd_config import ADMIN, HOST_KEY, INSIDE, RENAMED_ROOT, SERVERS, USER
from millpond.linux import syscalls
from millpond.linux.confinement import sandbox_exec
from millpond.linux.confinement.sandbox import enter_user_namespace
from millpond.linux.confinement.userns import has_many_uids


def command(name: str, identity: Path, public: Path) -> list[str]:
    """Return the command line that runs server ``name``, "user" or "admin"."""
    places = ["--identity", str(identity), "--public", str(public)]
    return [sys.executable, "-m", "millpond.images.ondevice.sshd", name, *places]


def _run_user(identity: Path, public: Path) -> int:
    lines = sshd_config.settings(USER, INSIDE / HOST_KEY, INSIDE / USER.authorized)
    authorized = (identity / USER.authorized).read_text()
    many_uids = os.geteuid() == 0 and has_many_uids()
    sandbox = sshd_config.sandbox(identity, public, authorized, many_uids=many_uids)
    return sandbox_exec.run(sandbox, sshd_config.command(lines))


def _run_admin(identity: Path) -> int:
    lines = sshd_config.settings(ADMIN, identity / HOST_KEY, identity / ADMIN.authorized)
    if has_many_uids():
        sshd_config.EMPTY.mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        _rename_root()
    argv = sshd_config.command(lines)
    os.execv(argv[0], argv)  # noqa: S606 - no shell


def _rename_root() -> None:
    """Map uid 0 to another number, since sshd wants another uid than its own. The files stay the same."""
    enter_user_namespace(RENAMED_ROOT, syscalls.CLONE_NEWNS)
    syscalls.mount("none", Path("/"), "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    for name, text in sshd_config.accounts(RENAMED_ROOT).items():
        if Path(name).exists():
            with tempfile.NamedTemporaryFile("w") as file:
                file.write(text)
                file.flush()
                Path(file.name).chmod(0o644)
                syscalls.bind(Path(file.name), Path(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. Exits as sshd does; 2 for wrong arguments or without keys."""
    parser = argparse.ArgumentParser(
        prog="millpond.images.ondevice.sshd", description="An SSH server of a device."
    )
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument(
        "--identity", type=Path, required=True, metavar="DIR", help="Where the device's keys are."
    )
    parser.add_argument(
        "--public", type=Path, default=Path("/volume/public"), metavar="DIR", help="What users see."
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.server == ADMIN.name:
            return _run_admin(arguments.identity)
        return _run_user(arguments.identity, arguments.public)
    except OSError as error:
        print(f"millpond: the {arguments.server}'s SSH server cannot start: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
