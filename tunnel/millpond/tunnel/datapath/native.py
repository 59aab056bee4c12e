# SPDX-License-Identifier: Apache-2.0
"""Edge: choose the engine of a link and run it: the loops in Python, or in C where a compiler built them."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from millpond.base import shared_library
from millpond.base.errors import LocalError
from millpond.tunnel.datapath import python_loops
from millpond.tunnel.datapath.context import QueueContext
from millpond.tunnel.errors import InterfaceGone, LinkViolation
from millpond.tunnel.ring.barrier import WEAKLY_ORDERED

log = logging.getLogger(__name__)

ENGINES = ("auto", "python", "c")
LIBRARY = Path(__file__).with_name("_datapath.so")

_VERSION = 4
_VIOLATION, _INTERFACE_GONE = 1, 2
_LOOPS = {"host": ("submit_packets", "deliver_receives"), "device": ("answer_receives", "execute_sends")}

PumpLoop = Callable[[QueueContext], NoReturn]


class _NativeContext(ctypes.Structure):
    """Mirrors ``struct context`` of datapath.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("submissions", "completions", "tail", "head", "own", "peer")),
        ("buffers", ctypes.c_void_p),
        ("buffers_address", ctypes.c_uint64),
        ("counters", ctypes.c_void_p),
        ("notifier_register", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint32)
            for name in ("notifier_value", "buffer_size", "entries", "queue", "weakly_ordered")
        ),
        *((name, ctypes.c_int32) for name in ("wake", "notifier", "interface")),
        *(
            (name, ctypes.c_uint32)
            for name in ("vnet_header", "offloads", "addresses_at", "addresses_length", "version")
        ),
        ("addresses", ctypes.c_uint8 * 32),
        ("mask", ctypes.c_uint8 * 32),
        ("reason", ctypes.c_char * 256),
    )


def resolve(engine: str) -> str:
    """Resolve ``auto``: c where the library is built and loads, else python."""
    if engine != "auto":
        return engine
    return "c" if shared_library.is_usable(LIBRARY, _VERSION) else "python"


def loops(engine: str, role: str) -> tuple[PumpLoop, PumpLoop]:
    """Return the loops from the interface and to it, for ``host`` or ``device``. Raises LocalError."""
    if resolve(engine) == "python":
        return python_loops.LOOPS[role]
    library = shared_library.load(LIBRARY, _VERSION)
    outward, inward = (functools.partial(_run, getattr(library, name)) for name in _LOOPS[role])
    return outward, inward


def _run(loop: Callable[..., int], context: QueueContext) -> NoReturn:
    arguments = _arguments(context)
    outcome = loop(ctypes.byref(arguments))
    reason = arguments.reason.decode(errors="replace")
    if outcome == _VIOLATION:
        raise LinkViolation(reason)
    if outcome == _INTERFACE_GONE:
        raise InterfaceGone(f"interface {context.datapath.interface.name} was deleted")
    raise LocalError(f"the C engine: {reason}")


def _arguments(context: QueueContext) -> _NativeContext:
    memory, datapath, notifier = context.memory, context.datapath, context.notifier
    own, peer = memory.host_sleep_word, memory.controller_sleep_word
    if not context.host:
        own, peer = peer, own
    arguments = _NativeContext(
        *map(_address, (memory.submissions, memory.completions, memory.tail_doorbell, memory.head_doorbell)),
        *map(_address, (own, peer, memory.buffers[0])),
        memory.span.start,
        _address(context.stats.words),
        None if notifier.register is None else _address(notifier.register),
        *(notifier.value, memory.span.size, memory.entries, memory.number),
        memory.weakly_ordered
        and not WEAKLY_ORDERED,  # on a weakly ordered processor acquire and release suffice
        *(context.wake, notifier.descriptor, datapath.interface.descriptor),
    )
    expected = datapath.filter.expected
    arguments.vnet_header, arguments.version = datapath.filter.vnet_header, datapath.filter.version << 4
    arguments.offloads = datapath.filter.offloads
    arguments.addresses_at, arguments.addresses_length = datapath.filter.start, len(expected)
    arguments.addresses[: len(expected)], arguments.mask[: len(expected)] = expected, datapath.filter.mask
    return arguments


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
