# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a data service and the process that applies transforms for it."""

from __future__ import annotations

from millpond.wire.messages import Message, message


@message("transforms.apply")
class ApplyTransform(Message):
    """Change samples by the transform ``name``: ``head`` and the payload behind it encode these, see
    ``columns``. They are a part of a chunk, its ``first`` part, its ``last`` part, or both. Answered by Ok,
    the last part by TransformedSamples.
    """

    name: str
    head: bytes
    first: bool
    last: bool


@message("transforms.transformed")
class TransformedSamples(Message):
    """The chunk of changed samples: ``head``, and ``size`` bytes of payload behind this. Of a chunk that is
    larger than any that is sent there is the size alone.
    """

    head: bytes
    size: int
