# SPDX-License-Identifier: Apache-2.0
"""Support of attacks: a real worker process behind the agent's JobWorker, and a host that speaks the
product's messages. All that leaves is kept, and so is the agent's log, which the host can ask for.
"""

from __future__ import annotations

import socket
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.gate import Gate, LedgerCounters, ledger
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.job_worker import JobWorker
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.rules import StateAnswers, check_job
from millpond.agent.policy.settings import Policy
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, RemoteError
from millpond.linux.zygote.client import Zygote
from millpond.privacy.spec import PrivacySpec
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.job.log_name import log_name
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import PART_VALUES, Fetch, Folder, Part, PrepareWorker, Ready, Update, Work
from millpond.train.state import layout
from millpond.train.state.layout import Tensor
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Kind

from ..audited import unlogged
from ..identities import issued
from ..job_files import written

DIGITS = Folder("private/digits", "csd0")
SIDE, CLASSES, SAMPLES = 8, 8, 50
TENSORS = (
    Tensor("linear.weight", (CLASSES, SIDE * SIDE), "float32"),
    Tensor("linear.bias", (CLASSES,), "float32"),
)
SIZE = layout.size(TENSORS)

_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8)
        build(self)

    def forward(self, images):
        if request():  # not while the worker tries the model, before it answers that it is ready
            forward(self, images)
        return self.linear(images.flatten(1))


def build(model):
    pass


def forward(model, images):
    pass


def private(name):
    import glob
    (found,) = glob.glob(f"/*/private/{name}")
    with open(found, "rb") as file:
        return file.read()


def request():
    import sys
    frame = sys._getframe()
    while frame and not hasattr(frame.f_locals.get("request"), "exchange"):
        frame = frame.f_back
    return frame and frame.f_locals["request"]


def say(data):
    import os
    os.write(3, data)


def say_and_wait(data):
    import time
    say(data)
    time.sleep(600)
"""


def model(text: str = "") -> dict[str, str]:
    """A linear model, and what a hostile one does in its ``build`` or ``forward``."""
    return {"net.py": _MODEL + textwrap.dedent(text)}


@dataclass
class Leaving:
    """All bytes that leave by a connection. It is the gate's outlet, and sees what the gate sees."""

    gate: Gate
    data: bytearray = field(default_factory=bytearray)
    searches: bool = False

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        self.gate.outlet().passing(kind, data, payload)
        self.data += data


class Volume:
    """A device's volume, in ``base``: pictures in private/digits, and another private folder."""

    def __init__(self, base: Path, samples: int = SAMPLES, seed: int = 1) -> None:
        self.base, self.path = base, base / "volume"
        rng = np.random.default_rng(seed)
        images = rng.integers(1, 100, (samples, SIDE, SIDE)).astype(np.uint8)
        self.images = images.reshape(samples, -1).astype(np.float32) / np.float32(255)
        self.labels = rng.integers(0, CLASSES, samples)
        self.save("private/digits", images, self.labels)
        self.save("private/other", images, self.labels)
        (self.path / "private/other/secret.txt").write_text("the other folder's secret")
        (self.path / "public").mkdir()
        (base / "state" / "jobs").mkdir(parents=True)
        (base / "state" / "key").write_text("the device's key")

    def save(self, folder: str, images: NDArray[np.generic], labels: NDArray[np.generic]) -> None:
        (self.path / folder).mkdir(parents=True)
        np.save(self.path / folder / "images.npy", images)
        np.save(self.path / folder / "labels.npy", labels)


class Device:
    """The agent of a device, in this process, with one prepared worker. Raises what the host is told."""

    def __init__(
        self,
        volume: Volume,
        zygote: Zygote,
        code: dict[str, str] | None = None,
        folders: Sequence[Folder] = (DIGITS,),
        *,
        policy: Policy | None = None,
        answers: StateAnswers | None = None,
        tensors: tuple[Tensor, ...] = TENSORS,
        seed: int = 0,
        passes: int = 0,
        batch: int = 0,
        accumulate: int = 1,
        held_out: float = 0.0,
        local: tuple[str, ...] = (),
        unsent: int = 0,
        privacy: PrivacySpec | None = None,
        secure: Literal["", "cohort"] = "",
        rounds: int = 1,
        clip: float = 0.0,
    ) -> None:
        policy = policy or Policy()
        link = LinkConfig("10.77.0.2/30", str(volume.base / "s"))
        base = volume.base
        config = AgentConfig(
            "csd0",
            link,
            flash=str(base / "volume"),
            volume=str(base / "volume"),
            state=str(base / "state"),
            identity=issued("csd0", base / "identity"),
            policy=policy,
        )
        own = OptimizerSpec("sgd", 0.1)
        spec = ModelSpec("net:Net", ("net.py",))
        work = WorkSpec(
            "attack", spec, seed=seed, optimizer=own, passes=passes, batch=batch, held_out=held_out
        )
        work = replace(work, local_layers=local, accumulate=accumulate)
        work = replace(work, privacy=privacy, secure=secure, total=rounds, clip=clip)
        request = PrepareWorker(work, "csd0", tuple(folders), {}, tensors, unsent, run="run 7")
        check_job(policy, "csd0", request)
        self.gate = Gate((), LedgerCounters.in_memory())
        self.left = Leaving(self.gate)
        self.log = volume.path / "private" / ".millpond-logs" / log_name("attack", request.run)
        self.size, self.seed = layout.size(tensors), seed
        answers = answers or StateAnswers(policy.answers_per_state)
        draws = SecretDraws(base / "state" / "draws.key")
        self.ledger = BudgetLedger(base / "state" / "budget")
        files = LaidOutFiles(WorkerFiles(written(code or model(), base / "code")), ("net.py",))
        self.worker = JobWorker(
            config, request, files, zygote, answers, self.ledger, draws, self.gate, unlogged()
        )
        near, far = socket.socketpair()
        try:
            with Channel(near, "csd0"), Channel(far, "host") as control:
                self.ready: Ready = self.worker.prepare(control)
        except BaseException:
            self.worker.stop()
            raise
        self.error: MillpondError | None = None

    @contextmanager
    def host(self) -> Iterator[Host]:
        """The host's end of a bulk connection; after the block, ``error`` is what the agent's log has."""
        near, far = socket.socketpair()
        self.error = None

        def run() -> None:
            with Channel(far, "the host", outlet=self.left) as host:
                try:
                    self.worker.relay(host)
                except RemoteError as error:
                    self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with Channel(near, "csd0") as channel:
                yield Host(channel, self.size)
        finally:
            thread.join(20)
        assert not thread.is_alive()

    @property
    def sent(self) -> dict[str, int]:
        """The ledger: bytes that have left, by kind."""
        return ledger(self.gate, [])[0]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The order of the private samples in an epoch, which the host can compute as well."""
        (own,), (held,) = self.ready.parts, self.ready.held
        found = order(own + held, self.seed, epoch, "csd0", False, self.ready.group, held)
        return np.asarray(found, np.int64)


class Host:
    """A host that asks a device's worker what it likes."""

    def __init__(self, channel: Channel, size: int) -> None:
        self.channel, self.size = channel, size

    def ask(self, *ranges: Ranges, **others: int) -> Update:
        """Ask for an update, and return its head. Raises Refused."""
        state = others.pop("state", 0)
        request = Work(7, others.pop("seed", 0), others.pop("epoch", 0), ranges, **others)
        self.channel.send(request, soon(), states(self.size, state).tobytes())
        return self.channel.expect(Update, soon())

    def ask_at(self, state: NDArray[np.float32], *ranges: Ranges, epoch: int = 0) -> NDArray[np.float32]:
        """Return the values of an update at this state."""
        self.channel.send(Work(7, 0, epoch, ranges), soon(), state.astype(np.float32).tobytes())
        self.channel.expect(Update, soon())
        return self.fetch()

    def fetch(self) -> NDArray[np.float32]:
        """Return the values of the last update."""
        self.channel.send(Fetch(self.size), soon())
        found = []
        for start in range(0, self.size, PART_VALUES):
            count = min(PART_VALUES, self.size - start)
            assert self.channel.expect(Part, soon(), payload=4 * count).start == start
            found.append(np.frombuffer(self.channel.receive_payload(4 * count, soon()), np.float32))
        return np.concatenate(found)

    def values(self, *ranges: Ranges, **others: int) -> NDArray[np.float32]:
        """Ask for an update and return its values."""
        self.ask(*ranges, **others)
        return self.fetch()


def states(size: int, number: int) -> NDArray[np.float32]:
    """State ``number`` of a model: the first value of each differs from the last one's by one ulp."""
    found: NDArray[np.float32] = np.random.default_rng(0).standard_normal(size, np.float32) / np.float32(10)
    found[:1].view(np.int32)[0] += number
    return found


def gradients(volume: Volume, state: NDArray[np.float32]) -> NDArray[np.float64]:
    """The gradient of each sample of private/digits, float64 [samples, size], as nobody but the device should
    know it.
    """
    weight, bias = state[: SIZE - CLASSES].reshape(CLASSES, -1), state[SIZE - CLASSES :]
    logits = volume.images @ weight.T + bias
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(chances)), volume.labels] -= 1
    outer = np.einsum("sc,sp->scp", chances, volume.images).reshape(len(chances), -1)
    found: NDArray[np.float64] = np.concatenate([outer, chances], 1, dtype=np.float64)
    return found


@contextmanager
def device(
    volume: Volume,
    zygote: Zygote,
    code: dict[str, str] | None = None,
    folders: Sequence[Folder] = (DIGITS,),
    **others: object,
) -> Iterator[Device]:
    """A device whose worker ends with the block."""
    made = Device(volume, zygote, code, folders, **others)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.worker.stop()


def soon() -> Deadline:
    return Deadline.after(30)
