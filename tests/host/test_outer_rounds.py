# SPDX-License-Identifier: Apache-2.0
"""A resident job's rounds begin at the states that orders bring, once for each, also when it resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from millpond.base.errors import ConfigError, Refused, RemoteError
from millpond.host.api.outer import OrderKind, OuterAnswer, OuterModel
from millpond.host.client.outer_client import OuterClient
from millpond.host.jobs.context import JobStopped
from millpond.host.jobs.outer.mailbox import Order, OuterMailbox
from millpond.host.jobs.outer.rounds import OuterRounds
from millpond.host.jobs.stage import JobStage, StageWatch
from millpond.host.records.jobs import Round
from millpond.host.workers.parameter_server import ParameterServer
from millpond.train.job.check import check
from millpond.train.job.host_spec import OuterSpec
from millpond.train.job.spec import DataSpec, FederatedSpec, Job, ModelSpec
from millpond.train.state.layout import Tensor

from ..waiting import eventually
from .daemon_rig import Rig, open_rig, rig

__all__ = ["open_rig", "rig"]
TENSORS = (Tensor("w", (2,), "float32"), Tensor("count", (1,), "int64", buffer=True))


class Fleet:
    """A job that adds 1 to its parameters in a round, and counts rounds in its buffer."""

    def __init__(self, folder: Path, every: int = 2) -> None:
        self.mailbox = OuterMailbox(1)
        self.values, self.done, self.folder = np.zeros(3, np.float32), list[Round](), folder
        self.job = Job("outer", DataSpec("private/x"), ModelSpec("m:f"), outer=OuterSpec(every))
        self.stages = list[JobStage]()
        self.watch = StageWatch(lambda: self.stages.append(self.watch.stage))
        self.begin()

    def begin(self) -> None:
        """Begin, or resume after the last round."""
        log, stop = logging.getLogger("outer"), lambda: None
        server = cast(ParameterServer, self)
        score, watch = self.score, self.watch
        self.rounds = OuterRounds(self.mailbox, self.job, self.folder, server, score, stop, watch, log)

    tensors = TENSORS

    @property
    def state(self) -> SimpleNamespace:
        return SimpleNamespace(values=self.values)

    def replace(self, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.values[:] = values

    def score(self) -> dict[str, dict[str, float | None]]:
        return {"host": {"accuracy": float(self.values[0])}}

    def train(self, rounds: int) -> bool:
        """Run so many rounds, or fewer if the job ends. Returns whether it has ended."""
        for _ in range(rounds):
            number = len(self.done) + 1
            if self.rounds.is_over(self.done, number, begun=False):
                return True
            self.values[:2] += 1
            self.values[2] += 1
            metrics = {"training_loss": 1 / number}
            self.done.append(Round(number, {}, 1.0, 10, {}, {}, {}, metrics=metrics))
        return False

    def run(self) -> None:
        """Train to the end."""
        while not self.train(1):
            pass


def order(kind: OrderKind, key: str, *values: float) -> Order:
    return Order(kind, key, np.array(values, np.float32))


def here() -> bool:
    return False


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as found:
        yield found


def test_an_outer_round_begins_at_its_state_and_answers_with_what_has_changed(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    fleet = Fleet(tmp_path)
    job = pool.submit(fleet.run)
    model, first = fleet.mailbox.model(here)
    assert model == OuterModel(TENSORS, 2) and first.tolist() == [0, 0, 0]
    eventually(lambda: fleet.watch.stage is JobStage.WAITING, "the job is seen to wait")
    answer, changed = fleet.mailbox.ask(order("train", "1", 5, 7, 3.4), here)
    assert changed.tolist() == [2, 2, 5]  # differences, then the buffer as it is: 3.4 is a mean of whole ones
    assert (answer.samples, answer.rounds, answer.seconds) == (20, 2, 2.0)
    assert answer.sums == {"training_loss": 15.0}
    again, same = fleet.mailbox.ask(order("train", "1", 9, 9, 9), here)
    assert again is answer and same is changed and len(fleet.done) == 2
    scored, nothing = fleet.mailbox.ask(order("score", "1", 0.5, 0, 0), here)
    assert scored.scores == {"host": {"accuracy": 0.5}} and not len(nothing)
    assert fleet.stages == [JobStage.WAITING, JobStage.TRAINING, JobStage.WAITING]
    assert fleet.values.tolist() == [7, 9, 5]  # scoring leaves the job where it was
    with pytest.raises(Refused, match="job 1 has ended"):
        end = pool.submit(fleet.mailbox.ask, order("end", "", 8, 8, 8), here)
        job.result()
        fleet.mailbox.end("job 1 has ended")
        end.result()
    assert fleet.values.tolist() == [8, 8, 8]


def test_a_job_that_resumes_goes_on_inside_its_outer_round(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    fleet = Fleet(tmp_path)
    first = pool.submit(fleet.mailbox.ask, order("train", "7", 1, 1, 1), here)
    fleet.train(1)
    fleet.mailbox.end("the daemon has ended")
    with pytest.raises(Refused, match="the daemon has ended"):
        first.result()
    fleet.mailbox = OuterMailbox(1)
    fleet.begin()  # from its checkpoint after round 1, with nobody who waits
    job = pool.submit(fleet.run)
    answer, changed = fleet.mailbox.ask(order("train", "7", 1, 1, 1), here)
    assert answer.rounds == 2 and changed.tolist() == [2, 2, 3]
    pool.submit(fleet.mailbox.ask, order("end", "", 0, 0, 0), here)
    job.result()
    fleet.mailbox.end("ended")


def test_a_round_of_which_nothing_is_done_begins_at_its_state_again(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    fleet = Fleet(tmp_path)
    asked = pool.submit(fleet.mailbox.ask, order("train", "7", 4, 4, 4), here)
    assert not fleet.rounds.is_over([], 1, begun=False)
    fleet.values[:] = -1  # a checkpoint from before the order
    fleet.begin()
    assert not fleet.rounds.is_over([], 1, begun=False) and fleet.values.tolist() == [4, 4, 4]
    fleet.values[:] = 6  # one from the middle of the round
    fleet.begin()
    assert not fleet.rounds.is_over([], 1, begun=True) and fleet.values.tolist() == [6, 6, 6]
    fleet.mailbox.end("ended")
    assert isinstance(asked.exception(), Refused)


def test_a_newer_order_replaces_one_that_is_under_way(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    fleet = Fleet(tmp_path, every=3)
    old = pool.submit(fleet.mailbox.ask, order("train", "old", 1, 1, 1), here)
    fleet.train(1)
    new = pool.submit(fleet.mailbox.ask, order("train", "new", 10, 10, 10), here)
    with pytest.raises(Refused, match="a newer order has replaced 'old'"):
        old.result()
    fleet.train(3)
    pool.submit(fleet.mailbox.ask, order("end", "", 0, 0, 0), here)
    assert fleet.train(1) and new.result()[1].tolist() == [3, 3, 13]
    fleet.mailbox.end("ended")


def test_a_client_that_is_gone_is_not_waited_for() -> None:
    with pytest.raises(Refused, match="the client is gone"):
        OuterMailbox(1).model(lambda: True)


def test_a_job_stops_while_it_waits_for_an_order(tmp_path: Path) -> None:
    fleet, looks = Fleet(tmp_path), list[int]()

    def stop() -> None:
        looks.append(1)
        fleet.mailbox.end("ended")  # so that the wait is short
        if len(looks) > 1:
            raise JobStopped("stopped")

    fleet.rounds._check_stop = stop
    with pytest.raises(JobStopped):
        fleet.train(1)


@pytest.mark.parametrize("federated", [FederatedSpec(buffer=2), FederatedSpec(late="carry")])
def test_updates_that_cross_outer_rounds_are_refused(federated: FederatedSpec) -> None:
    data = DataSpec("private/x", test="test")
    with pytest.raises(ConfigError, match="outer: an outer round ends with all its updates"):
        check(Job("j", data, ModelSpec("m:f"), federated=federated, outer=OuterSpec()), "job.toml")


def resident(rig: Rig) -> tuple[int, OuterMailbox]:
    """Submit a resident job, whose trainer stands in for one."""
    number = rig.submit(text="[outer]\nevery = 1\n")
    rig.wait_for(number, "running")
    mailbox = rig.begun[number].context.outer
    assert mailbox
    return number, mailbox


def test_orders_cross_the_socket(rig: Rig, pool: ThreadPoolExecutor) -> None:
    number, mailbox = resident(rig)
    with OuterClient(rig.directory) as client:
        asked = pool.submit(client.outer_model, number)
        mailbox.prepared(OuterModel(TENSORS, 1), np.arange(3, dtype=np.float32))
        model, state = asked.result()
        assert model == OuterModel(TENSORS, 1) and state.tolist() == [0, 1, 2]
        answer = OuterAnswer(3, 1, 0.5, {"training_loss": 6.0}, {"host": {"accuracy": None}})
        mailbox.answer("train", "a", answer, state * 2)
        found, values = client.outer_round(number, "train", "a", state)
        assert found == answer and values.tolist() == [0, 2, 4]
        for wrong, text in ((state[:2], "a state of job 1 has 12 bytes"), (state * np.nan, "is not finite")):
            with pytest.raises(Refused, match=text):
                client.outer_round(number, "train", "b", wrong)
        assert client.job_info(number).state == "running"  # the connection is as good as before
        end = pool.submit(client.outer_round, number, "end", "end", state)
        while mailbox.order() is None:
            mailbox.wait(1.0)
        rig.finish(number)
        with pytest.raises(Refused, match="job 1 has ended"):
            end.result()
        with pytest.raises(Refused, match="job 1 is done"):
            client.outer_model(number)


def test_a_job_without_the_table_takes_no_orders(rig: Rig) -> None:
    number = rig.submit()
    with OuterClient(rig.directory) as client, pytest.raises(Refused, match=r"no table \[outer\]"):
        client.outer_model(number)


def test_the_end_of_the_daemon_is_told(
    rig: Rig, open_rig: Callable[[], Rig], pool: ThreadPoolExecutor
) -> None:
    number, _ = resident(rig)
    with OuterClient(rig.directory) as client:
        asked = pool.submit(client.outer_model, number)
        open_rig()
        assert isinstance(asked.exception(), RemoteError)
