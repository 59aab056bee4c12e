# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): the messages on the wire, as their declarations have them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from documents.markdown import code, page, prose, table
from documents.types import fields, kind
from millpond.wire.messages import Kind, Message

PAGES: Final = {
    "wire": (
        "Wire protocol",
        "millpond.wire.framing",
        "millpond.wire.messages",
        "millpond.wire.control_messages",
        "millpond.train.protocol",
        "millpond.aggregate.messages",
        "millpond.train.distributed.launch_messages",
        "millpond.train.distributed.group_messages",
        "millpond.train.distributed.data_service_messages",
        "millpond.data.streaming.protocol.messages",
    ),
    "volume-protocol": (
        "Volume protocol",
        "millpond.fs.proto.file_ops",
        "millpond.fs.proto.delegations",
        "millpond.fs.proto.file_locks",
        "millpond.fs.proto.extended",
        "millpond.fs.proto.bulk_copy",
        "millpond.fs.proto.bulk_read",
        "millpond.fs.proto.status",
    ),
    "daemon-protocol": (
        "Protocol of the daemon's socket",
        "millpond.host.api.daemon",
        "millpond.host.api.audit",
        "millpond.host.api.launch",
        "millpond.host.api.connection",
        "millpond.host.api.outer",
        "millpond.host.api.topology",
    ),
    "tunnel-protocol": (
        "Tunnel protocol",
        "millpond.tunnel.ring.nvme_defs",
        "millpond.tunnel.ring.layout",
        "millpond.tunnel.ring.registers",
        "millpond.tunnel.ring.link_params",
        "millpond.tunnel.ring.queue_pair",
        "millpond.tunnel.ring.handshake",
    ),
}
"""The title of each page, and the modules that it shows."""


def protocol_page(name: str) -> str:
    """Return a page of messages, a section for each module."""
    title, *names = PAGES[name]
    modules = [import_module(each) for each in names]
    sections = [text for module in modules for text in _module(module)]
    shown = [_kinds()] if name == "wire" else []
    return page(title, *shown, *sections)


def _kinds() -> str:
    kinds = ", ".join(code(kind.value) for kind in Kind)
    return (
        f"Each byte that leaves a device is counted by its kind: {kinds}. A message names its kind and, where"
        " it has one, that of its payload."
    )


def _module(module: ModuleType) -> Iterator[str]:
    """Yield the sections of a module: its docstring, its messages, then what these are made of."""
    yield f"## {module.__name__.removeprefix('millpond.')}"
    yield _without_kind(prose(module.__doc__))
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    messages = [each for each in own if _is_message(each)]
    parts: list[Any] = [each for each in own if dataclasses.is_dataclass(each) and not _is_message(each)]
    numbers: list[Any] = [each for each in own if isinstance(each, type) and issubclass(each, int)]
    for cls in messages:
        yield f"### {cls.NAME}"
        yield f"{prose(cls.__doc__)} {_about(cls)}".strip()
        yield _fields(cls)
    for cls in parts:
        yield f"### {cls.__name__}"
        yield prose(cls.__doc__)
        yield _fields(cls)
    for cls in numbers:
        yield f"### {cls.__name__}"
        yield prose(cls.__doc__)
        yield table(("name", "value"), [(code(each.name), code(f"{each.value:#x}")) for each in cls])


def _is_message(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Message) and "NAME" in vars(found)


def _about(cls: Any) -> str:
    payload = "" if cls.PAYLOAD_KIND == cls.KIND else f"; payload: {code(cls.PAYLOAD_KIND.value)}"
    return f"Class `{cls.__name__}`; kind: {code(cls.KIND.value)}{payload}."


def _fields(cls: Any) -> str:
    """Return the fields in one paragraph: tables of two hundred messages are hard to read."""
    hints = typing.get_type_hints(cls)
    found = [f"{code(field.name)} ({kind(hints[field.name], 'none')})" for field in fields(cls)]
    return f"Fields: {', '.join(found)}." if found else ""


def _without_kind(text: str) -> str:
    """Return a module's docstring without the word that says what kind of module it is."""
    _, colon, rest = text.partition(": ")
    return rest[:1].upper() + rest[1:] if colon else text
