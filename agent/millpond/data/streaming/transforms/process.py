# SPDX-License-Identifier: Apache-2.0
"""Entry: a process that applies the functions of a user's file to the samples of a data service. It is
confined as other code of users: it has neither network nor data but the samples that the service sends.
"""

from __future__ import annotations

import faulthandler
import io
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.base.deadline import NEVER
from millpond.base.errors import ConnectionLost, LocalError
from millpond.data.streaming.protocol.messages import MOST_HEAD
from millpond.data.streaming.protocol.service import LARGEST_CHUNK
from millpond.data.streaming.served_set import ReadSamples
from millpond.data.streaming.transforms.functions import Function, changed, function_named, functions_of
from millpond.data.streaming.transforms.messages import GOES_ON, ApplyTransform, TransformedSamples
from millpond.train.data.columns import pack, unpack
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Message, Ok

_LARGEST_PART = 1 << 34  # the memory of this process is bounded otherwise


def main(arguments: Sequence[str]) -> int:
    """Serve one data service until its end; return the exit code. The arguments are the descriptor of the
    connection and the path of the file.
    """
    number, file = int(arguments[0]), Path(arguments[1])
    _prepare(file.parent)
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    with Channel(sock, "the data service", limits=Limits(MOST_HEAD, _LARGEST_PART)) as channel:
        try:
            serve(channel, Chunks(functions_of(file)).answer)
        except LocalError as error:
            traceback.print_exception(error)
            failure = Failure("data", str(error))
            serve(channel, lambda _request, _payload: (failure, b""))
    return 0


def _prepare(folder: Path) -> None:
    """Make of a fork of workers' zygote what a new process is: with random draws of its own."""
    faulthandler.enable()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what the functions printed outlives a kill
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)  # as in the workers of torch's DataLoader
    torch.seed()
    np.random.seed()
    random.seed()


_Answer = tuple[Message, bytes | bytearray]


def serve(channel: Channel, answer: Callable[[Message, memoryview], _Answer]) -> None:
    """Send what ``answer`` makes of each request and its payload, until the channel ends."""
    while True:
        try:
            head = channel.receive(NEVER)
            payload = channel.receive_payload(_LARGEST_PART, NEVER)
            reply, data = answer(head.message, memoryview(payload))
            channel.send(reply, NEVER, data)
        except ConnectionLost:
            return


def _samples_in(request: ApplyTransform, payload: memoryview) -> Iterable[Any]:
    received = unpack(request.head, payload)
    if not request.decode:
        return received
    (batch,) = received.batches(0, len(received))
    return ReadSamples(batch, len(received), request.decode).decoded()


class Chunks:
    """The chunk of samples that one of ``functions`` changes, part by part."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions, self._held = functions, list[Any]()

    def answer(self, request: Message, payload: memoryview) -> _Answer:
        """Return the answer to a request."""
        assert isinstance(request, ApplyTransform)
        try:
            return self._changed(request, payload)
        except LocalError as error:
            traceback.print_exception(error)
            print(GOES_ON, file=sys.stderr)
            return Failure("data", str(error)), b""

    def _changed(self, request: ApplyTransform, payload: memoryview) -> _Answer:
        function = function_named(self._functions, request.name)
        self._held = [] if request.first else self._held
        self._held += [changed(sample, function) for sample in _samples_in(request, payload)]
        if not request.last:
            return Ok(), b""
        packed, self._held = pack(self._held), []
        if packed.size > LARGEST_CHUNK:
            return TransformedSamples(b"", packed.size), b""
        return TransformedSamples(packed.head, packed.size), bytearray().join(packed.pieces)
