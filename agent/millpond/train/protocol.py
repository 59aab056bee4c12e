# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between a coordinator and a worker, on the host or (relayed by its agent) a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.train.job.spec import Job
from millpond.train.state.layout import Tensor
from millpond.wire.messages import Kind, Message, message


@message("prepare")
@dataclass(frozen=True, slots=True)
class PrepareWorker(Message):
    """Build the model and load the samples; answered by Ready. A worker of the ``role`` "rounds" trains
    rounds of a federated job, one of "steps" computes gradients for a synchronous job, and the
    "parameter_server" holds that job's model and optimizer.

    ``folders`` are the data folders (relative to the volume on a device, absolute on the host; none for a
    worker that only evaluates), ``code`` the files of the user's model by name. ``states`` is the number of
    states that the shared memory of a synchronous job has.
    """

    job: Job
    worker: str
    folders: tuple[str, ...]
    code: dict[str, str]
    tls: bool = False
    role: Literal["rounds", "steps", "parameter_server"] = "rounds"
    states: int = 1


@message("ready", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The worker can train on ``samples`` samples. The model's state is ``size`` float32 values.

    ``token`` (from an agent only) entitles to the bulk connection for Train; encrypted if ``tls``. ``parts``
    are the numbers of samples by folder, ``shape`` is the shape of one sample.
    """

    samples: int
    tensors: tuple[Tensor, ...]
    size: int
    parts: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
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
    """The share of ``samples`` that were classified right, 0 to 1, and the mean loss."""

    accuracy: float
    loss: float
    samples: int


# The messages below belong to synchronous jobs. Between a worker process and its parent (the agent or the
# host daemon), the vectors that are called payload lie in shared memory: states, float32 [states, size],
# written on the host by the parameter server and on a device by the agent; sums, float32 [size], in memory of
# each worker's own. Between an agent and the host these vectors follow the messages.


@message("compute", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Compute(Message):
    """Compute gradients at the payload, the flat float32 state; answered by Computed.

    ``samples`` has the indices to take, by folder of Prepare. ``seed`` is for the model's random draws.
    ``state`` is the number of the state in shared memory.
    """

    step: int
    seed: int
    samples: tuple[tuple[int, ...], ...]
    state: int = 0


@message("computed", Kind.METRICS, payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Computed(Message):
    """Payload: flat float32 in the state's layout: of each parameter the sum of its gradients over
    ``samples`` samples, of each buffer (running statistics) its change times ``samples``.

    ``loss`` is a sum, too. ``busy`` is the part of the processor that other work took meanwhile, 0 to 1, NaN
    if it is not known, ``peak`` the worker's high-water mark of memory, in bytes.
    """

    step: int
    samples: int
    loss: float
    seconds: float
    busy: float
    peak: int


@message("apply", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Apply(Message):
    """Ask the parameter server for one step of the optimizer, at ``factor`` times its learning rate, with the
    payload, a mean in Computed's layout. The new state is the one with number ``state``; if that is another
    than the last, the last stays as it is. Answered by StepApplied.
    """

    factor: float
    state: int = 0


@message("applied", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class StepApplied(Message):
    """Payload: the flat float32 state after the step, which took the optimizer ``seconds``."""

    seconds: float


@message("momentum.get")
@dataclass(frozen=True, slots=True)
class GetMomentum(Message):
    """Ask the parameter server for the tensors of its optimizer; answered by Momentum."""


@message("momentum", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Momentum(Message):
    """Payload: the optimizer's tensors, flat float32 [size] in the order of ``tensors``."""

    tensors: tuple[Tensor, ...]
    size: int


@message("restore", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Have the parameter server take the state in shared memory, and as payload that follows the message an
    optimizer's tensors as Momentum had them, none before the first step. Answered by Ok.
    """

    tensors: tuple[Tensor, ...]
