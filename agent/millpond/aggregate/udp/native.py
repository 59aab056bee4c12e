# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library, a socket): the engine in C, on the arrays of ``Arrivals`` and of the values behind
it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate import kernels
from millpond.aggregate.udp.datagrams import DIGEST_SIZE, FROM_AGGREGATOR
from millpond.aggregate.udp.outgoing import Address, Outgoing, RoundSide, SealedDatagram, Train
from millpond.aggregate.udp.python_engine import UDP_GRO
from millpond.aggregate.udp.sums import BlockSums, ClientVectors
from millpond.base import shared_library

LIBRARY = Path(__file__).with_name("_engine.so")
_VERSION = 4
_BUFFER, _BATCH, _WORDS = 1 << 16, 16, 1 << 16
_AT_ONCE = 1 << 19
"""Bytes that are received before grants go out."""

_Array = NDArray[np.generic]


class _Receiver(ctypes.Structure):
    """Mirrors ``struct receiver`` of engine.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "bits", "beyond", "received", "seen", "counts")),
        *(
            (name, ctypes.c_void_p)
            for name in ("whole", "whole_count", "counters", "totals", "bounds", "mean")
        ),
        *((name, ctypes.c_void_p) for name in ("add", "buffers")),
        ("size", ctypes.c_uint64),
        ("shift", ctypes.c_double),
        *((name, ctypes.c_uint32) for name in ("values", "blocks", "stride", "rows", "first")),
        *((name, ctypes.c_uint32) for name in ("round", "direction", "closed", "more", "words")),
    )


class _Sender(ctypes.Structure):
    """Mirrors ``struct sender`` of engine.c."""

    _fields_ = (
        ("key", ctypes.c_uint64 * 8),
        *(
            (name, ctypes.c_void_p)
            for name in ("vector", "totals", "divisors", "digests", "digested", "divide")
        ),
        ("buffer", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("values", "blocks", "client", "round", "direction")),
        *((name, ctypes.c_uint32) for name in ("segmented", "address_length", "words")),
        ("address", ctypes.c_uint8 * 32),
    )


def is_usable() -> bool:
    """Return whether the C engine and the loops that it adds with are built and load."""
    return (
        sys.byteorder == "little"
        and isinstance(kernels.kernels(), kernels.NativeKernels)
        and shared_library.is_usable(LIBRARY, _VERSION)
    )


class NativeEngine:
    """Sends and receives the datagrams of one side of a round. Raises LocalError without the library."""

    def __init__(self, connection: socket.socket, side: RoundSide, values: BlockSums | ClientVectors) -> None:
        self._socket, self._side, self._values = connection, side, values
        self._library = _library()
        connection.setsockopt(socket.SOL_UDP, UDP_GRO, 1)
        self._buffers = np.empty(_BATCH * _BUFFER, np.uint8)
        self._out, self._words = np.empty(_BUFFER, np.uint8), np.empty(_WORDS, np.uint8)
        self._keys = self._prepared_keys()
        self._digests = np.empty(
            (side.plan.blocks if isinstance(values, BlockSums) else 0, DIGEST_SIZE), np.uint8
        )
        self._digested = np.zeros(len(self._digests), np.uint8)
        self._receiver, self._sender = self._new_receiver(), self._new_sender()

    def send(self, outgoing: Outgoing) -> int:
        """Send, and return how many datagrams went out before the buffer was full. Raises OSError."""
        if isinstance(outgoing, Train):
            return self._send_train(outgoing)
        return self._send_word(outgoing)

    def receive(self, now: float) -> bool:
        """Take some of what has come. Returns whether there may be more. Raises OSError."""
        receiver, side = self._receiver, self._side
        receiver.closed = side.arrivals.closed
        written = self._library.receive_datagrams(
            ctypes.byref(receiver), self._socket.fileno(), _AT_ONCE, self._words.ctypes.data, len(self._words)
        )
        _raise_for(written)
        content = self._words[:written].tobytes()
        while content:
            address, length = struct.unpack_from("=HH", content)
            end = 4 + address + length
            side.receive(content[4 + address : end], content[4 : 4 + address], now)
            content = content[end:]
        return bool(receiver.more)

    def _send_word(self, word: SealedDatagram) -> int:
        try:
            self._socket.sendto(word.content, socket.MSG_DONTWAIT, _unpacked(word.address))
        except (BlockingIOError, ConnectionRefusedError):
            return 0
        return 1

    def _send_train(self, train: Train) -> int:
        sender, arrivals = self._sender, self._side.arrivals
        address = packed(train.address)
        ctypes.memmove(sender.address, address, len(address))
        sender.address_length, sender.client = len(address), arrivals.first + train.row
        sender.key[:] = self._keys[train.row].tolist()
        indices = np.ascontiguousarray(train.indices)
        sent: int = self._library.send_datagrams(
            ctypes.byref(sender), self._socket.fileno(), indices.ctypes.data, len(indices), train.sequence
        )
        _raise_for(sent)
        return sent

    def _prepared_keys(self) -> NDArray[np.uint64]:
        keys = self._side.arrivals.keys
        states = np.empty((len(keys), 8), np.uint64)
        for state, key in zip(states, keys, strict=True):
            self._library.prepare_key(state.ctypes.data, key)
        return states

    def _new_receiver(self) -> _Receiver:
        arrivals, plan, values = self._side.arrivals, self._side.plan, self._values
        receiver = _Receiver()
        for name in (
            "bits",
            "beyond",
            "received",
            "seen",
            "counts",
            "whole",
            "whole_count",
            "counters",
        ):
            setattr(receiver, name, _address(getattr(arrivals, name)))
        receiver.keys, receiver.buffers = _address(self._keys), _address(self._buffers)
        if isinstance(values, BlockSums):
            receiver.totals, receiver.bounds = _address(values.totals), _address(values.bounds)
            receiver.shift = values.shift
            receiver.add = ctypes.cast(_loops().add_rounded, ctypes.c_void_p)
        else:
            receiver.mean = _address(values.mean)
        receiver.size, receiver.values, receiver.blocks = plan.size, plan.values, plan.blocks
        receiver.stride, receiver.rows = arrivals.bits.shape[1], len(arrivals.keys)
        receiver.words = plan.words
        receiver.first, receiver.round, receiver.direction = arrivals.first, plan.round, arrivals.direction
        return receiver

    def _new_sender(self) -> _Sender:
        arrivals, plan, values = self._side.arrivals, self._side.plan, self._values
        sender = _Sender(size=plan.size, values=plan.values, blocks=plan.blocks, round=plan.round)
        if isinstance(values, BlockSums):
            sender.totals, sender.divisors = _address(values.totals), _address(values.divisors)
            sender.digests, sender.digested = _address(self._digests), _address(self._digested)
            sender.divide = ctypes.cast(_loops().divide, ctypes.c_void_p)
        else:
            sender.vector = _address(values.values)
        sender.words = plan.words
        sender.direction, sender.segmented = arrivals.direction ^ FROM_AGGREGATOR, 1
        sender.buffer = _address(self._out)
        return sender


def packed(address: Address) -> bytes:
    """Return the socket address as the C engine writes it: ``struct sockaddr_in``."""
    if isinstance(address, bytes):
        return address
    assert isinstance(address, tuple)
    host, port = address
    return struct.pack("=H2s4s8x", socket.AF_INET, port.to_bytes(2, "big"), socket.inet_aton(host))


def _unpacked(address: Address) -> tuple[str, int]:
    if not isinstance(address, bytes):
        assert isinstance(address, tuple)
        return address
    _, port, host = struct.unpack("=H2s4s8x", address)
    return socket.inet_ntoa(host), int.from_bytes(port, "big")


def _library() -> ctypes.CDLL:
    library = shared_library.load(LIBRARY, _VERSION)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    library.prepare_key.argtypes, library.prepare_key.restype = (pointer, ctypes.c_char_p), None
    library.receive_datagrams.argtypes = (pointer, ctypes.c_int, number, pointer, size)
    library.send_datagrams.argtypes = (pointer, ctypes.c_int, pointer, number, number)
    library.receive_datagrams.restype = library.send_datagrams.restype = ctypes.c_long
    return library


def _loops() -> ctypes.CDLL:
    return ctypes.CDLL(str(kernels.LIBRARY))


def _address(array: _Array) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _raise_for(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
