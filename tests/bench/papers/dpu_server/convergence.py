# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, processes): figure 8: the test loss of federated averaging whose sums the six servers make.

CIFAR-10 is not on this machine: scikit-learn's digits stand in, and the paper's network at half its channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from bench.experiment import Line, Panel, Role, Run
from bench.papers.dpu_server.library import UDP, Vector
from bench.papers.dpu_server.rounds import CLIENTS, DPU, SERVERS, WHOLE, Design, Rounds, exact, rounds
from bench.papers.dpu_server.timing import WRONG
from bench.papers.exhibit import Shown, Value, computed, measured

LOST = 0.0468
"""The share of datagrams of the mean that the paper's server 6 lost (section 5.3)."""
RUNS, ROUNDS, QUICK_ROUNDS = 5, 8, 2
_TEST, _BATCH, _RATE = 360, 32, 3e-3
_ROLES: tuple[Role, ...] = ("limit", "untuned", "peer", "stannis", "peer", "millpond")
EMULATION = (
    "digits (1,437 images of 8x8 for ten clients, 360 to test) and the paper's network at half its channels "
    "stand in for CIFAR-10 and the whole network; the servers are those of figure 6; of the datagrams of the "
    f"mean by UDP {LOST:.2%} are dropped by draw"
)


@dataclass(slots=True)
class Course:
    """The test losses of a server, by run and round, and shares of what went wrong in each round."""

    losses: list[list[float]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)


class Clients:
    """Ten clients of one run, whose states are rows."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        self._x = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self._y, self._seed = torch.tensor(labels[order]), seed
        self._shares = np.array_split(np.arange(_TEST, len(labels)), CLIENTS)
        self._model = network()
        first = nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy().copy()
        self.states: Vector = np.tile(first, (CLIENTS, 1))

    def train(self, number: int, trained: Vector) -> None:
        """Write the clients' states after an epoch of their own to the rows of ``trained``."""
        for client, share in enumerate(self._shares):
            self._load(self.states[client])
            draws = torch.Generator().manual_seed(1000 * self._seed + number)
            torch.manual_seed(number)  # of dropout
            self._epoch(torch.from_numpy(share)[torch.randperm(len(share), generator=draws)])
            values = nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy()
            trained[client] = values

    def _epoch(self, order: torch.Tensor) -> None:
        self._model.train()
        optimizer = torch.optim.Adam(self._model.parameters(), _RATE)
        for batch in torch.split(order, _BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(self._x[batch]), self._y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def test_loss(self) -> float:
        """Return the test loss of the first client."""
        self._load(self.states[0])
        self._model.eval()
        with torch.no_grad():
            found = nn.functional.cross_entropy(self._model(self._x[:_TEST]), self._y[:_TEST])
        return float(found)

    def _load(self, state: Vector) -> None:
        nn.utils.vector_to_parameters(torch.from_numpy(state.copy()), self._model.parameters())


def network() -> nn.Sequential:
    """Return the paper's network at half its channels, for images of 8x8."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Flatten(), nn.Linear(512, 128), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def measure(run: Run) -> Shown:
    """Train with each server, run by run."""
    size = sum(each.numel() for each in network().parameters())
    courses = {design.number: Course() for design in SERVERS}
    with rounds(size, WHOLE) as whole, rounds(size, DPU) as part:
        for seed in range(1 if run.quick else RUNS):
            for design in SERVERS:
                server, course = whole if design.share == WHOLE else part, courses[design.number]
                losses = list(_trained(server, design, course, seed, QUICK_ROUNDS if run.quick else ROUNDS))
                course.losses.append(losses)
                run.say(f"run {seed + 1}, server {design.number}: test loss {losses[-1]:.4f}")
    difference = (
        f"The stand-ins learn in {ROUNDS} rounds. The paper prints curves without numbers: (6) is very close "
        "to (1), racing costs little in (4), and (2) fluctuates."
    )
    return Shown(tuple(_rows(courses)), EMULATION, difference, (_panel(courses),))


def _trained(server: Rounds, design: Design, course: Course, seed: int, count: int) -> Iterator[float]:
    """Train one run. Yields the test loss after each round."""
    clients, by_udp = Clients(seed), bool(design.how & UDP)
    for number in range(count):
        clients.train(number, server.vectors)
        timing = server.run(design.how, LOST if by_udp else 0.0)
        wrong = np.abs(server.means - exact(server.vectors)) > WRONG
        if by_udp:  # what a client has kept of its own is lost, not wrong
            wrong &= server.means != server.vectors
        course.lost.append(100 * timing.lost[1])
        course.wrong.append(100 * float(wrong.mean()))
        clients.states = server.means.copy()
        yield clients.test_loss()


def _rows(courses: Mapping[int, Course]) -> Iterator[Value]:
    for design in SERVERS:
        last = [losses[-1] for losses in courses[design.number].losses]
        yield measured(f"({design.number}) {design.label}: test loss after the last round", "", None, last)
        spread = float(np.std(last))
        yield computed(
            f"({design.number}) {design.label}: standard deviation of that loss over the runs",
            "",
            None,
            spread,
        )
    for design in SERVERS[4:]:
        paper = 100 * LOST if design.number == 6 else None
        about = f"({design.number}) {design.label}: datagrams of the mean lost"
        yield measured(about, "%", paper, courses[design.number].lost)
    for design in SERVERS:
        about = f"({design.number}) {design.label}: values of a mean that lack an addition, mean of a run"
        course = courses[design.number]
        by_run = np.reshape(course.wrong, (len(course.losses), -1))
        yield measured(about, "%", None, by_run.mean(axis=1).tolist())
        worst = about.replace("mean of a run", "worst round of a run")
        yield measured(worst, "%", None, by_run.max(axis=1).tolist())


def _panel(courses: Mapping[int, Course]) -> Panel:
    lines = []
    for design, role in zip(SERVERS, _ROLES, strict=True):
        mean = np.mean(courses[design.number].losses, axis=0).tolist()
        label = f"({design.number}) {design.label}"
        lines.append(Line(role, label, list(range(1, len(mean) + 1)), mean, faint=design.number == 5))
    return Panel("Fig. 8: training convergence", "round", "test loss", tuple(lines))
