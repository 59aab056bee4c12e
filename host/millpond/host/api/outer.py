# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages by which a program outside orders the outer rounds of a resident job.

An outer round is some rounds of one fleet, from a state that the program sends. Values are float32, laid out
as ``tensors``; see ``train.state.layout``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millpond.train.state.layout import Tensor
from millpond.wire.messages import Message, message

OrderKind = Literal["train", "score", "end"]


@message("api.outer.model.get")
@dataclass(frozen=True, slots=True)
class GetOuterModel(Message):
    """Ask for the OuterModel of a resident job, which comes once its workers are being prepared."""

    job: int


@message("api.outer.model")
@dataclass(frozen=True, slots=True)
class OuterModel(Message):
    """The layout of the part of a model that devices exchange; an outer round has ``every`` rounds. Payload:
    the present state. Layers that stay on the devices are not in it.
    """

    tensors: tuple[Tensor, ...]
    every: int


@message("api.outer.order")
@dataclass(frozen=True, slots=True)
class OuterOrder(Message):
    """Payload: a state. ``train`` asks for an outer round from it, ``score`` for its scores, and ``end`` ends
    the job with it as its model. Answered by OuterAnswer. An order that is sent again with its ``key`` gets
    the answer of the first, and is not carried out twice; one of another key replaces one that is under way.
    """

    job: int
    kind: OrderKind
    key: str


@message("api.outer.answer")
@dataclass(frozen=True, slots=True)
class OuterAnswer(Message):
    """The answer to an order, with ``scores`` by place and name. After ``train`` the payload is what the
    outer round has changed in the parameters, and behind that the buffers as they are; ``samples`` were
    trained on in ``rounds`` rounds of so many ``seconds``; ``sums`` has metrics times these samples.
    """

    samples: int = 0
    rounds: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
