# SPDX-License-Identifier: Apache-2.0
"""Entry: the command line, ``millpond``, of which only the module of the command that was called is loaded.

Each module of this room, ``ssh``, ``views`` and ``volumes`` that makes an ``app`` adds its commands. One
whose name is that of its command needs no line here.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from millpond.base.errors import MillpondError
from millpond.base.version import VERSION
from millpond.host.cli.exits import (
    EXIT_CODES,
    FLEET_DIRECTORY,
    INTERRUPTED,
    LOCAL,
    SSH,
    Interrupted,
    exit_code,
    fail,
    loading,
    run,
)
from millpond.host.cli.options import new_app
from millpond.host.remote.errors import SshFailed

_MODULES: Final = {
    **dict.fromkeys(("init", "add", "remove", "revoke", "renew"), "fleet"),
    **dict.fromkeys(("host", "emulate", "demo", "demo-inside"), "machine"),
    **dict.fromkeys(("devices", "topology", "tunnel"), "devices"),
    **dict.fromkeys(("doctor", "audit")),
    **{name: f"views.{name}" for name in ("ask", "top", "dashboard", "metrics")},
    **{name: f"ssh.{name}" for name in ("run", "shell", "inventory")},
    **dict.fromkeys(("ssh-config", "ssh-proxy"), "ssh.ssh_config"),
    "dial-stdio": "ssh.dial",
    **dict.fromkeys(("mount", "umount"), "volumes.mount"),
    **{name: f"volumes.{name}" for name in ("volume", "cp")},
    **dict.fromkeys(("flash", "update")),
    "new": "projects.new",
    **dict.fromkeys(("sign", "roster"), "sign"),
    "data": "data",
    **dict.fromkeys(("train", "resume"), "jobs"),
    "launch": "launch",
    "federate": "federation.command",
    **dict.fromkeys(("profile", "jobs", "stop"), "jobs"),
    "logs": "ssh.logs",
    "simulate": "simulation.command",
}
"""The module of each command, its own name where there is none; in the order of the help."""
_LISTED: Final = {name: module or name for name, module in _MODULES.items()}
_HERE, _ROOMS = Path(__file__).parent, (".", "ssh", "views", "volumes")
_MAKES_COMMANDS = "\napp = new_app("


def _modules() -> dict[str, str]:
    """Return the module of each command, also of those that have no line here. Reads the rooms' files."""
    found = dict(_LISTED)
    known = set(found.values())
    for file in sorted(each for room in _ROOMS for each in _HERE.glob(f"{room}/*.py")):
        module = ".".join(file.relative_to(_HERE).with_suffix("").parts)
        if module not in {*known, "app"} and _MAKES_COMMANDS in file.read_text():
            found[file.stem] = module
    return found


class LazyGroup(TyperGroup):
    """Loads a command when it is called, all of them for the help."""

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_modules())

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        """Return a command; None for a name that is none, once those are loaded that it may be a slip of."""
        modules = _LISTED if cmd_name in _LISTED else _modules()
        for name in (cmd_name,) if cmd_name in modules else modules:
            if name not in self.commands:
                with loading():
                    module = import_module(f"{__package__}.{modules[name]}")
                self.commands.update(get_group(module.app).commands)
        return self.commands.get(cmd_name)


app = new_app(
    cls=LazyGroup,
    add_completion=True,
    epilog=f"{FLEET_DIRECTORY}\n\n{EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"millpond {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """millpond trains on computational storage devices; private data never leaves its device."""


def _exit_code(error: MillpondError) -> int:
    if isinstance(error, SshFailed):
        return SSH
    return INTERRUPTED if isinstance(error, Interrupted) else exit_code(error)


def _run() -> object:
    try:
        return app(prog_name="millpond", standalone_mode=False)
    except typer.TyperException as error:
        if text := error.format_message():  # without arguments typer has printed the help
            context = getattr(error, "ctx", None)  # of a wrong usage: the command that was used
            command = context.command_path if context else "millpond"
            fail(f"{text.rstrip('.')} (see '{command} --help')", LOCAL)
        raise SystemExit(LOCAL) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes a code of its own of it
            raise end.__context__ from None
        raise


def main() -> None:
    """Run a command; every error is one line on standard error."""
    run(_run, _exit_code)
