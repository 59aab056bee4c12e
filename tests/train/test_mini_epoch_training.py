# SPDX-License-Identifier: Apache-2.0
"""Local training in mini-epochs: what is read how often, in which batches, and in how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.data.errors import DataError
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.mini_epochs import MiniEpochReader
from millpond.train.local.prefetch import ReadingMeter
from millpond.train.local.selection import SampleFolders, Selection
from millpond.train.protocol import Folder, Work
from millpond.train.repeats import FixedRepeats, RepeatSpec
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import Task

WIDTH, GROUP = 6, 4
WORK = WorkSpec(
    "tests", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.05), passes=5, batch=8, mini_epoch=40
)


class Flash:
    """A data set that counts what is read; each sample is its own number."""

    def __init__(self, count: int, first: int = 0, broken: int = -1) -> None:
        self.count, self.first, self.broken = count, first, broken
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise DataError("a sample is torn")
        self.reads[index] += 1
        return torch.full((WIDTH,), float(self.first + index)), index % 2


class InBatches(Flash):
    """The same, a whole batch at a time."""

    def __getitems__(self, wanted: Sequence[int]) -> dict[str, torch.Tensor]:
        found = [self[index] for index in wanted]
        return {"x": torch.stack([x for x, _ in found]), "y": torch.tensor([y for _, y in found])}


class InArrays(InBatches):
    """The same, as arrays."""

    def __getitems__(self, wanted: Sequence[int]) -> dict[str, Any]:
        return {key: value.numpy() for key, value in super().__getitems__(wanted).items()}


class Recorded:
    """A task whose loss notes the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    @staticmethod
    def model() -> nn.Module:
        return nn.Linear(WIDTH, 2)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, labels = map(torch.as_tensor, batch.values() if isinstance(batch, dict) else batch)
        self.batches.append([int(value) for value in inputs[:, 0]])
        return nn.functional.cross_entropy(model(inputs / 100), labels, reduction="sum"), len(labels)


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


def trained(
    parts: Sequence[Flash], fast: int = 1 << 20, work: WorkSpec = WORK, user: Recorded | None = None
) -> tuple[Recorded, LocalTrainer]:
    user = user or Recorded()
    task = Task(user)
    folders = SampleFolders(task, 0, [Folder(f"p{n}", "csd0", group=GROUP) for n in range(len(parts))], parts)
    torch.manual_seed(0)
    one = LocalTrainer(FlatParameters(user.model()), task, folders, work, fast=fast)
    ranges = tuple(((0, len(part)),) for part in parts)
    one.run(Work(0, 3, 1, ranges), one.parameters.state.copy())
    return user, one


def slices(samples: int, fast: int, chosen: Selection) -> Iterator[Selection]:
    """Return the mini-epochs of a selection, each once."""
    reader = MiniEpochReader(samples, fast, FixedRepeats(1), ReadingMeter())
    found = reader.repetitions(chosen, torch.Generator().manual_seed(1), lambda _: (0.0, None, None))
    return (mini_epoch for mini_epoch, _ in found)


@pytest.mark.parametrize("kind", [Flash, InBatches, InArrays])
def test_each_sample_is_read_once_and_trained_on_in_each_epoch(kind: type[Flash]) -> None:
    parts = [kind(100), kind(53, first=1000)]
    user, one = trained(parts)
    visits = Counter(value for batch in user.batches for value in batch)
    assert set(visits.values()) == {WORK.passes} and len(visits) == 153
    few = sum(part.reads.total() for part in parts) - 153
    assert 0 < few <= 8  # those that the size of a sample is measured with
    _, plain = trained([kind(100), kind(53, first=1000)], work=replace(WORK, mini_epoch=0))
    assert one.parameters.sums.shape == plain.parameters.sums.shape
    again, _ = trained([kind(100), kind(53, first=1000)])
    assert again.batches == user.batches


def test_mini_epochs_and_their_batches_are_of_whole_groups_from_all_over_the_storage() -> None:
    part = Flash(120)
    user, _ = trained([part])
    steps = len(user.batches) // 3  # three mini-epochs of 40
    slices = [user.batches[start : start + steps] for start in range(0, 3 * steps, steps)]
    members = [{value for batch in each for value in batch} for each in slices]
    assert [len(each) for each in members] == [40, 40, 40]
    assert len(set.union(*members)) == 120
    assert all(max(each) - min(each) > 80 for each in members)
    groups = {frozenset(b[start : start + GROUP]) for b in user.batches for start in range(0, len(b), GROUP)}
    assert len(groups) == 30, "the groups of samples are the same in all batches"


def test_a_small_fast_tier_has_smaller_mini_epochs() -> None:
    fast = 2 * 16 * 4 * WIDTH
    user = Recorded()
    task, part = Task(user), Flash(120)
    every = np.arange(120)
    chosen = Selection(task, [part], [every], np.full(120, 1))
    found = []
    for each in slices(40, fast, chosen):
        found.append(len(each))
        begun = part.reads.total() - sum(found) - 8
        assert begun <= 16, "no more than the next mini-epoch is read ahead"
    assert sum(found) == 120 and max(found) <= 16 and max(found) - min(found) <= 1
    with pytest.raises(LocalError, match="is over, and no longer in the fast tier"):
        each.batch(np.arange(2))


def test_mini_epochs_are_even_and_a_group_has_to_fit() -> None:
    task, part, every = Task(Recorded()), Flash(1000), np.arange(1000)
    chosen = Selection(task, [part], [every], np.full(10, 100))
    assert [len(each) for each in slices(350, 1 << 20, chosen)] == [300, 300, 200, 200]
    told = r"\[tier\] fast holds [0-9]+ samples twice, and a group of them is 100"
    with pytest.raises(DataError, match=told):
        next(slices(350, 2 * 50 * 4 * WIDTH, chosen))


class Pictures(Flash):
    """Samples of which no columns can be made."""

    def __getitem__(self, index: int) -> Any:
        return Counter({index: 1}), super().__getitem__(index)


def test_samples_of_any_kind_are_kept() -> None:
    class Collating(Recorded):
        @staticmethod
        def collate(samples: list[Any]) -> Any:
            assert all(picture[int(x[0])] for picture, (x, _) in samples)
            return torch.stack([x for _, (x, _) in samples]), torch.tensor([y for _, (_, y) in samples])

    user, _ = trained([Pictures(60)], user=Collating())
    assert Counter(value for batch in user.batches for value in batch) == dict.fromkeys(
        range(60), WORK.passes
    )


@pytest.mark.parametrize("batched", [False, True])
def test_views_of_what_lies_on_the_flash_are_read_when_they_are_fetched(batched: bool) -> None:
    flash = torch.zeros(64, WIDTH)

    class Mapped:
        def __len__(self) -> int:
            return len(flash)

        def __getitem__(self, index: int) -> Any:
            return flash[index]

        def __getitems__(self, wanted: Sequence[int]) -> Any:
            return flash[: len(wanted)] if batched else [flash[index] for index in wanted]

    chosen = Selection(Task(Recorded()), [Mapped()], [np.arange(16)], np.full(2, 8))
    for each in slices(16, 1 << 20, chosen):
        flash += 1
        assert not each.batch(np.arange(16)).any()


def test_errors_of_the_data_set_are_raised() -> None:
    with pytest.raises(DataError, match="a sample is torn"):
        trained([Flash(120, broken=100)])


class Rated(Recorded):
    """A task with an accuracy, whose samples of one class are hard."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        inputs, labels = batch
        return {"accuracy": (float((model(inputs / 100).argmax(1) == labels).sum()), len(labels))}


ADAPTIVE = replace(WORK, passes=12, repeat=RepeatSpec("score", {"patience": 2}))


def test_a_rule_ends_the_repetitions_of_each_mini_epoch_and_repeats_alike_when_it_is_done_again() -> None:
    user, one = trained([Flash(120)], work=ADAPTIVE)
    visits = Counter(value for batch in user.batches for value in batch)
    assert len(visits) == 120 and max(visits.values()) <= 12 and min(visits.values()) < 12
    again, other = trained([Flash(120)], work=ADAPTIVE)
    assert again.batches == user.batches and np.array_equal(one.parameters.sums, other.parameters.sums)
    every, _ = trained([Flash(120)], work=replace(ADAPTIVE, repeat=RepeatSpec()))
    assert len(every.batches) > len(user.batches)


@pytest.mark.parametrize("name", ["score", "bands", "bollinger"])
def test_errors_of_training_and_of_what_is_held_out_are_weighed(name: str) -> None:
    work = replace(WORK, held_out=0.2, repeat=RepeatSpec(name, {"weights": (0.0, 1.0, 1.0)}))
    part, user = Flash(120), Rated()
    task = Task(user)
    folders = SampleFolders(task, 0, [Folder("p", "csd0", group=GROUP)], [part], 0.2)
    one = LocalTrainer(FlatParameters(user.model()), task, folders, work, fast=1 << 20)
    update = one.run(Work(0, 3, 1, (((0, folders.counts[0]),),)), one.parameters.state.copy())
    assert update.data.mini_epochs == 3 and 3 <= update.data.repeats <= 3 * WORK.passes
    counted = update.metrics["loss"][1]
    assert counted == pytest.approx(folders.counts[0]), "the loss is the mean of all repetitions"
    with pytest.raises(DataError, match=r"weighs an error, which is 1 - accuracy; the task has no such"):
        trained([Flash(120)], work=replace(work, held_out=0.0))


def test_the_samples_of_a_local_sgd_exchange_are_read_once_and_repeated_in_its_steps() -> None:
    part = Flash(96)
    user, _ = trained([part], work=replace(WORK, batch=0, steps=4, mini_epoch=96))
    assert set(Counter(value for batch in user.batches for value in batch).values()) == {WORK.passes}
    assert len(user.batches) == 4 * WORK.passes and set(map(len, user.batches)) == {24}
    assert part.reads.total() - 96 <= 8
    twice = RepeatSpec("bands", {"first": 2})
    again, _ = trained([Flash(96)], work=replace(WORK, batch=0, steps=4, mini_epoch=96, repeat=twice))
    assert len(again.batches) == 2 * 4


def test_a_loss_that_is_not_finite_repeats_as_often_as_the_job_has_epochs() -> None:
    work = replace(ADAPTIVE, passes=3, optimizer=OptimizerSpec("sgd", 1e38))
    user, _ = trained([Flash(40)], work=work)
    assert set(Counter(value for batch in user.batches for value in batch).values()) == {3}
