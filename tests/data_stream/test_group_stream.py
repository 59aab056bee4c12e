# SPDX-License-Identifier: Apache-2.0
"""A group's loader over a stream: the batches of data in memory, bit for bit, and each sample once."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond.data
from millpond.base.errors import LocalError
from millpond.data.streaming.by_index import IndexedStream
from millpond.train import group

from ..forking import TRAINING, server
from ..ports import unused_port
from .served import SAMPLES, images, service

WORKER = Path(__file__).with_name("group_worker.py")
RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data")
    images(folder / "images")
    port = str(unused_port())
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with service(folder) as where, ExitStack() as undo:
        environments = [os.environ | common | {"RANK": str(rank)} for rank in range(RANKS)]
        started = [server(*TRAINING).start(WORKER, where, folder, env=env) for env in environments]
        workers = [undo.enter_context(worker) for worker in started]
        answers = [worker.communicate(timeout=100) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * RANKS, answers
    return [json.loads(answer) for answer, _ in answers]


def test_streamed_batches_are_those_of_data_in_memory(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["streamed"] == each["memory"]


def test_each_sample_is_taken_once_while_batches_change(ranks: list[dict[str, Any]]) -> None:
    assert len({tuple(batches) for batches in ranks[0]["balanced"]["batches"]}) > 3
    for epochs in zip(*(each["balanced"]["epochs"] for each in ranks), strict=True):
        assert sorted(chain(*epochs)) == list(range(SAMPLES))


def test_what_was_not_expected_is_fetched_and_what_is_not_needed_dropped(tmp_path: Path) -> None:
    images(tmp_path / "images")
    with service(tmp_path) as where:
        found = millpond.data.stream(f"{where}/images").by_index(8)
        assert isinstance(found, IndexedStream) and len(found) == SAMPLES
        found.expect([[1, 2, 3], [7, 8, 9]])
        assert found.batch([1, 2, 3])[1].tolist() == [1, 2, 3]
        found.expect([[3, 7, 100], [9, 8]])
        assert found.batch([3, 7, 100])[1].tolist() == [3, 7, 100]
        assert found.batch([8, 9, 150, 9])[1].tolist() == [8, 9, 150, 9]
        found.expect([])
        assert not found._places and not found._asked


def test_fetches_go_on_after_the_service_was_away(tmp_path: Path) -> None:
    images(tmp_path / "images")
    with service(tmp_path) as where:
        found = millpond.data.stream(f"{where}/images").by_index(8)
    found.expect([[5, 6], [7]])
    with service(tmp_path, int(where.split(":")[1])):
        assert found.batch([5, 6, 7])[1].tolist() == [5, 6, 7]


def test_a_stream_is_no_private_data() -> None:
    with group(torch.nn.Linear(1, 1)) as alone, pytest.raises(LocalError, match="of public data"):
        alone.loader(millpond.data.stream("127.0.0.1:9/images"), private=True)
