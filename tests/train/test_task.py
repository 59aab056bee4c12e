# SPDX-License-Identifier: Apache-2.0
"""A job's task: its hooks and their defaults, from module, class or function, and what they must return."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.base.errors import LocalError
from millpond.train.balance.data_plan import order
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import of_arrays
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.job.variation import Variation
from millpond.train.local.evaluation import evaluate
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders, Selection
from millpond.train.protocol import Folder, Update, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.made_up import Synthetic
from millpond.train.task.task import Task
from millpond.train.worker import user_code

from ..job_files import written

WORK = WorkSpec("tests", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.1))
FOLDERS = [Folder("a", "csd0"), Folder("b", "csd0", public=True)]
COUNTS = (20, 12)
Text = dict[str, Tensor]


class Texts:
    """Texts of 3 to 9 tokens, as one reads them: rows that are padded only in their batch."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = [torch.from_numpy(rng.integers(1, 12, rng.integers(3, 10))) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Language:
    """A task of the next token, whose loss counts tokens."""

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def collate(self, samples: Sequence[Tensor]) -> Text:
        padded = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        return {"tokens": padded, "mask": padded[:, 1:] != 0}

    def loss(self, model: nn.Module, batch: Text) -> tuple[Tensor, Tensor]:
        logits, wanted = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        every = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return (every * batch["mask"].flatten()).sum(), batch["mask"].sum()

    def metrics(self, model: nn.Module, batch: Text) -> dict[str, tuple[Tensor, Tensor]]:
        found = model(batch["tokens"][:, :-1]).argmax(-1) == batch["tokens"][:, 1:]
        return {"next": ((found & batch["mask"]).sum(), batch["mask"].sum())}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(means["loss"])}


PARTS = [Texts(count, number) for number, count in enumerate(COUNTS)]


def trainer(user: object, parts: Sequence[Any] = PARTS, work: WorkSpec = WORK) -> LocalTrainer:
    task = Task(user)
    folders = SampleFolders(task, work.seed, FOLDERS[: len(parts)], parts, work.held_out)
    return LocalTrainer(FlatParameters(task.model()), task, folders, work)


def run(one: LocalTrainer, *shares: tuple[int, int]) -> Update:
    """Return the update of the samples between these positions of each folder's order."""
    ranges = tuple((share,) if share[0] < share[1] else () for share in shares)
    return one.run(Work(1, 5, 1, ranges), one.parameters.state.copy())


def test_uneven_batches_of_tokens_are_one_batch() -> None:
    """Sums of gradients and counts of tokens add up, however the texts are dealt."""
    ends = [(0, 0), (1, 0), (9, 1), (9, 8), (20, 12)]
    total, weight, loss = np.zeros(12 * 8 + 8 * 12 + 12), 0.0, 0.0
    one = trainer(Language())
    for (a, b), (c, d) in itertools.pairwise(ends):
        update = run(one, (a, c), (b, d))
        assert update.samples == c - a + d - b != update.weight == update.metrics["loss"][1]
        total, weight = total + one.parameters.sums, weight + update.weight
        loss += update.metrics["loss"][0]
    whole = run(one, (0, 20), (0, 12))
    tokens = sum(len(row) - 1 for part in PARTS for row in part.rows)
    assert whole.weight == weight == tokens
    assert whole.metrics["loss"] == (pytest.approx(loss, rel=1e-6), tokens)
    assert np.allclose(one.parameters.sums, total, atol=1e-5) and np.abs(total).max() > 0.1

    model, language = Language().model(), Language()
    found, count = language.loss(model, language.collate([row for part in PARTS for row in part.rows]))
    found.backward()  # type: ignore[no-untyped-call]
    plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()
    assert int(count) == tokens and np.allclose(one.parameters.sums, plain, atol=1e-5)


def test_metrics_are_sums_and_counts_and_a_summary_of_their_means() -> None:
    task, model = Task(Language()), Language().model().eval()
    every = [np.arange(count) for count in COUNTS]
    chosen = Selection(task, PARTS, every, every[0])
    found = [evaluate(model, task, chosen, replace(WORK, batch=batch)) for batch in (3, 32)]
    with torch.no_grad():
        batch = Language().collate([row for part in PARTS for row in part.rows])
        loss, tokens = Language().loss(model, batch)
    for each in found:
        assert set(each) == {"next", "loss"}
        assert each["loss"] == (pytest.approx(loss.item(), rel=1e-5), int(tokens))
        assert each["next"] == found[0]["next"] and each["next"][1] == int(tokens)
        figures = task.summary(each)
        assert figures["perplexity"] == pytest.approx(math.exp(loss.item() / int(tokens)), rel=1e-5)
        assert figures["next"] == each["next"][0] / int(tokens)


def test_sums_that_are_too_large_for_a_summary_are_figures_that_are_not_finite() -> None:
    """exp() of a large loss raises: one device that diverges, or says so, must not end the job."""
    task = Task(Language())
    with pytest.raises(OverflowError):
        task.summary({"loss": (1e6, 1.0)})
    assert task.summary({"loss": (0.0, 1.0)}) == {"loss": 0.0, "perplexity": 1.0}
    found = task.summary({"loss": (1e6, 1.0)})
    assert found["loss"] == 1e6 and math.isnan(found["perplexity"])


def test_samples_that_are_held_out_are_private_ones_in_whole_groups() -> None:
    found = []
    for seed, group in ((0, 4), (1, 4), (0, 1)):
        folders = [replace(FOLDERS[0], group=group), FOLDERS[1]]
        made = SampleFolders(Task(Language()), seed, folders, PARTS, 0.3)
        assert (made.held, made.counts) == (((8, 0), (12, 12)) if group == 4 else ((6, 0), (14, 12)))
        found.append(sorted(map(tuple, made.held_out().batch(np.arange(made.held[0]))["tokens"].tolist())))
    assert found[0] == found[1] != found[2]
    few = SampleFolders(Task(Language()), 0, [replace(FOLDERS[0], group=11)], PARTS[:1], 0.3)
    assert (few.held, few.counts) == ((0,), (20,))


def test_made_up_samples_are_like_the_real_ones() -> None:
    one = trainer(Language())
    before = one.run(Work(1, 5, 1, (), synthetic=7), one.parameters.state.copy())
    assert (before.samples, before.weight, before.metrics) == (7, 1.0, {"loss": (0.0, 1.0)})


class Pair(NamedTuple):
    """A batch as a named tuple, which torch's default_collate keeps."""

    tokens: Tensor
    name: Any


def test_nothing_of_a_sample_is_in_made_up_ones() -> None:
    real = {"pair": Pair(torch.ones(1, 2), ["a private text"]), "length": 7, "flag": [torch.ones(1)]}
    whole = type("Whole", (), {"__getitems__": lambda _, wanted: real})()
    made = Synthetic(Task(Language()), whole, 3).batch(np.arange(2))
    assert isinstance(made["pair"], Pair) and made["pair"].tokens.shape == (2, 2)
    assert (made["pair"].name, made["length"]) == (["", ""], 0)
    assert len(made["flag"]) == 1 and made["flag"][0].shape == (2,)


class Graphs(Language):
    """A task whose batches join the nodes of all samples."""

    def collate(self, samples: list[Any]) -> Any:
        nodes = [torch.as_tensor(sample["nodes"]) for sample in samples]
        return torch.cat(nodes), torch.tensor([len(each) for each in nodes]), samples[0]["name"]


def test_batches_that_join_samples_are_made_of_made_up_ones() -> None:
    real = {"nodes": np.full((3, 2), 5), "name": "a private text"}
    nodes, sizes, name = Synthetic(Task(Graphs()), [real], 3, 1).batch(np.arange(4))
    assert (nodes.shape, nodes.unique().tolist(), sizes.tolist(), name) == ((12, 2), [1], 4 * [3], "")


class Whole(Texts):
    """Texts that come in whole batches."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.asked: list[list[int]] = []

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> Text:
        self.asked.append(indices)
        rows = [nn.functional.pad(self.rows[index], (0, 10 - len(self.rows[index]))) for index in indices]
        tokens = torch.stack(rows)
        return {"tokens": tokens, "mask": tokens[:, 1:] != 0}


def test_whole_batches_are_taken_as_they_are_and_joined_over_folders() -> None:
    parts = [Whole(count, number) for number, count in enumerate(COUNTS)]
    one, other = trainer(Language(), parts), trainer(Language())
    assert run(one, (0, 5), (2, 4)).metrics["loss"] == pytest.approx(
        run(other, (0, 5), (2, 4)).metrics["loss"], rel=1e-6
    )
    assert np.allclose(one.parameters.sums, other.parameters.sums, atol=1e-6)
    expected = [
        order(len(part), 0, 1, "csd0", public)[start:stop].tolist()
        for part, public, start, stop in ((parts[0], False, 0, 5), (parts[1], True, 2, 4))
    ]
    assert [part.asked for part in parts] == [[expected[0]], [expected[1]]]


def test_named_tuples_are_joined_over_folders() -> None:
    class Named(Texts):
        def __getitems__(self, indices: list[int]) -> Any:
            return Pair(torch.tensor(indices), torch.ones(len(indices), 2))

    parts = [Named(4, 1), Named(5, 2)]
    found = Task(Language()).fetch([(parts[0], np.array([2, 1])), (parts[1], np.array([4]))])
    assert isinstance(found, Pair) and found.tokens.tolist() == [2, 1, 4] and found.name.shape == (3, 2)


def test_samples_that_come_in_lists_are_collated() -> None:
    class Listed(Texts):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [self.rows[index] for index in indices]

    parts = [Listed(count, number) for number, count in enumerate(COUNTS)]
    assert run(trainer(Language(), parts), (0, 5), (2, 4)).metrics == (
        run(trainer(Language()), (0, 5), (2, 4)).metrics
    )


def test_batches_that_cannot_be_joined_are_refused() -> None:
    task = Task(Language())

    class Odd:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> None: ...

        def __getitems__(self, indices: list[int]) -> str:
            return "a batch"

    one = np.zeros(1, np.int64)
    assert task.fetch([(Odd(), one)]) == "a batch"
    with pytest.raises(LocalError, match="in batches that cannot be joined"):
        task.fetch([(Odd(), one), (Odd(), one)])


class Scalar:
    """A task of numbers in torch's default batches."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, folder: Path, split: str) -> list[tuple[Tensor, float]]:
        assert folder.is_absolute() and split in ("train", "test")
        return [(torch.full((1,), float(n)), self.scale * n) for n in range(4 if split == "train" else 2)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0])[:, 0] - batch[1]).square().sum(), len(batch[1])


def test_a_data_set_is_of_a_folder_and_a_split(tmp_path: Path) -> None:
    task = Task(Scalar())
    assert not task.classifies_images
    train, test = (task.dataset(tmp_path, ".", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (4, 2)
    inputs, wanted = task.fetch([(train, np.array([3, 1]))])
    assert inputs.tolist() == [[3.0], [1.0]] and wanted.tolist() == [3.0, 1.0]
    with pytest.raises(DataError, match="missing data: there is no folder b"):
        task.dataset(tmp_path, "b", "train")
    assert set(task.metrics(task.model(), (inputs, wanted.float()))) == {"loss"}


def test_the_defaults_classify_images(tmp_path: Path) -> None:
    class Logits(nn.Module):
        def forward(self, images: Tensor) -> Any:
            return type("Output", (), {"logits": images.flatten(1)})

    class Only:
        model = Logits

    task = Task(Only())
    part = of_arrays(np.eye(4, dtype=np.float32).reshape(4, 1, 2, 2), np.array([0, 1, 2, 2]))
    batch = task.fetch([(part, np.arange(4))])
    loss, count = task.loss(task.model(), batch)
    found = task.metrics(task.model(), batch)
    assert found == {"accuracy": (3.0, 4.0), "loss": (pytest.approx(loss.item()), count)}
    assert task.classifies_images and task.summary(found)["accuracy"] == 0.75
    assert task.optimizer([]) is None and task.summary({}) == {}


CODE = """
import torch
from torch import nn

def model(width=2): return nn.Linear(width, 1)
def loss(model, batch): return model(batch).sum(), len(batch)

class Job:
    def __init__(self, width=2): self.width = width
    def model(self): return nn.Linear(self.width, 1)
    def loss(self, model, batch): return model(batch).sum(), len(batch)

def made(width): return Job(width)
def bare(): return nn.Linear(2, 1)
def none(): return None

class Wrong:
    def model(self): return "a model"
"""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    written({"user_task.py": CODE}, tmp_path)
    yield tmp_path
    user_code.forget(tmp_path)


def build(factory: str, code: Path, **arguments: object) -> tuple[Task, nn.Module]:
    work = WorkSpec("tests", ModelSpec(factory, ("user_task.py",), arguments=dict(arguments)), task=True)
    return user_code.build(work, code)


@pytest.mark.parametrize("factory", ["user_task", "user_task:Job", "user_task:made"])
def test_a_task_is_a_module_a_class_or_what_a_function_makes(code: Path, factory: str) -> None:
    task, model = build(factory, code, width=3)
    assert isinstance(model, nn.Linear) and model.weight.shape == (1, 3)
    total, count = task.loss(model, torch.ones(5, 3))
    assert total.numel() == 1 and count == 5.0


@pytest.mark.parametrize(
    ("factory", "arguments", "told"),
    [
        (
            "user_task:bare",
            {},
            "task: factory: user_task:bare returned a Linear without a hook 'model'; name it",
        ),
        ("user_task:none", {}, "task: factory: user_task:none returned a NoneType without a hook 'model'"),
        ("user_task:Jobs", {}, "task: factory: module user_task has no callable 'Jobs'"),
        ("user_task:made", {}, "task: arguments: user_task:made: missing a required argument: 'width'"),
        ("user_task:Job", {"wide": 3}, "task: arguments: user_task:Job: got an unexpected keyword"),
        ("user_task", {"wide": 3}, "task: arguments: user_task: got an unexpected keyword"),
        ("user_task:Wrong", {}, "the task's model is a str, not a torch.nn.Module"),
        ("user_tasks", {}, "task: factory: there is no module 'user_tasks'; list its file in files"),
        ("math", {}, "task: factory: module math has no hook 'model'"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(
    code: Path, factory: str, arguments: dict[str, object], told: str
) -> None:
    with pytest.raises(LocalError) as caught:
        build(factory, code, **arguments)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


class Returning:
    """A task whose loss or metrics return ``found``."""

    def __init__(self, found: object) -> None:
        self.found = found

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, *_: object) -> object:
        return self.found

    def metrics(self, *_: object) -> object:
        return self.found


@pytest.mark.parametrize(
    "found", [None, 3, torch.zeros(()), (1.0, 1), (torch.zeros(2), 2), (torch.zeros(()), 1, 1)]
)
def test_a_loss_is_a_sum_and_a_count(found: object) -> None:
    with pytest.raises(
        LocalError, match=r"^the task's loss must return a sum, a tensor of one value, and its"
    ):
        Task(Returning(found)).loss(nn.Linear(1, 1), None)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "must return a dict of names to sums and counts"),
        ([("a", 1)], "must return a dict of names to sums and counts"),
        ({"a": 1.0}, "each of the task's metrics must be a sum and a count"),
        ({"a": (1.0, 1, 1)}, "each of the task's metrics must be a sum and a count"),
        ({"a": (torch.zeros(2), 1)}, "each of the task's metrics must be a sum and a count"),
        ({"a": ("x", 1)}, "each of the task's metrics must be a sum and a count"),
        ({"name of a patient": (1.0, 1)}, "must be at most 32, named by identifiers"),
        ({33 * "a": (1.0, 1)}, "must be at most 32, named by identifiers"),
        ({3: (1.0, 1)}, "must be at most 32, named by identifiers"),
        ({f"a{n}": (1.0, 1) for n in range(33)}, "must be at most 32, named by identifiers"),
    ],
)
def test_metrics_are_few_and_named_by_identifiers(found: object, told: str) -> None:
    with pytest.raises(LocalError, match=told):
        Task(Returning(found)).metrics(nn.Linear(1, 1), None)


class RandomPart:
    """A task that takes a random part of a folder, as one splits data in a notebook."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, _folder: Path, _split: str) -> Sequence[float]:
        drawn = (torch.randperm(100)[:10].tolist(), np.random.permutation(100)[:10].tolist())
        return [*map(float, drawn[0] + drawn[1] + random.sample(range(100), 10))]


def test_a_random_part_of_a_folder_is_the_same_one_in_all_jobs(tmp_path: Path) -> None:
    """Otherwise other seeds would be other samples, whose groups are others."""
    task = Task(RandomPart(), "npy", ())
    found = []
    for seed in range(3):
        generators.plant(seed)
        found.append(list(task.dataset(tmp_path, ".", "train")))  # type: ignore[call-overload]
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
        generators.plant(seed)
        assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    assert found[0] == found[1] == found[2]


class Own:
    """A task that has a data set of its own."""

    model = dataset = nn.Identity


@pytest.mark.parametrize("variation", [Variation(resize=8), Variation(crop=4), Variation(flip=True)])
def test_images_are_not_varied_where_a_task_has_a_data_set_of_its_own(variation: Variation) -> None:
    with pytest.raises(LocalError, match="data: resize, crop and flip are for labelled images"):
        Task(Own(), variation=variation)
    Task(Own(), variation=Variation())
