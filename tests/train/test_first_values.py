# SPDX-License-Identifier: Apache-2.0
"""A model's first values from a file, its frozen parameters, and the state that a task keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from millpond.agent.policy.error_reports import rebuilt
from millpond.base.errors import LocalError
from millpond.linux.syscalls import thread_name
from millpond.train.job.file import read_unsigned
from millpond.train.state import initial
from millpond.train.state.checkpoint import Checkpoint, save
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.private_state import PrivateState
from millpond.train.worker.error_reports import failure


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_checkpoint_of_millpond_is_taken(tmp_path: Path) -> None:
    first, second = model(), model()
    parameters = FlatParameters(first)
    save(tmp_path / "model.safetensors", Checkpoint(parameters.state, parameters.tensors, "job", 1))
    assert initial.load(second, tmp_path / "model.safetensors").startswith("9 tensors of the model are from")
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


def test_a_file_may_have_more_and_less_than_the_model(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(4, 3), "head": torch.ones(2)}, tmp_path / "base.safetensors")
    found = model()
    told = initial.load(found, tmp_path / "base.safetensors")
    assert "1 tensors of the model" in told and "such as 0.bias" in told and "such as head" in told
    assert torch.equal(found[0].weight, torch.ones(4, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_file_has_one_name_of_a_parameter_with_two(name: str, tmp_path: Path) -> None:
    save_file({name: torch.ones(4, 3)}, tmp_path / "base.safetensors")
    found = Tied()
    told = initial.load(found, tmp_path / "base.safetensors")
    assert told == "1 tensors of the model are from base.safetensors" and bool((found.head.weight == 1).all())


def sharded(folder: Path, weights: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    return path


def test_the_files_of_an_index_are_taken_and_sent(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(4, 3)}, tmp_path / "model-1.safetensors")
    save_file({"2.bias": torch.ones(2)}, tmp_path / "model-2.safetensors")
    index = sharded(tmp_path, {"0.weight": "model-1.safetensors", "2.bias": "model-2.safetensors"})
    found = model()
    assert initial.load(found, index).startswith(
        "2 tensors of the model are from model.safetensors.index.json"
    )
    assert bool((found[0].weight == 1).all()) and bool((found[2].bias == 1).all())
    lines = ('name = "x"', "[data]", 'private = "private/x"', "[evaluate]", "on = []", "[model]")
    job = (*lines, 'factory = "m:m"', f'initial = "{index.name}"')
    (tmp_path / "job.toml").write_text("\n".join(job))
    files = read_unsigned(tmp_path / "job.toml")[1]
    assert sorted(files) == ["model-1.safetensors", "model-2.safetensors", index.name]


@pytest.mark.parametrize("weights", [{}, [], {"a": "../b"}, {"a": 3}, {"a": "/etc/passwd"}])
def test_an_index_of_files_elsewhere_is_refused(weights: object, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="lists no files beside it as its weight_map"):
        initial.load(model(), sharded(tmp_path, weights))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"other": torch.ones(1)}, "has no tensor of the model"),
        ({"0.bias": torch.ones(5)}, r"\(5,\), the model's is"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tensors: dict[str, torch.Tensor], text: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "base.safetensors")
    with pytest.raises(LocalError, match=text):
        initial.load(model(), tmp_path / "base.safetensors")


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.safetensors").write_bytes(b"pickle")
    with pytest.raises(LocalError, match="cannot be read"):
        initial.load(model(), tmp_path / "base.safetensors")


BIG = 1 << 40


@pytest.mark.parametrize(
    ("built", "sent", "near"),
    [
        (torch.tensor([1.0, -3.0]), torch.tensor([1.0005, -3.0]), True),
        (torch.tensor([1.0, -3.0]), torch.tensor([1.01, -3.0]), False),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1e-9]), False),
        (torch.tensor(1.0), torch.tensor(0.0), False),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.015625]).bfloat16(), True),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.25, 2.0]).bfloat16(), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).double(), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, -torch.inf]), True),
        (torch.tensor([0.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), False),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, 0.0]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([1j, 2]), torch.tensor([1j, 2.0005]), True),
        (torch.tensor([1j, 2]), torch.tensor([1, 2 + 0j]), False),
        (torch.tensor([BIG, 1]), torch.tensor([BIG, 1]), True),
        (torch.tensor([BIG, 1]), torch.tensor([BIG, 2]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_first_values_of_the_host_are_the_models_but_for_rounding(
    built: torch.Tensor, sent: torch.Tensor, near: bool, tmp_path: Path
) -> None:
    found = nn.Module()
    found.register_buffer("value", built)
    found.register_buffer("other", torch.zeros(1))
    save_file({"value": sent, "other": torch.ones(1)}, tmp_path / "first.safetensors")
    assert initial.take_rounded(found, tmp_path / "first.safetensors", {"value"}) == ("" if near else "value")
    assert torch.equal(found.value, sent if near else built) or not built.isfinite().all()
    assert not found.other.any()


def test_a_tasks_state_is_found_again(tmp_path: Path) -> None:
    head = nn.Linear(2, 2)
    PrivateState(head, tmp_path).save(1, 7)
    again = nn.Linear(2, 2)
    PrivateState(again, tmp_path)
    assert torch.equal(head.weight, again.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_exchange_that_is_asked_for_again_begins_with_the_same_state(
    tmp_path: Path, restarted: bool
) -> None:
    """The host was ended between an update and the record of its round, or the round did not count."""
    head, found = nn.Linear(1, 1), []
    kept = PrivateState(head, tmp_path, "job 1")
    first = head.weight.item()
    for exchange in (1, 1, 2, 3, 3, 3, 4):
        if restarted:
            head = nn.Linear(1, 1)
            with torch.no_grad():
                head.weight.fill_(first)
            kept = PrivateState(head, tmp_path, "job 1")
        kept.begin(exchange, 7)
        found.append(round(head.weight.item() - first))
        with torch.no_grad():
            head.weight.add_(1)
        kept.save(exchange, 7)
    assert found == [0, 0, 1, 2, 2, 2, 3]
    later = PrivateState(head, tmp_path, "job 2")  # goes on with it
    later.begin(1, 7)
    assert round(head.weight.item() - first) == 4


def test_tasks_of_one_asynchronous_exchange_go_on_from_each_other(tmp_path: Path) -> None:
    """They differ in their seeds, and the updates of all count."""
    head, found = nn.Linear(1, 1), []
    kept, first = PrivateState(head, tmp_path, "job 1"), head.weight.item()
    for exchange, seed in ((1, 5), (2, 6), (3, 7), (3, 8), (3, 9), (3, 9), (4, 9)):
        kept.begin(exchange, seed)
        found.append(round(head.weight.item() - first))
        with torch.no_grad():
            head.weight.add_(1)
        kept.save(exchange, seed)
    assert found == [0, 1, 2, 3, 4, 4, 5]  # only the repeated one goes back


class Counted(nn.Module):
    """A state that says how many exchanges have led to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def advance(self, kept: PrivateState, exchange: int, recorded: int, *, records: bool = False) -> int:
        kept.begin(exchange, exchange, recorded)
        self.count += 1
        kept.save(exchange, exchange, records=records)
        return int(self.count)


@pytest.mark.parametrize("cut", [False, True])
def test_a_host_resumes_behind_the_last_exchange_that_it_has_recorded(tmp_path: Path, cut: bool) -> None:
    """Steps were done since, of which the host knows nothing; with a power cut the flash neither."""
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    for exchange, recorded in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4), (7, 4)):
        assert head.advance(kept, exchange, recorded, records=exchange in (2, 4)) == exchange
    if cut:
        os.truncate(tmp_path / "state-latest.safetensors", 0)
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    assert int(head.count) == (4 if cut else 7)
    assert head.advance(kept, 5, 4) == 5
    assert head.advance(kept, 6, 4, records=True) == 6
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    assert head.advance(kept, 5, 4) == 5  # the record of 6 was damaged
    assert head.advance(kept, 5, 4) == 5  # and 5 did not count


@pytest.mark.parametrize("asked_again", [8, 10])
def test_a_device_without_a_task_in_the_recorded_exchange_goes_back_to_its_last_one(
    tmp_path: Path, asked_again: int
) -> None:
    """Its samples of an epoch were used before those of others."""
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    for exchange, recorded in ((1, 0), (2, 0), (3, 0), (8, 5), (9, 5)):
        head.advance(kept, exchange, recorded)
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    assert head.advance(kept, asked_again, 5) == 4
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    assert head.advance(kept, asked_again + 1, asked_again) == 5  # of a job that had ended, for example


@pytest.mark.parametrize("failed", [(4,), (4, 6)])
def test_a_host_resumes_behind_an_exchange_after_which_it_could_record_none(
    tmp_path: Path, failed: tuple[int, ...]
) -> None:
    """Its disk was full: each time it has told the device to keep the state."""
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    for exchange, recorded in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2)):
        head.advance(kept, exchange, recorded, records=exchange in (2, *failed))
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    assert head.advance(kept, 3, 2) == 3


def test_a_job_that_begins_anew_begins_with_all_that_an_earlier_one_has_left(tmp_path: Path) -> None:
    """Its last exchanges were behind the last recorded one."""
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    for exchange, recorded in ((1, 0), (2, 1), (3, 1)):
        head.advance(kept, exchange, recorded, records=exchange == 1)
    for _ in range(2):  # its host was ended before it had recorded anything
        head = Counted()
        kept = PrivateState(head, tmp_path, "job 2")
        assert [head.advance(kept, exchange, 0) for exchange in (1, 2)] == [4, 5]


def test_only_what_is_recorded_waits_for_the_flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    monkeypatch.setattr(os, "fsync", synced.append)
    for exchange in range(1, 21):
        head.advance(kept, exchange, (exchange - 1) // 10 * 10, records=exchange % 10 == 0)
    assert len(synced) == 4  # the file, and its folder


def test_made_up_samples_and_scores_change_no_state(tmp_path: Path) -> None:
    head = Counted()
    kept = PrivateState(head, tmp_path, "job 1")
    head.count += 1
    kept.restore()
    assert head.advance(kept, 1, 0) == 1


def test_a_state_that_is_not_of_tensors_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(LocalError, match="tensors by name"):
        PrivateState(optimizer, tmp_path)


def test_a_state_of_another_shape_is_told_as_what_it_is(tmp_path: Path) -> None:
    PrivateState(nn.Linear(2, 2), tmp_path).save(1, 7)
    with pytest.raises(LocalError, match="does not fit it any more: give the job another name") as caught:
        PrivateState(nn.Linear(3, 2), tmp_path)
    report = failure(LocalError(str(caught.value)), tmp_path / "code", "net:Net", full=False)
    assert rebuilt(report, (), {}).text == str(caught.value)


def test_a_worker_that_waits_for_the_flash_to_take_a_state_says_so(tmp_path: Path) -> None:
    """It uses no processor time meanwhile, and would pass for one that hangs."""
    names: list[bytes] = []

    class Head(nn.Linear):
        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            names.append(thread_name())
            return super().state_dict(*arguments, **options)

    before = thread_name()
    PrivateState(Head(2, 2), tmp_path).save(1, 7)
    assert names[-1] == b"reading samples" and thread_name() == before
