# SPDX-License-Identifier: Apache-2.0
"""Entry: the seam to Flower with Flower's own messages and strategies, run by the Python of ``.flower``,
which has no pytest. Each function whose name begins with ``test_`` is run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity

from millpond.flower import DiLoCo, client, client_app, serve
from millpond.flower.arrays import arrays_of, state_of
from millpond.flower.resident import OuterOutcome
from millpond.host.api.outer import OuterAnswer, OuterModel
from millpond.train.state.layout import Tensor

TENSORS = (
    Tensor("w", (2, 2), "float32"),
    Tensor("b", (2,), "float32"),
    Tensor("mean", (2,), "float32", buffer=True),
)
FIRST = np.arange(8, dtype=np.float32)
DP = {"noise_multiplier": 0.0, "num_sampled_clients": 2}


class Job:
    """A resident job that moves its parameters a tenth of the way to a ``goal``, in a fleet's place."""

    def __init__(self, goal: float, samples: int) -> None:
        self.goal, self.samples, self.ended = goal, samples, np.empty(0, np.float32)

    def model(self) -> tuple[OuterModel, Any]:
        return OuterModel(TENSORS, 1), FIRST

    def order(self, kind: str, _key: str, state_of: Callable[[OuterModel], Any]) -> OuterOutcome:
        model = self.model()[0]
        state = state_of(model)
        if kind == "score":
            answer = OuterAnswer(scores={"host": {"accuracy": float(state[0])}})
            return OuterOutcome(model, state, answer, np.empty(0, np.float32), 0.0)
        changed = 0.1 * (np.float32(self.goal) - state)
        changed[6:] = self.goal
        answer = OuterAnswer(self.samples, 1, 0.1, {"training_loss": 2.0 * self.samples})
        return OuterOutcome(model, state, answer, changed, 0.1)

    def end(self, _key: str, state_of: Callable[[OuterModel], Any]) -> int:
        self.ended = state_of(self.model()[0])
        return 1


class Hosts:
    """A grid of two hosts in this process, which have ``jobs`` and Flower's ``mods``."""

    def __init__(self, mods: Iterable[Any] = ()) -> None:
        self.jobs = {1: Job(1.0, 10), 2: Job(4.0, 30)}
        self._app, self._replies = client(mods=tuple(mods)), dict[str, Message]()

    def get_node_ids(self) -> list[int]:
        return list(self.jobs)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._handled(message) for message in messages]

    def _handled(self, message: Message) -> str:
        number = str(len(self._replies))
        message.metadata.__dict__["_message_id"] = number
        context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
        client_app.resident_job = lambda _config, _job: self.jobs[message.metadata.dst_node_id]  # type: ignore[assignment,return-value]
        self._replies[number] = self._app(message, context)
        return number

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        return [self._replies[number] for number in numbers]


def run(folder: Path, rounds: int, make: Callable[..., Any], mods: Iterable[Any] = ()) -> Any:
    """Run a federation until a round. Returns the state with which both jobs have ended, float32 [8]."""
    hosts = Hosts(mods)
    config = {"hosts": 2, "rounds": rounds, "state": str(folder)}
    serve(hosts, Context(1, 0, {}, RecordDict(), config), make)
    assert np.array_equal(hosts.jobs[1].ended, hosts.jobs[2].ended)
    return hosts.jobs[1].ended


def wrapped(make: Callable[..., Any], wrapper: Callable[..., Any], norm: float) -> Callable[..., Any]:
    return lambda **options: wrapper(make(**options), clipping_norm=norm, **DP)


MAKES: dict[str, Callable[..., Any]] = {
    "FedAvg": strategies.FedAvg,
    "FedAvgM": partial(strategies.FedAvgM, server_momentum=0.9),
    "FedAdam": strategies.FedAdam,
    "FedYogi": strategies.FedYogi,
    "DiLoCo": DiLoCo,
    "FedAdam, clipped by the server": wrapped(
        strategies.FedAdam, strategies.DifferentialPrivacyServerSideFixedClipping, 1.0
    ),
}


def test_a_state_is_the_same_behind_flower_s_arrays() -> None:
    assert np.array_equal(state_of(TENSORS, arrays_of(TENSORS, FIRST)), FIRST)


def test_fleets_weigh_by_their_samples(folder: Path) -> None:
    ended = run(folder, 1, strategies.FedAvg)
    goal = 0.25 * 1.0 + 0.75 * 4.0
    np.testing.assert_allclose(ended[:6], 0.9 * FIRST[:6] + 0.1 * goal, rtol=1e-6)
    np.testing.assert_allclose(ended[6:], goal)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [reply["training_loss"] for reply in lines[0]["replies"]] == [2.0, 2.0]


def test_diloco_steps_with_nesterov_s_momentum(folder: Path) -> None:
    make = partial(DiLoCo, outer_rate=0.7, outer_momentum=0.9)
    ended, velocity = run(folder, 3, make), np.zeros(6)
    values = FIRST[:6].astype(np.float64)
    for _ in range(3):
        gradient = 0.1 * (values - 3.25)
        velocity = 0.9 * velocity + gradient
        values = values - 0.7 * (gradient + 0.9 * velocity)
    np.testing.assert_allclose(ended[:6], values, rtol=1e-5)
    np.testing.assert_allclose(ended[6:], 3.25)  # buffers are averaged


def test_a_server_that_begins_again_ends_where_it_would_have_ended(folder: Path) -> None:
    for number, (name, make) in enumerate(MAKES.items()):
        whole = run(folder / f"whole{number}", 4, make)
        run(folder / f"parts{number}", 2, make)
        np.testing.assert_allclose(run(folder / f"parts{number}", 4, make), whole, rtol=1e-6, err_msg=name)


def test_updates_are_clipped_by_flower_s_wrappers(folder: Path) -> None:
    for name, wrapper, mods in (
        ("server", strategies.DifferentialPrivacyServerSideFixedClipping, ()),
        ("client", strategies.DifferentialPrivacyClientSideFixedClipping, (fixedclipping_mod,)),
    ):
        ended = run(folder / name, 1, wrapped(strategies.FedAvg, wrapper, 0.5), mods)
        assert 0.1 < np.linalg.norm(ended - FIRST) <= 0.5, name


def main() -> int:
    """Run all tests. Returns 0."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            with tempfile.TemporaryDirectory(prefix="millpond-seam-") as folder:
                test(*[Path(folder)][: test.__code__.co_argcount])
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
