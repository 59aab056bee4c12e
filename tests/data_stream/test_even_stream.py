# SPDX-License-Identifier: Apache-2.0
"""Even streams: as many batches on each rank, so that plain DistributedDataParallel ends."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import millpond.data
from millpond.base.errors import LocalError
from millpond.data.streaming.protocol.epoch_order import even_steps
from millpond.train.balance.ranges import count

from ..forking import TRAINING, server
from ..ports import unused_port
from .served import SAMPLES, images, service

WORKER = Path(__file__).with_name("even_worker.py")
EXAMPLE = Path(__file__).parents[2] / "agent/examples/streamed_ddp.py"
RANKS, ODD = 2, 101


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 50])
def test_ranks_take_as_many_samples_in_each_step_and_none_twice(ranks: int, batch: int) -> None:
    left = ((3, 5), (9, 10), (20, 60))
    steps = [list(even_steps(left, batch, rank, ranks)) for rank in range(ranks)]
    sizes = [[count(own) for own, _ in each] for each in steps]
    assert all(each == sizes[0] for each in sizes) and set(sizes[0][:-1]) <= {batch}
    assert [rest for _, rest in steps[0]] == [rest for _, rest in steps[-1]]
    taken = [at for own, _ in chain(*steps) for start, stop in own for at in range(start, stop)]
    rest = [at for start, stop in steps[0][-1][1] for at in range(start, stop)]
    assert len(rest) < ranks
    assert sorted(taken + rest) == [at for start, stop in left for at in range(start, stop)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("data")
    images(folder / "images", ODD)
    _, indices = images(folder / "digits", ODD)
    np.save(folder / "digits" / "labels.npy", indices % 10)
    ports = {"MASTER_PORT": str(unused_port()), "SECOND_PORT": str(unused_port())}
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", **ports}
    with service(folder) as where, ExitStack() as undo:
        environments = [os.environ | common | {"RANK": str(rank)} for rank in range(RANKS)]
        arguments = (WORKER, where, EXAMPLE, folder / "saved")
        started = [server(*TRAINING).start(*arguments, env=env) for env in environments]
        workers = [undo.enter_context(worker) for worker in started]
        answers = [worker.communicate(timeout=100) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * RANKS, answers
    return [answer.splitlines() for answer, _ in answers]


def test_plain_ddp_ends_with_a_set_that_does_not_divide(ranks: list[list[str]]) -> None:
    for each in ranks:
        assert [line for line in each if "batches" in line] == [
            f"epoch {epoch}: 7 batches, 50 samples" for epoch in (1, 2)
        ]


def test_what_was_saved_in_the_background_has_the_stream_and_the_model(ranks: list[list[str]]) -> None:
    for each in ranks:
        stream = json.loads(each[-1])["saved"]
        assert (stream["epoch"], stream["cursor"], stream["samples"]) == (2, 0, ODD)


def test_an_epoch_that_all_ranks_leave_goes_on(ranks: list[list[str]]) -> None:
    seen = list(chain(*chain(*(json.loads(each[-1])["parts"] for each in ranks))))
    assert len(seen) == len(set(seen)) == ODD - 1


def test_ranks_whose_streams_differ_are_told_and_do_not_hang(ranks: list[list[str]]) -> None:
    for each in ranks:
        assert "the ranks' streams differ in data set, seed, batch" in json.loads(each[-1])["refused"]


def labels(stream: Any) -> list[int]:
    return [label for _, batch in stream for label in batch.tolist()]


def test_the_samples_left_out_are_others_in_each_epoch_and_states_are_those_of_leases(where: str) -> None:
    even, leased = (millpond.data.stream(f"{where}/images", batch=24, even=even) for even in (True, False))
    whole = [labels(even), labels(even)]
    assert [sorted(each) for each in whole] == [list(range(SAMPLES))] * 2 and whole[0] != whole[1]
    seen = list[int]()
    for _, (_, found) in zip(range(3), leased, strict=False):
        seen += found.tolist()
    even.load_state_dict(leased.state_dict())
    assert sorted(seen + labels(even)) == list(range(SAMPLES))
    leased.load_state_dict(even.state_dict())
    assert labels(leased) == whole[1]
    leased.load_state_dict({"epoch": 0, "cursor": 5, "samples": 9})
    even.load_state_dict({"epoch": 0, "cursor": 5, "samples": 9})
    with pytest.raises(LocalError, match="is of 9 samples; the data set has 200"):
        labels(even)


def test_a_state_is_loaded_between_iterations(where: str) -> None:
    stream = millpond.data.stream(f"{where}/images", batch=24, even=True)
    for number, _ in enumerate(stream):
        with pytest.raises(LocalError, match="a state is loaded between iterations"):
            stream.load_state_dict({"epoch": 0, "cursor": 0, "samples": SAMPLES})
        if number:
            break
    stream.load_state_dict({"epoch": 0, "cursor": 0, "samples": SAMPLES})
    assert len(labels(stream)) == SAMPLES


@pytest.mark.parametrize("options", [{}, {"batch": 8, "run": "mine"}, {"batch": 8, "chunk": 4}])
def test_options_of_consumers_that_lease_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LocalError, match="even batches"):
        millpond.data.stream("127.0.0.1:9/images", even=True, **options)


def test_ranks_must_be_known(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = millpond.data.stream(f"{where}/images", batch=8, even=True)
    with pytest.raises(LocalError, match="a DataLoader has no processes"):
        list(DataLoader(stream, batch_size=None, num_workers=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LocalError, match="even batches need the ranks: call torch"):
        labels(stream)
