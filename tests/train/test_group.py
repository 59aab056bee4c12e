"""A script's group: exact steps of uneven batches, every sample once, batches by speed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from millpond.train import group
from millpond.train.balance.data_plan import DataPlan, Pool
from millpond.wire.errors import LocalError

from .group_worker import BATCH, CHANGE, EPOCH, EPOCHS, PRIVATE, PUBLIC, Run, data, slowed

WORKER = Path(__file__).with_name("group_worker.py")
EXAMPLE = Path(__file__).parents[2] / "agent/examples/balanced.py"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    values = (str(rank), str(ranks), "127.0.0.1", str(port))
    return os.environ | dict(zip(_TORCHRUN, values, strict=True))


def run(what: str, ranks: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ExitStack() as undo:
        workers = []
        for rank in range(ranks):
            argv, env = [sys.executable, str(WORKER), what], environment(rank, ranks, port)
            worker = subprocess.Popen(
                argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            undo.enter_context(worker)
            undo.callback(worker.kill)
            workers.append(worker)
        answers = [worker.communicate(timeout=90) for worker in workers]
        assert all(worker.returncode == 0 for worker in workers), answers
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run("balanced", 3)


def by_hand() -> list[float]:
    """What plain torch makes of the same batches."""
    dataset, model = data(EPOCH, 5), slowed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(EPOCHS):
        plan = DataPlan(0, epoch, [Pool(EPOCH, (0,))], 1)
        position = plan.begin()
        while any(plan.left(position)):
            position, (share,) = plan.deal(position, [BATCH])
            images, labels, _ = dataset[list(share.parts[0].indices)]
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def test_uneven_batches_are_exactly_one_process_with_all_samples(three: list[dict[str, Any]]) -> None:
    assert len({tuple(batches) for batches in three[0]["batches"]}) > 3
    assert three[0]["state"] == pytest.approx(by_hand(), rel=0, abs=1e-6)
    assert three[0]["state"] == three[1]["state"] == three[2]["state"]


def test_a_process_alone_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    dataset, model = data(EPOCH, 5), slowed(0)
    with group(model) as alone:
        loop = Run(alone, model)
        for _ in range(EPOCHS):
            assert loop.epoch(alone.loader(dataset, batch=BATCH)) == list(range(EPOCH))
        assert alone.samples == (EPOCHS * EPOCH,)
    assert loop.state == pytest.approx(by_hand(), rel=0, abs=1e-6)
    assert not torch.distributed.is_initialized()


def test_each_sample_is_taken_once_by_somebody(three: list[dict[str, Any]]) -> None:
    for epoch in range(EPOCHS):
        assert sorted(chain(*(worker["epochs"][epoch] for worker in three))) == list(range(EPOCH))
    assert sum(three[0]["samples"]) == EPOCHS * EPOCH
    assert three[0]["samples"] == [len([*chain(*worker["epochs"])]) for worker in three]


def test_private_samples_are_taken_by_their_own_rank(three: list[dict[str, Any]]) -> None:
    for epoch in range(2):
        for rank, worker in enumerate(three):
            assert worker["private"]["epochs"][epoch][0] == list(range(PRIVATE[rank]))
        public = [worker["private"]["epochs"][epoch][1] for worker in three]
        assert sorted(chain(*public)) == list(range(PUBLIC))


def test_who_has_no_samples_left_takes_part_with_none(three: list[dict[str, Any]]) -> None:
    assert any(batches[2] == 0 < batches[0] for batches in three[0]["private"]["batches"])
    states = [worker["private"]["state"] for worker in three]
    assert states[0] == states[1] == states[2]  # with the running statistics of BatchNorm


def test_who_is_slow_gets_less_and_the_others_more(three: list[dict[str, Any]]) -> None:
    batches = three[0]["batches"]
    assert all(sum(step) == BATCH and min(step) >= 2 for step in batches)
    before = batches[CHANGE - 1]
    assert before[2] < BATCH / 6 < BATCH / 3 < min(before[:2])
    assert batches[-1][2] > BATCH / 3 > max(batches[-1][:2])


def test_fixed_batches_give_the_same_bits() -> None:
    first, second = run("fixed", 2), run("fixed", 2)
    assert first == second
    (one, again), (other, _) = first[0]["states"], first[1]["states"]
    assert one == again == other
    assert first[0]["batches"] == [[32, 32], [18, 18]]
    assert first[0]["still"]


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def test_what_cannot_be_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for wrong, text in ((nn.Tanh(), "no parameters"), (slowed(0).double(), "'layers.0.weight' is float64")):
        with pytest.raises(LocalError, match=text), group(wrong):
            pass
    model = slowed(0)
    with pytest.raises(LocalError, match="policy 'even'"), group(model, policy="even"):  # type: ignore[arg-type]
        pass
    with group(model) as alone:
        with pytest.raises(LocalError, match="step without a batch"):
            alone.step(torch.zeros(()))
        with pytest.raises(LocalError, match="a batch of 1 is too small: 1 ranks need 2"):
            alone.loader(data(9, 0), batch=1)
        with pytest.raises(LocalError, match="rank 0 has no samples"):
            alone.loader(data(0, 0))
        with pytest.raises(LocalError, match="_Endless is no map-style"):
            alone.loader(_Endless())  # type: ignore[arg-type]
        batches = iter(alone.loader(data(9, 0), batch=3))
        images, labels, _ = next(batches)
        with pytest.raises(LocalError, match=r"the loss has the shape \(3,\)"):
            alone.step(cross_entropy(model(images), labels, reduction="none"))
        next(batches)
        with pytest.raises(LocalError, match="not given to step"):
            next(batches)


def test_the_example_runs_alone_and_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    for argv, ranks in (([sys.executable], 1), (torchrun, 2)):
        done = subprocess.run([*argv, EXAMPLE, "--epochs", "3"], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert float(lines[-1 - ranks].split()[1]) > 0.9, done.stdout
        assert [line.split(":")[0] for line in lines[-ranks:]] == [f"rank {rank}" for rank in range(ranks)]
