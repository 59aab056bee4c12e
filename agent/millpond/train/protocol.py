"""Pure: the messages between a coordinator and a worker, on the host or (relayed by its agent) a device."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.job import Job
from millpond.wire.message import Kind, Message, message


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a model's state: its name, shape and dtype (``float32``, ``int64``, ...), in order."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@message("prepare")
@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """Build the model and load the samples; answered by Ready.

    ``folders`` are the data folders (relative to the volume on a device, absolute on the host; none for a
    worker that only evaluates), ``code`` the files of the user's model by name.
    """

    job: Job
    worker: str
    folders: tuple[str, ...]
    code: dict[str, str]
    tls: bool = False


@message("ready", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The worker can train on ``samples`` samples. The model's state is ``size`` float32 values.

    ``token`` (from an agent only) entitles to the bulk connection for Train; encrypted if ``tls``.
    """

    samples: int
    tensors: tuple[Tensor, ...]
    size: int
    token: bytes = b""
    tls: bool = False


@message("initial.get")
@dataclass(frozen=True, slots=True)
class GetInitial(Message):
    """Ask for the seeded initial state; answered by Initial."""


@message("initial", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Initial(Message):
    """Payload: the flat float32 state."""


@message("train", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Train(Message):
    """Train one round from the payload, the flat float32 state; answered by Trained."""

    round: int


@message("trained", Kind.METRICS, payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Trained(Message):
    """Payload: the flat float32 state after the round. ``loss`` is the mean over the round's samples."""

    round: int
    samples: int
    loss: float
    seconds: float


@message("evaluate", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Evaluate(Message):
    """Score the payload, a flat float32 state, on the held-out samples of ``folder``; answered by Score."""

    folder: str


@message("score", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Score(Message):
    """Share of ``samples`` that were classified right, and the mean loss."""

    accuracy: float
    loss: float
    samples: int
