# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): what encodings of updates save in bytes and cost in accuracy and time, in one process.

Ten clients train a network on scikit-learn's digits in rounds. Their updates pass through the encoder of an
agent, the decoder of a host and its exact sum. Images are divided evenly, or so that a client has those of
few digits alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.experiment import Run
from bench.rows import Row, summary
from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import Encoding
from millpond.aggregate.encoding.update_encoder import UpdateEncoder
from millpond.aggregate.reduction import Addend, Reduction
from millpond.base.deadline import Deadline

TITLE = "Encodings of updates: bytes, accuracy on digits, time"
ENCODINGS = {
    "float32": Encoding(),
    "bfloat16": Encoding("bfloat16"),
    "int8": Encoding("int8"),
    "top-10%": Encoding("top-k", 0.1),
    "top-1%": Encoding("top-k", 0.01),
}
CLIENTS, ROUNDS, SEEDS, BATCH, TESTED, VALUES = 10, 30, (1, 2, 3), 32, 360, 2_029_642
Vector = NDArray[np.float32]
Samples = tuple[torch.Tensor, torch.Tensor]


class Client:
    """A client with its samples, what its encoder keeps, and its last update as the host reads it."""

    def __init__(self, number: int, samples: Samples, encoding: Encoding, size: int) -> None:
        self.name, self._samples = f"client {number}", samples
        self._encoder = None if encoding.name == "float32" else UpdateEncoder(encoding, size)
        self._values, self._next = np.empty(size, np.float32), 0

    def train(self, model: nn.Module, state: Vector, generator: torch.Generator) -> Addend:
        """Train from ``state`` and return the difference, weighted by the number of samples."""
        images, labels = self._samples
        vector_to_parameters(torch.from_numpy(state.copy()), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self._values = (_vector(model) - state) * np.float32(len(labels))
        largest = float(np.abs(self._values).max())
        norm = float(np.linalg.norm(self._values.astype(np.float64)))
        if self._encoder:
            largest, norm = self._encoder.encode(self._values.data.cast("B"), memoryview)
            data = bytearray(self._encoder.data(0, len(state)))
            assert codec(self._encoder.encoding).decode(
                self._encoder.encoding, data, self._values.data.cast("B")
            )
            self._encoder.sent(len(state))
        return Addend(self, len(labels), largest, norm)

    def fetch(self, _stop: int, _deadline: Deadline) -> None:
        """See Source."""
        self._next = 0

    def read(self, out: Vector, _deadline: Deadline) -> None:
        """See Source."""
        out[:] = self._values[self._next : self._next + len(out)]
        self._next += len(out)


@dataclass(frozen=True, slots=True)
class Division:
    """The samples of the clients, and those of the test."""

    parts: Sequence[Samples]
    test: Samples


def divide(seed: int, *, skewed: bool) -> Division:
    """Divide the digits among the clients: evenly, or two pieces each of the images sorted by label."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:TESTED], order[TESTED:]
    if skewed:
        pieces = np.array_split(train[np.argsort(labels[train], kind="stable")], 2 * CLIENTS)
        parts = [np.concatenate(pieces[number::CLIENTS]) for number in range(CLIENTS)]
    else:
        parts = np.array_split(train, CLIENTS)

    def samples(chosen: NDArray[np.int64]) -> Samples:
        return torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen])

    return Division([samples(part) for part in parts], samples(test))


def accuracy(encoding: Encoding, division: Division, seed: int, rounds: int) -> float:
    """Train for ``rounds`` rounds. Returns the percentage of test images that are classified right."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    state = _vector(model)
    clients = [Client(n, part, encoding, len(state)) for n, part in enumerate(division.parts)]
    mean, generator = np.empty_like(state), torch.Generator().manual_seed(seed)
    reduction = Reduction(mean, threads=1)
    for _ in range(rounds):
        assert not reduction.run([client.train(model, state, generator) for client in clients])
        state += mean
    vector_to_parameters(torch.from_numpy(state), model.parameters())
    images, labels = division.test
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    return 100 * float(right.float().mean())


def measure(run: Run) -> list[Row]:
    """Rows ``encodings.NAME.bytes``, ``.even``, ``.skewed`` and ``.ms`` of each encoding."""
    torch.set_num_threads(1)
    rounds, seeds = (2, SEEDS[:1]) if run.quick else (ROUNDS, SEEDS)
    rows: list[Row] = []
    for name, encoding in ENCODINGS.items():
        share = encoding.size(VALUES) / (4 * VALUES)
        rows.append(
            _row(
                name, "bytes", f"bytes of an update of {VALUES:,} values over those of float32", [share], "x"
            )
        )
        for kind in ("even", "skewed"):
            found = [accuracy(encoding, divide(s, skewed=kind == "skewed"), s, rounds) for s in seeds]
            what = f"accuracy after {rounds} rounds of {CLIENTS} clients, {kind} division, seed by seed"
            rows.append(_row(name, kind, what, found, "%"))
            run.say(f"{name}, {kind}: {', '.join(f'{each:.1f} %' for each in found)}")
        if encoding.name != "float32":
            times = [_milliseconds(encoding) for _ in range(run.repeats)]
            rows.append(
                _row(name, "ms", f"of the processor to encode an update of {VALUES:,} values", times, "ms")
            )
    return rows


def _milliseconds(encoding: Encoding) -> float:
    values = np.random.default_rng(1).normal(size=VALUES).astype(np.float32)
    encoder = UpdateEncoder(encoding, VALUES)
    encoder.encode(values.data.cast("B"), memoryview)  # its memory is there from now on
    began = time.thread_time()
    encoder.encode(values.data.cast("B"), memoryview)
    return 1000 * (time.thread_time() - began)


def _row(name: str, part: str, what: str, values: Sequence[float], unit: str) -> Row:
    return summary(f"encodings.{name}.{part}", what, values, unit, peer="float32")


def _vector(model: nn.Module) -> Vector:
    found: Vector = parameters_to_vector(model.parameters()).detach().numpy().copy()
    return found
