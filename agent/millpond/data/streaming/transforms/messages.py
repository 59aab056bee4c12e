# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a data service and the process that applies transforms for it."""

from __future__ import annotations

from typing import Final

from millpond.wire.messages import Message, message

GOES_ON: Final = "(the process goes on)"
"""The line of the log behind the error of a request: what follows belongs to others."""
PROCESSES: Final = 4
"""The most processes of one data service. Another one starts only while all others are at work."""


@message("transforms.apply")
class ApplyTransform(Message):
    """Change samples by the transform ``name``: ``head`` and the payload behind it encode these, see
    ``columns``; with ``decode`` they are a batch that is decoded first, see ``ReadSamples``. They are a part
    of a chunk, its ``first`` part, its ``last`` part, or both. Answered by Ok, the last part by
    TransformedSamples.
    """

    name: str
    head: bytes
    decode: str
    first: bool
    last: bool


@message("transforms.transformed")
class TransformedSamples(Message):
    """The chunk of changed samples: ``head``, and ``size`` bytes of payload behind this. Of a chunk that is
    larger than any that is sent there is the size alone.
    """

    head: bytes
    size: int
