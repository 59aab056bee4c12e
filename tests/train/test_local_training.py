# SPDX-License-Identifier: Apache-2.0
"""One round of local training, and the score of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray
from torch import nn

from millpond.train.data.labelled_images import LabelledImages, of_arrays
from millpond.train.determinism import generators, seeds
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local import pace
from millpond.train.local.evaluation import evaluate
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders, Selection, batches
from millpond.train.protocol import Folder, Update, Work
from millpond.train.repeats import RepeatSpec
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.sums import means
from millpond.train.task.task import Task
from millpond.train.zoo.models import digits_cnn


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


class Digits(NamedTuple):
    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dataset(self) -> LabelledImages:
        return of_arrays(self.images, self.labels)


@pytest.fixture(scope="module")
def digits() -> Digits:
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = (bunch.images[order, None] / 16).astype(np.float32)
    return Digits(images, bunch.target[order].astype(np.int64))


def part(samples: Digits, chosen: slice | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Digits:
    return Digits(samples.images[chosen], samples.labels[chosen])


class Images:
    """A task whose hooks but the model are the default ones."""

    model = staticmethod(digits_cnn)


TASK = Task(Images())
WORK = WorkSpec(
    "tests",
    ModelSpec("none:none"),
    optimizer=OptimizerSpec("sgd", 0.05, {"momentum": 0.9}),
    passes=1,
    batch=32,
)


def trainer(model: nn.Module, samples: Digits, work: WorkSpec = WORK) -> LocalTrainer:
    folders = SampleFolders(TASK, 0, [Folder("p", "csd0")], [samples.dataset])
    return LocalTrainer(FlatParameters(model), TASK, folders, work)


def scores(model: nn.Module, samples: Digits) -> dict[str, float]:
    every = np.arange(len(samples))
    chosen = Selection(TASK, [samples.dataset], [every], every)
    return means(evaluate(model, TASK, chosen, WORK))


def run(one: LocalTrainer, samples: Digits, seed: int) -> Update:
    return one.run(Work(0, seed, 1, (((0, len(samples)),),)), one.parameters.state.copy())


def trained(samples: Digits, work: WorkSpec, seed: int) -> tuple[bytes, tuple[float, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 10))
    one = trainer(model, samples, work)
    update = run(one, samples, seed)
    assert update.seconds > 0
    return one.parameters.sums.tobytes(), update.metrics["loss"]


@pytest.mark.parametrize("changes", [{}, {"mini_epoch": 50}, {"prefetch": 0}])
def test_how_far_a_round_is_counts_all_its_passes(
    digits: Digits, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PERIOD_SECONDS", 0.0)
    few, told = part(digits, slice(100)), list[int]()
    work = replace(WORK, passes=2, batch=50, **changes)
    folders = SampleFolders(TASK, 0, [Folder("p", "csd0")], [few.dataset])
    one = LocalTrainer(FlatParameters(digits_cnn()), TASK, folders, work, tell=told.append)
    run(one, few, 1)
    assert told == [25, 50, 75]  # the answer tells the end
    one.run(Work(1, 1, 1, (), synthetic=100), one.parameters.state.copy())
    assert len(told) == 3


def test_with_a_rule_that_repeats_mini_epochs_their_first_times_tell_how_far_a_round_is(
    digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: such a round said 0% until its end."""
    monkeypatch.setattr(pace, "PERIOD_SECONDS", 0.0)
    few, told = part(digits, slice(100)), list[int]()
    work = replace(WORK, passes=3, batch=25, mini_epoch=50, repeat=RepeatSpec("score"))
    folders = SampleFolders(TASK, 0, [Folder("p", "csd0")], [few.dataset])
    run(LocalTrainer(FlatParameters(digits_cnn()), TASK, folders, work, tell=told.append), few, 1)
    assert told == [25, 50, 75]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", ""])
def test_a_repeated_round_gives_the_same_bits(digits: Digits, optimizer: str) -> None:
    training = replace(WORK, optimizer=OptimizerSpec(optimizer, 0.01))
    some = part(digits, slice(100))
    assert trained(some, training, 5) == trained(some, training, 5)
    assert trained(some, training, 5) != trained(some, training, 6)


def test_seeds_differ_by_job_worker_and_round() -> None:
    made = [seeds.derive(*key) for key in [(0, "csd1", 2), (1, "csd1", 2), (0, "csd12", 2), (0, "csd1", 22)]]
    assert len(set(made)) == 4
    assert made[0] == seeds.derive(0, "csd1", 2) == 6056588976336830218
    assert all(0 <= seed < 2**63 for seed in made)


def made_of(groups: Sequence[int], batch: int = 0, steps: int = 1, seed: int = 0) -> list[NDArray[np.int64]]:
    return list(batches(np.array(groups, np.int64), batch, steps, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("count", [1, 2, 8, 9, 15, 16, 17])
def test_batches_are_every_sample_once_and_none_alone(count: int) -> None:
    made = made_of(count * [1], batch=8)
    assert sorted(np.concatenate(made).tolist()) == list(range(count))
    assert count == 1 or min(map(len, made)) > 1
    assert max(map(len, made)) <= 9


@pytest.mark.parametrize(("count", "steps"), [(1, 4), (2, 1), (7, 4), (8, 4), (10, 4), (33, 8), (100, 64)])
def test_equal_batches_are_as_many_as_wanted_and_none_alone(count: int, steps: int) -> None:
    made = made_of(count * [1], steps=steps)
    assert sorted(np.concatenate(made).tolist()) == list(range(count))
    sizes = [len(batch) for batch in made]
    assert len(made) == steps if count >= 2 * steps else len(made) == max(1, count // 2)
    assert max(sizes) - min(sizes) <= 1 and (count == 1 or min(sizes) > 1)


@given(
    some.lists(some.one_of(some.just(1), some.integers(2, 15)), min_size=1, max_size=40),
    some.integers(0, 20).filter(lambda batch: batch != 1),
    some.integers(1, 12),
    some.integers(0, 5),
)
def test_batches_are_of_whole_groups(groups: list[int], batch: int, steps: int, seed: int) -> None:
    """Otherwise updates of many seeds would be a linear system that shows single samples."""
    made = made_of(groups, batch, steps, seed)
    ends = np.cumsum(groups).tolist()
    own = [set(range(end - group, end)) for group, end in zip(groups, ends, strict=True)]
    assert sorted(np.concatenate(made).tolist()) == list(range(sum(groups)))
    for places in map(set, made):
        assert all(group <= places or not group & places for group in own)
        assert len(places) > 1 or sum(groups) == 1


def test_evaluate_counts_and_does_not_train(digits: Digits) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = scores(model, part(digits, slice(300)))
    with torch.no_grad():
        logits = model(torch.from_numpy(digits.images[:300]))
    labels = torch.from_numpy(digits.labels[:300])
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loss_is_the_sum_over_samples_of_one_pass(digits: Digits) -> None:
    model, some = digits_cnn(), part(digits, slice(50))
    frozen = replace(WORK, optimizer=OptimizerSpec("sgd", 1e-30), batch=7, passes=2)
    update = run(trainer(model, some, frozen), some, 0)
    loss, count = update.metrics["loss"]
    assert loss / 50 == pytest.approx(scores(model, some)["loss"], rel=1e-5) and count == update.weight == 50


def test_a_model_that_diverges_says_so_in_the_head(digits: Digits) -> None:
    some = part(digits, slice(100))
    one = trainer(digits_cnn(), some, replace(WORK, optimizer=OptimizerSpec("sgd", 1e30)))
    update = run(one, some, 0)
    assert not np.isfinite(update.metrics["loss"][0])
    assert not np.isfinite(update.largest) or update.largest > 1e9
