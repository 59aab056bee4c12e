# SPDX-License-Identifier: Apache-2.0
"""Edge (the command line's modules): the commands, as their help has them, and the exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from documents.markdown import code, page, prose, table
from millpond.host.cli import exits
from millpond.host.cli.app import app

PROGRAM = "millpond"
_VALUES = {"<int>": "N", "<int range>": "N", "<float>": "X", "<float range>": "X", "<str>": "TEXT"}


def commands() -> Iterator[tuple[str, Any]]:
    """Yield all commands by their names, such as "jobs compare", in the order of the help."""
    root: Any = get_command(app)
    yield from _inside(root, "")


def _inside(group: Any, above: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if command.hidden:
            continue
        yield f"{above}{name}", command
        if hasattr(command, "list_commands"):
            yield from _inside(command, f"{above}{name} ")


def commands_page() -> str:
    """Return the page of the commands."""
    found = list(commands())
    root: Any = get_command(app)
    index = table(("command", "what it does"), [(_link(name), _first(command)) for name, command in found])
    sections = [text for name, command in found for text in (f"## {PROGRAM} {name}", *_about(name, command))]
    intro = prose(root.help) + "\n\n" + prose(exits.FLEET_DIRECTORY)
    return page(
        "Commands", intro, "[Exit codes](exit-codes.md) are the same for all commands.", index, *sections
    )


def _link(name: str) -> str:
    return f"[{code(f'{PROGRAM} {name}')}](#{PROGRAM}-{name.replace(' ', '-')})"


def _first(command: Any) -> str:
    return prose(command.help).partition("\n\n")[0].partition(". ")[0].rstrip(".")


def _about(name: str, command: Any) -> Iterator[str]:
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    usage = " ".join([PROGRAM, name, *(["[OPTIONS]"] if options else []), *map(_shown, arguments)])
    yield f"```text\n{usage}\n```"
    yield prose(command.help)
    context = command.make_context(name, [], resilient_parsing=True)
    rows = [(code(_name(each, context)), _default(each), each.help or "") for each in (*arguments, *options)]
    yield table(("argument or option", "default", "meaning"), rows) if rows else ""


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _name(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper()).replace("|", " or ")
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag:
        return names
    value = str(parameter.display_type_rich(ctx=context))
    return f"{names} {_VALUES.get(value, value.strip('<>').replace('|', ' or '))}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if getattr(parameter, "show_default", True) is False or value is None or inspect.isfunction(value):
        return ""
    if parameter.param_type_name == "option" and parameter.is_flag and not parameter.secondary_opts:
        return ""
    if isinstance(value, bool):
        return code((parameter.opts if value else parameter.secondary_opts)[0])
    return code(str(getattr(value, "value", value)))


def exit_codes_page() -> str:
    """Return the page of the exit codes."""
    rows = [(code(number), about) for number, about in exits.CODES.items()]
    rest = prose(exits.OTHER_CODES)
    intro = f"Each `{PROGRAM}` command ends with one of these codes. An error is one line on standard error."
    return page("Exit codes", intro, table(("code", "meaning"), rows), rest)
