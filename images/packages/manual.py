# SPDX-License-Identifier: Apache-2.0
"""Entry: ``manual.py DIR`` writes man pages and completion of the commands below DIR.

Prints the paths of what it has written. Both are generated from the command line itself: typer makes the
completion, and a page says what ``--help`` says. Run it with a Python that has millpond. (click-man, which
makes pages of click's commands, does not know those of typer, which are no longer click's.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_group

from millpond.base.version import VERSION
from millpond.host.cli.app import app

OTHERS = {
    "millpond-agent.1": (
        "millpond.agent.daemon",
        "the daemon on a millpond device",
        "It reads agent.toml, which the host's \\fBmillpond init\\fR and \\fBmillpond add\\fR write.",
    ),
    "mount.millpond.8": (
        "millpond.host.cli.volumes.mount_helper",
        "mounts the public part of a device's volume",
        "mount(8) and systemd run it for the type millpond: \\fBmount \\-t millpond csd0 DIR\\fR, or "
        "a line of /etc/fstab. For the mounts of one user there is millpond\\-mount(1).",
    ),
}
"""The pages of programs that are not typer's: their modules, summaries and descriptions."""
COMPLETIONS = {
    "bash": "bash-completion/completions/millpond",
    "zsh": "zsh/site-functions/_millpond",
    "fish": "fish/vendor_completions.d/millpond.fish",
}
ZSH_FIRST_USE = '\n[ "$funcstack[1]" != _millpond ] || _millpond_completion "$@"\n'
"""zsh has read the file as a function that it now calls; without this, the first Tab completes nothing."""


def escaped(text: str) -> str:
    """Return text as roff shows it unchanged, whatever its lines begin with."""
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in plain.splitlines())


def page(name: str, summary: str, sections: dict[str, str], section: str = "1") -> str:
    """Return a man page; the texts of the sections are roff."""
    head = f'.TH "{name.upper()}" "{section}" "" "millpond {VERSION}" "millpond"\n'
    body = f".SH NAME\n{escaped(name)} \\- {escaped(summary)}\n"
    return head + body + "".join(f".SH {title}\n{text}\n" for title, text in sections.items() if text)


def paragraphs(text: str) -> str:
    """Return a help text as roff: an empty line begins a paragraph, and all other line ends are spaces."""
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n.PP\n".join(escaped(part) for part in parts if part)


def listed(records: list[tuple[str, str]]) -> str:
    """Return names and what they mean as a list."""
    return "\n".join(f".TP\n\\fB{escaped(name)}\\fR\n{paragraphs(text) or '.br'}" for name, text in records)


def pages(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the page of a command and of those below it."""
    name = context.command_path.replace(" ", "-")
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    records = [(one, one.get_help_record(context)) for one in command.get_params(context)]
    shown = [(one.param_type_name, record) for one, record in records if record]
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    below = [(sub, command.get_command(context, sub)) for sub in names]
    commands = [(sub, one) for sub, one in below if not one.hidden]
    summary = command.get_short_help_str(200).rstrip(".")
    sections = {
        "SYNOPSIS": f"\\fB{escaped(usage)}\\fR",
        "DESCRIPTION": paragraphs(command.help or ""),
        "ARGUMENTS": listed([record for kind, record in shown if kind == "argument"]),
        "OPTIONS": listed([record for kind, record in shown if kind == "option"]),
        "COMMANDS": listed([(f"{name}-{sub}(1)", one.get_short_help_str(200)) for sub, one in commands]),
        "NOTES": paragraphs(command.epilog or ""),
    }
    yield name, page(name, summary, sections)
    for sub, one in commands:
        yield from pages(one, type(context)(one, info_name=sub, parent=context))


def other_page(file: str) -> str:
    """Return the page of a program whose help is preformatted."""
    module, summary, description = OTHERS[file]
    name, _, section = file.rpartition(".")
    options = f".nf\n{escaped(said('-m', module, '--help'))}\n.fi"
    return page(name, summary, {"DESCRIPTION": description, "OPTIONS": options}, section)


def said(*arguments: str, **environment: str) -> str:
    """Return what a Python program prints."""
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, check=True, stdout=-1, text=True, env=os.environ | environment).stdout


def files() -> Iterator[tuple[str, str]]:
    """Yield the path below the folder and the text of each file."""
    group: Any = get_group(app)
    for name, text in pages(group, group.make_context("millpond", [], resilient_parsing=True)):
        yield f"man/man1/{name}.1", text
    for file in OTHERS:
        yield f"man/man{file[-1]}/{file}", other_page(file)
    for shell, place in COMPLETIONS.items():
        script = said("-m", "millpond.host.main", _MILLPOND_COMPLETE=f"source_{shell}")
        yield place, script + (ZSH_FIRST_USE if shell == "zsh" else "")


def main() -> None:
    """Write all files, and print where."""
    for name, text in files():
        path = Path(sys.argv[1]).absolute() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
        print(path)


if __name__ == "__main__":
    main()
