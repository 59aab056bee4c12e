# SPDX-License-Identifier: Apache-2.0
"""Mini-epochs: each sample as often as wanted, within the fast tier, resumed, with the slow tier's faults."""

from __future__ import annotations

import runpy
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import millpond.data
from millpond.base.errors import LocalError
from millpond.base.sizes import bytes_of
from millpond.data.tier.mini_epochs import MiniEpochs


class Sorted:
    """Samples in the order of their classes; counts what is read."""

    def __init__(self, samples: int = 1000, size: int = 100) -> None:
        self.samples, self.size = samples, size
        self.reads: Counter[int] = Counter()
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        assert self.gate.wait(20)
        self.reads[index] += 1
        return {"image": torch.full((self.size,), float(index)), "label": index * 10 // self.samples}


def seen(mini_epochs: MiniEpochs) -> list[list[int]]:
    return [[int(sample["image"][0]) for sample in each] for each in mini_epochs]  # type: ignore[attr-defined]


def test_every_sample_is_visited_as_often_as_wanted_and_read_once_a_pass() -> None:
    data = Sorted()
    with millpond.data.mini_epochs(data, size=130, repeat=3, passes=2, seed=1) as made:
        parts = seen(made)
    assert Counter(index for part in parts for index in part) == dict.fromkeys(range(1000), 6)
    reads = Counter(data.reads)
    assert set(reads.values()) <= {2, 3}  # a few are read to know how large they are
    assert len(parts) == 2 * 8 * 3 and {len(part) for part in parts} == {125}
    assert all(sorted(a) == sorted(b) for a, b in zip(parts[::3], parts[1::3], strict=True))
    assert sorted(parts[0]) != sorted(parts[24])  # composed anew


def test_slices_of_sorted_storage_have_all_classes_and_stay_the_same_if_wanted() -> None:
    with millpond.data.mini_epochs(Sorted(), size=100, repeat=1, passes=2, recompose=False) as made:
        parts = seen(made)
    assert all(len({index // 100 for index in part}) == 10 for part in parts)
    assert [sorted(part) for part in parts[:10]] == [sorted(part) for part in parts[10:]]


@pytest.mark.parametrize("on_flash", [True, False])
def test_the_fast_tier_is_never_larger_than_asked_for(tmp_path: Path, on_flash: bool) -> None:
    class Ragged(Sorted):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(100 + 17 * (index % 41)), f"name {index}", None

    data, fast = Ragged(), 500_000
    sizes, found = [], Counter[str]()
    with millpond.data.mini_epochs(data, fast=fast, folder=tmp_path if on_flash else None, repeat=2) as made:
        for each in made:
            sizes.append(each._slot.used)
            found.update(each[index][1] for index in range(len(each)))
            assert not list(tmp_path.iterdir())  # nothing has a name that a crash would leave
    assert max(sizes) <= fast // 2 and len(sizes) > 8
    with pytest.raises(LocalError, match="is over, and no longer in the fast tier"):
        each[0]
    assert found == {f"name {index}": 2 for index in range(1000)}


def test_a_sample_that_is_larger_than_half_of_the_tier_is_told() -> None:
    with (
        millpond.data.mini_epochs(Sorted(10, 1000), fast=4000) as made,
        pytest.raises(LocalError, match="a sample is larger than half of the fast tier, 2000 bytes"),
    ):
        next(iter(made))


class Batched(Sorted):
    """Samples whose data set returns them as batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        images = torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, self.size)
        return {"image": images, "label": (torch.tensor(indices), np.array(indices))}


def test_a_data_set_that_returns_batches_is_taken_apart() -> None:
    with millpond.data.mini_epochs(Batched(), size=130, repeat=1, seed=1) as made:
        samples = [sample for each in made for sample in (each[index] for index in range(len(each)))]
    numbers = [int(sample["image"][0]) for sample in samples]
    assert sorted(numbers) == list(range(1000))
    assert all(len(sample["image"]) == 100 for sample in samples)
    assert numbers == [int(sample["label"][0]) for sample in samples]
    assert numbers == [int(sample["label"][1]) for sample in samples]


@pytest.mark.parametrize("wrong", [[1, 2], (torch.zeros(3, 2), torch.zeros(3)), 7, {}])
def test_what_is_neither_samples_nor_a_batch_of_them_is_refused_by_name(wrong: Any) -> None:
    class Wrong(Sorted):
        def __getitems__(self, _indices: list[int]) -> Any:
            return wrong

    with pytest.raises(LocalError, match=r"Wrong: a batch (of 64 samples holds a tensor|cannot be)"):
        millpond.data.mini_epochs(Wrong(), size=130)


def test_a_state_between_two_repetitions_is_resumed_exactly() -> None:
    options: dict[str, Any] = {"size": 90, "repeat": 3, "passes": 2, "seed": 4}
    with millpond.data.mini_epochs(Sorted(500), **options) as whole:
        expected = seen(whole)
    for stop in (1, 2, 3, 4, 17, len(expected)):
        with millpond.data.mini_epochs(Sorted(500), **options) as first:
            walk = iter(first)
            begun = [[int(s["image"][0]) for s in next(walk)] for _ in range(stop)]  # type: ignore[attr-defined]
            state = first.state_dict()
        with millpond.data.mini_epochs(Sorted(500), **options) as second:
            second.load_state_dict(state)
            assert begun + seen(second) == expected
    with (
        millpond.data.mini_epochs(Sorted(500), size=80) as other,
        pytest.raises(LocalError, match="mini-epochs of 84 samples, not 80"),
    ):
        other.load_state_dict(state | {"size": 84})


def test_auto_repeats_until_the_next_one_is_there() -> None:
    data = Sorted()
    with millpond.data.mini_epochs(data, size=500, repeat="auto") as made:
        walk = iter(made)
        first = next(walk)
        data.gate.clear()
        while first.repeat < 7:
            first = next(walk)
        data.gate.set()
        while first.place.start == 0:
            first = next(walk)
        assert made.repeats[0] >= 6
        assert [each.repeat for each in walk] == []  # nothing is fetched behind the last: once


def test_the_slow_tiers_errors_are_the_loops_and_the_thread_ends() -> None:
    class Broken(Sorted):
        def __getitem__(self, index: int) -> Any:
            if sum(self.reads.values()) > 700:
                raise OSError(5, "Input/output error", "shard-7")
            return super().__getitem__(index)

    before = threading.active_count()
    with (
        millpond.data.mini_epochs(Broken(), size=200, repeat=1, passes=3) as made,
        pytest.raises(OSError, match="Input/output error: 'shard-7'"),
    ):
        for _ in made:
            pass
    assert threading.active_count() == before
    data = Sorted()
    made = millpond.data.mini_epochs(data, size=100, repeat=1)
    walk = iter(made)
    next(walk)
    made.close()
    assert threading.active_count() == before


def test_augmentation_is_fresh_and_loaders_of_torch_read_it() -> None:
    calls = Counter[int]()

    def augment(sample: Any) -> Any:
        calls[int(sample["label"])] += 1
        return {**sample, "image": sample["image"] + torch.rand(1)}

    data = Sorted(200)
    with millpond.data.mini_epochs(data, size=100, repeat=2, augment=augment) as made:
        firsts = []
        for each in made:
            batches = list(DataLoader(each, batch_size=32, shuffle=True, num_workers=2 * (each.repeat == 2)))
            firsts.append(torch.cat([batch["image"][:, 0] for batch in batches]).sort().values)
            assert [len(batch["label"]) for batch in batches] == [32, 32, 32, 4]
    assert not torch.equal(firsts[0], firsts[1])
    assert np.allclose(firsts[0].floor(), firsts[1].floor())


def test_what_worked_is_remembered_for_data_set_and_model(tmp_path: Path) -> None:
    path = tmp_path / "repeats.json"

    def trained(scores: list[float], name: str = "digits, cnn") -> list[int]:
        with millpond.data.mini_epochs(Sorted(100), size=50, repeat="score", remember=(path, name)) as made:
            for _, score in zip(made, scores, strict=False):
                made.report(score)
            return made.repeats

    assert trained([5, 4, 3, 2, 2, 2, 2, 1, 1, 1, 1]) == [7, 4]
    assert trained([2.0] * 99) == trained([0.5] * 99) == [6, 6]
    assert trained([0.9] * 99, "other") == [4, 3]
    path.write_text("[]")
    with pytest.raises(LocalError, match="does not hold remembered repetitions"):
        trained([1.0])


def test_a_callback_reports_what_a_trainer_has_logged() -> None:
    class Logged:
        callback_metrics = {"val_loss": torch.tensor(0.5)}  # noqa: RUF012
        sanity_checking = True

    with millpond.data.mini_epochs(Sorted(100), size=50, repeat="bands") as made:
        callback = made.callback("val_loss")
        callback.on_validation_end(Logged(), None)
        assert made.state_dict()["scores"] == []
        trainer = Logged()
        trainer.sanity_checking = False
        callback.on_validation_end(trainer, None)
        assert made.state_dict()["scores"] == [0.5]
        with pytest.raises(LocalError, match="there is no metric 'loss'"):
            made.callback("loss").on_validation_end(trainer, None)


@pytest.mark.parametrize(("text", "size"), [("8 GiB", 8 << 30), ("1.5MiB", 3 << 19), ("12", 12), (7, 7)])
def test_sizes(text: str | int, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["8 GB", "GiB", "", "eight"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(LocalError, match="is no size such as 8 GiB"):
        bytes_of(text)


def test_a_tier_on_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with (
        millpond.data.mini_epochs(Sorted(), folder=tmp_path / "no") as made,
        pytest.raises(LocalError, match="No such"),
    ):
        next(iter(made))
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "mini-epochs.md").read_text()
    examples = [each.partition("```")[0] for each in text.split("```python\n")[1:]]
    (example,) = [each for each in examples if "mini_epochs(" in each]
    (tmp_path / "example.py").write_text(example)
    found = runpy.run_path(str(tmp_path / "example.py"))
    assert found["mini_epochs"].repeats == [4] * 16
