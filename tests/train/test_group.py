# SPDX-License-Identifier: Apache-2.0
"""A script's group: exact steps of uneven batches, every sample once, batches by speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

from bench.aggregate.lan import address, lan
from millpond.base.errors import LocalError
from millpond.train import group
from millpond.train.distributed.tuner import BatchTuner

from ..forking import TRAINING, server
from ..ports import unused_port
from .group_worker import BATCH, CHANGE, EPOCH, EPOCHS, PRIVATE, PUBLIC, Run, data, slowed

WORKER = Path(__file__).with_name("group_worker.py")
HOSTED = Path(__file__).with_name("hosted_script.py")
EXAMPLE = Path(__file__).parents[2] / "agent/examples/balanced.py"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As of torchrun, or of a process that was started alone."""
    values = (str(rank), str(ranks), "127.0.0.1", str(port)) if ranks > 1 else ()
    without = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    return without | dict(zip(_TORCHRUN, values, strict=False))


def run(ranks: int, *argv: str | Path) -> list[list[str]]:
    """The lines that each process of a group prints."""
    port = unused_port()
    return ended([(argv, environment(rank, ranks, port)) for rank in range(ranks)])


def ended(commands: Sequence[tuple[Sequence[str | Path], dict[str, str]]]) -> list[list[str]]:
    """The lines that each of some commands prints, which run together."""
    ranks = len(commands)
    with ExitStack() as undo:
        workers = []
        for argv, env in commands:
            workers.append(undo.enter_context(server(*TRAINING).start(*argv, env=env)))
        answers = [worker.communicate(timeout=90) for worker in workers]
        ends = [(worker.returncode, error) for worker, (_, error) in zip(workers, answers, strict=True)]
        assert [code for code, _ in ends] == [0] * ranks, ends
    return [output.splitlines() for output, _ in answers]


def seen(what: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(lines[-1]) for lines in run(ranks, WORKER, what)]


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return seen("balanced", 3)


def by_hand(steps: Iterable[list[tuple[TensorDataset, list[int]]]]) -> Any:
    """What plain torch makes of steps with these samples, to 1e-6."""
    model = slowed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parts in steps:
        images = torch.cat([dataset.tensors[0][taken] for dataset, taken in parts])
        labels = torch.cat([dataset.tensors[1][taken] for dataset, taken in parts])
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return pytest.approx(weights.tolist(), rel=0, abs=1e-6)


def together(datasets: list[TensorDataset], epochs: Iterable[list[list[int]]]) -> Iterator[Any]:
    """The steps of an epoch, of what each rank has done of its dataset."""
    for shares in zip(*epochs, strict=True):
        yield list(zip(datasets, shares, strict=True))


def test_uneven_batches_are_exactly_one_process_with_all_samples(three: list[dict[str, Any]]) -> None:
    assert len({tuple(batches) for batches in three[0]["batches"]}) > 3
    everyones = 3 * [data(EPOCH, 5)]
    epochs = zip(*(worker["epochs"] for worker in three), strict=True)
    assert three[0]["state"] == by_hand(chain(*(together(everyones, epoch) for epoch in epochs)))
    assert three[0]["state"] == three[1]["state"] == three[2]["state"]


def test_a_process_alone_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    dataset, model = data(EPOCH, 5), slowed(0)
    with group(model) as alone:
        loop = Run(alone, model)
        epochs = [loop.epoch(alone.loader(dataset, batch=BATCH)) for _ in range(2)]
        assert alone.samples == (2 * EPOCH,)
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(chain(*epoch)) == list(range(EPOCH))
        assert {len(taken) for taken in epoch} == {BATCH}
    assert loop.state == by_hand([(dataset, taken)] for taken in chain(*epochs))
    assert not torch.distributed.is_initialized()


def test_each_sample_is_taken_once_by_somebody(three: list[dict[str, Any]]) -> None:
    for epoch in range(EPOCHS):
        taken = chain(*(chain(*worker["epochs"][epoch]) for worker in three))
        assert sorted(taken) == list(range(EPOCH))
    assert sum(three[0]["samples"]) == EPOCHS * EPOCH
    done = [sum(len(taken) for taken in chain(*worker["epochs"])) for worker in three]
    assert three[0]["samples"] == done


def test_private_samples_are_taken_by_their_own_rank(three: list[dict[str, Any]]) -> None:
    for epoch in range(2):
        for rank, worker in enumerate(three):
            assert sorted(chain(*worker["private"]["epochs"][epoch][0])) == list(range(PRIVATE[rank]))
        public = chain(*(chain(*worker["private"]["epochs"][epoch][1]) for worker in three))
        assert sorted(public) == list(range(PUBLIC))


def test_a_rank_without_samples_left_takes_part_with_none(three: list[dict[str, Any]]) -> None:
    assert any(batches[2] == 0 < batches[0] for batches in three[0]["private"]["batches"])
    own, everyones = [data(count, 20 + rank) for rank, count in enumerate(PRIVATE)], 3 * [data(PUBLIC, 9)]
    steps: list[Any] = []
    for epoch in range(2):
        for number, datasets in enumerate((own, everyones)):
            steps += together(datasets, [worker["private"]["epochs"][epoch][number] for worker in three])
    states = [worker["private"]["state"] for worker in three]
    assert states[0] == states[1] == states[2] == by_hand(steps)


@pytest.mark.serial
def test_a_slow_rank_gets_less_and_the_others_more(three: list[dict[str, Any]]) -> None:
    batches = three[0]["batches"]
    assert all(sum(step) == BATCH and min(step) >= 2 for step in batches)
    before = batches[CHANGE - 1]
    assert before[2] < BATCH / 6 < BATCH / 3 < min(before[:2])
    assert batches[-1][2] > BATCH / 3 > max(batches[-1][:2])


def test_fixed_batches_give_the_same_bits() -> None:
    first, second = seen("fixed", 2), seen("fixed", 2)
    assert first == second
    (one, again), (other, _) = first[0]["states"], first[1]["states"]
    assert one == again == other  # with the running statistics of BatchNorm
    assert first[0]["batches"] == [[32, 32], [18, 18]]
    assert first[0]["still"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_may_count_tokens(ranks: int) -> None:
    workers, dataset, model = seen("counted", ranks), data(60, 5), slowed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for shares in zip(*(worker["epoch"] for worker in workers), strict=True):
        images, labels, _ = dataset[list(chain(*shares))]
        losses = cross_entropy(model(images), labels, reduction="none")
        optimizer.zero_grad()
        (((labels + 1) * losses).sum() / (labels + 1).sum()).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    for worker in workers:
        assert worker["state"] == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
def test_a_model_on_a_gpu_is_exchanged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    dataset, states = data(EPOCH, 5), []
    for device in ("cpu", "cuda"):
        model = slowed(0).to(device)
        with group(model) as alone:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for images, labels, _ in alone.loader(dataset, batch=BATCH):
                optimizer.zero_grad()
                loss = cross_entropy(model(images.to(device)), labels.to(device), reduction="sum")
                alone.step(loss)
                optimizer.step()
        states.append(torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()]))
    assert torch.allclose(*states, atol=1e-4)


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
        with pytest.raises(LocalError, match="the loss is a sum over -1: a count is 0 or more"):
            alone.step(cross_entropy(model(images), labels), -1)
        with pytest.raises(LocalError, match=r"the loss has the shape \(3,\)"):
            alone.step(cross_entropy(model(images), labels, reduction="none"))
        next(batches)
        with pytest.raises(LocalError, match="not given to step"):
            next(batches)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_runs_in_a_group(ranks: int) -> None:
    check_example(list(chain(*run(ranks, EXAMPLE, "--epochs", "3"))), ranks)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")
def test_ranks_of_two_hosts_are_a_group() -> None:
    """Two namespaces behind a switch stand for the hosts, with two ranks of the example on each."""
    with lan(2, 1000) as hosts:
        commands = []
        for rank in range(4):
            meeting = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "lan"}
            argv = HOSTED, hosts.nodes[rank // 2].file, EXAMPLE, "--epochs", "3"
            commands.append((argv, environment(rank, 4, 29500) | meeting))
        check_example(list(chain(*ended(commands))), 4)
        assert min(hosts.nodes[1].traffic("lan").sent, hosts.nodes[0].traffic("lan").sent) > 1e6


@pytest.mark.full
def test_the_example_runs_alone_and_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = environment(0, 1, 0)
    for argv, ranks in (([sys.executable], 1), (torchrun, 2)):
        done = subprocess.run([*argv, EXAMPLE, "--epochs", "3"], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        check_example(done.stdout.splitlines(), ranks)


def check_example(lines: list[str], ranks: int) -> None:
    assert float(lines[-1 - ranks].split()[1]) > 0.9, lines
    assert [line.split(":")[0] for line in lines[-ranks:]] == [f"rank {rank}" for rank in range(ranks)]


Line = tuple[float, float]
"""Seconds of a step without samples, and of each sample."""


def train(
    tuner: BatchTuner, lines: Sequence[Line], steps: int, noise: Sequence[float] = (1.0,)
) -> list[float]:
    """The seconds of the ranks in the last step."""
    total = sum(tuner.batches)
    for step in range(steps):
        batches, scale = tuner.batches, noise[step % len(noise)]
        assert sum(batches) == total and min(batches) >= 2
        seconds = [
            (start + each * batch) * scale for (start, each), batch in zip(lines, batches, strict=True)
        ]
        tuner.observe(batches, seconds)
    return seconds


def test_after_ten_steps_all_take_as_long() -> None:
    lines = [(0.02, 0.001), (0.01, 0.004), (0.1, 0.002), (0.0, 0.001)]
    tuner = BatchTuner(400, 4, balanced=True)
    seconds = train(tuner, lines, 11)
    assert sum(tuner.batches) == 400
    assert max(seconds) < 1.03 * min(seconds)


def test_steps_that_were_disturbed_do_not_move_the_plan() -> None:
    lines = [(0.02, 0.001), (0.02, 0.003)]
    quiet, disturbed = BatchTuner(80, 2, balanced=True), BatchTuner(80, 2, balanced=True)
    train(quiet, lines, 10)
    train(disturbed, lines, 10, noise=(9.0, 1.0, 1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert disturbed.batches == pytest.approx(quiet.batches, abs=1)


def test_where_all_batches_take_as_long_they_stay_about_equal() -> None:
    tuner = BatchTuner(96, 3, balanced=True)
    train(tuner, [(0.010, 0.0), (0.011, 0.0), (0.0105, 0.0)], 12)
    assert sum(tuner.batches) == 96
    assert min(tuner.batches) > 10


def test_a_rank_too_slow_for_two_samples_takes_two_and_is_noticed_when_faster() -> None:
    tuner = BatchTuner(60, 3, balanced=True)
    fast = (0.01, 0.001)
    train(tuner, [fast, fast, (2.0, 0.5)], 10)
    assert tuner.batches == (29, 29, 2)
    train(tuner, [fast, fast, fast], 40)
    assert min(tuner.batches) >= 10


def test_others_take_the_samples_of_who_has_none() -> None:
    tuner = BatchTuner(12, 3, balanced=False)
    assert tuner.among([True, True, True]) == tuner.batches == (4, 4, 4)
    assert tuner.among([True, False, True]) == (6, 0, 6)
    assert tuner.among([False, False, True]) == (0, 0, 12)


def test_fixed_batches_stay() -> None:
    tuner = BatchTuner(13, 3, balanced=False)
    train(tuner, [(0.0, 0.1), (0.0, 1.0), (0.0, 9.0)], 50)
    assert sorted(tuner.batches) == [4, 4, 5]
