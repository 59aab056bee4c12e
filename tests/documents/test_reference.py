# SPDX-License-Identifier: Apache-2.0
"""The reference: what is in it comes from the code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from documents import api, cli, configuration, files, outputs, protocols, types
from documents.markdown import prose, table
from millpond.base.keys import Key


@dataclass(frozen=True)
class _Table:
    """A table."""

    rate: Annotated[float, Key("of learning", above=0)]
    kind: Annotated[Literal["a", "b"], Key("which")] = "a"
    names: tuple[str, ...] = ()
    most: Annotated[int | None, Key("at most", 1, 9)] = None


def test_a_key_has_its_type_default_range_and_meaning() -> None:
    assert types.keys(_Table).splitlines()[2:] == [
        "| `rate` | number | required | above 0 | of learning |",
        '| `kind` | `"a"`, `"b"` | `"a"` |  | which |',
        "| `names` | list of text | `[]` |  |  |",
        "| `most` | integer | none | 1 to 9 | at most |",
    ]


@pytest.mark.parametrize("name", configuration.FILES)
def test_every_key_of_a_file_has_a_meaning(name: str) -> None:
    tables = [(name, configuration.FILES[name]), *types.inner_tables(configuration.FILES[name])]
    missing = [
        f"{heading} {field.name}"
        for heading, cls in tables
        for field, key in zip(types.fields(cls), types.keys_in_order(cls), strict=True)
        if not key.about and not _is_table(cls, field.name)
    ]
    assert not missing


def _is_table(cls: Any, name: str) -> bool:
    return any(heading.strip("[]").rpartition(".")[2] == name for heading, _ in types.inner_tables(cls))


def test_every_command_and_option_is_shown() -> None:
    text = cli.commands_page()
    for name, command in cli.commands():
        assert f"## millpond {name}\n" in text
        assert command.help, name
        for parameter in command.params:
            assert parameter.help or parameter.param_type_name == "argument", (name, parameter.name)
    assert "demo-inside" not in text


def test_a_document_that_no_page_shows_is_an_error() -> None:
    text = outputs.outputs_page()
    assert "Keys: `fleet`, `name`, `devices`." in text and "### Round" in text


def test_messages_files_and_names_are_shown() -> None:
    assert "### hello\n" in protocols.protocol_page("wire")
    assert "`0x81`" in protocols.protocol_page("tunnel-protocol")
    assert "`host.sock`" in files.files_page() and "`jobs/JOB`" in files.files_page()
    assert "Fleet.train(" in api.api_page()


def test_docstrings_become_markdown() -> None:
    text = "Do ``this``\n    and that.\n\n    - one\n      more\n    - two\n"
    assert prose(text) == "Do `this` and that.\n\n- one more\n- two"
    assert table(("a", "b", "c"), [("1", "", "x|y")]) == "| a | c |\n| --- | --- |\n| 1 | x\\|y |"
