# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of jobs: the newest is always whole, and restores the exact position of the job."""

from __future__ import annotations

import logging
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from millpond.base.errors import ConfigError, LocalError
from millpond.host.api.daemon import Curves
from millpond.host.jobs import artifacts
from millpond.host.jobs.job_folder import BEST
from millpond.host.jobs.training.checkpoints import (
    STAGED,
    BestModel,
    CheckpointWriter,
    SavedCheckpoint,
    TrainingProgress,
    newest,
)
from millpond.host.jobs.training.scores import Best
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.train.balance.profiling import Point, Profile
from millpond.train.state.layout import Tensor

TENSORS = (Tensor("linear.weight", (3, 4), "float32"), Tensor("linear.bias", (4,), "float32"))
MOMENTUM = (Tensor("0.momentum_buffer", (3, 4), "float32"), Tensor("1.momentum_buffer", (4,), "float32"))
LOG = logging.getLogger("tests.saving")

ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from host.test_checkpoints import LOG, TENSORS, saved
from millpond.host.jobs.training.checkpoints import CheckpointWriter
saver = CheckpointWriter(Path(sys.argv[1]), "endless", TENSORS, LOG)
for step in range(1, 1_000_000):
    saver.save(saved(step))
    saver.wait()
"""


def saved(step: int, *, momentum: bool = True) -> SavedCheckpoint:
    """Where an epoch stands, with values that tell the step."""
    shards = Shards(2)
    shards.begin(3)
    shards.add(0, [Shard("csd0", False, 40), Shard("csd0", True, 25)])
    shards.deal([5 + step % 7, 0])
    progress = TrainingProgress(
        step, shards.epoch_position, {"csd0": step, "host": 2}, 1.25 * step, 0.5, 2.0 * step
    )
    state = np.full(16, step, np.float32)
    if not momentum:
        return SavedCheckpoint(state, (), np.empty(0, np.float32), progress)
    return SavedCheckpoint(state, MOMENTUM, np.full(16, -step, np.float32), progress)


def saver(folder: Path) -> CheckpointWriter:
    return CheckpointWriter(folder, "tests", TENSORS, LOG)


def save(folder: Path, what: SavedCheckpoint) -> None:
    one = saver(folder)
    one.save(what)
    one.wait()
    assert not one.busy


def same(found: SavedCheckpoint | None, expected: SavedCheckpoint) -> bool:
    assert found is not None
    return (
        np.array_equal(found.state, expected.state)
        and np.array_equal(found.momentum, expected.momentum)
        and found.momentum_tensors == expected.momentum_tensors
        and found.progress == expected.progress
    )


@pytest.mark.parametrize("momentum", [True, False])  # before the first step an optimizer remembers nothing
def test_what_was_saved_is_found_bit_by_bit(tmp_path: Path, momentum: bool) -> None:
    assert newest(tmp_path, TENSORS, 2, LOG) is None
    (tmp_path / ".step-000000001.safetensors.part").write_bytes(b"half")
    what = saved(12, momentum=momentum)
    what.state[:4] = (np.pi, 1e-42, -0.0, 3e38)
    save(tmp_path, what)
    found = newest(tmp_path, TENSORS, 2, LOG)
    assert same(found, what)
    assert found is not None and found.state.tobytes() == what.state.tobytes()


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for count, step in enumerate((9, 10, 11, 1_000_000_000), 1):  # a step with more digits than others
        save(tmp_path, saved(step))
        assert same(newest(tmp_path, TENSORS, 2, LOG), saved(step))
        assert len(list(tmp_path.iterdir())) == min(2, count)
    saver(tmp_path).prune(keep=1)  # as at a job's end
    assert same(newest(tmp_path, TENSORS, 2, LOG), saved(1_000_000_000))
    assert len(list(tmp_path.iterdir())) == 1


def test_one_behind_an_epoch_that_was_not_recorded_does_not_count(tmp_path: Path) -> None:
    one = saver(tmp_path)
    one.save_now(saved(1))
    assert newest(tmp_path, TENSORS, 1, LOG) is None  # it is of epoch 3
    later = saved(2)
    place = replace(later.progress.place, epoch=4)
    one.save_now(replace(later, progress=replace(later.progress, place=place)))
    assert same(newest(tmp_path, TENSORS, 2, LOG), saved(1))
    found = newest(tmp_path, TENSORS, 3, LOG)
    assert found is not None and found.progress.step == 2


@pytest.mark.expected_log("000000002.* is damaged; the one before it serves")
def test_a_damaged_one_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    one = saver(tmp_path)
    for step in (0, 1, 2):  # as after each round
        one.save_now(saved(step))
        one.prune()
    newer = tmp_path / "step-000000002.safetensors"
    newer.write_bytes(newer.read_bytes()[:-1])
    assert same(newest(tmp_path, TENSORS, 2, LOG), saved(1))
    (tmp_path / "step-000000001.safetensors").unlink()
    with pytest.raises(LocalError, match="step-000000002"):  # and no history is dropped for it
        newest(tmp_path, TENSORS, 2, LOG)


def stage(folder: Path, number: int) -> Best:
    """The model of a round that is about to be recorded as the best."""
    (folder / STAGED.format(number)).write_text(f"of round {number}")
    return Best(number, number / 10)


def found(folder: Path) -> str:
    """What is in the place of the best model, and how many others there are."""
    others = len(list(folder.iterdir())) - 1
    return f"{(folder / BEST).read_text()}, {others} others"


def test_the_best_model_is_that_of_the_best_round_on_record(tmp_path: Path) -> None:
    """The daemon may be ended between a model and the record of its round."""
    (tmp_path / BEST).write_text("of round 1")
    stage(tmp_path, 4)
    kept = BestModel(tmp_path, Best(1, 0.1))
    assert found(tmp_path) == "of round 1, 0 others"
    best = stage(tmp_path, 4)
    kept.settle(best, 0)
    kept.settle(best, 0)
    BestModel(tmp_path, best).end()
    assert found(tmp_path) == "of round 4, 0 others"


def test_the_best_model_is_that_of_its_round_after_later_ones_were_dropped(tmp_path: Path) -> None:
    """Their models were better, but a job that resumed before them comes to other ones."""
    kept = BestModel(tmp_path, stage(tmp_path, 1))
    for number in (2, 3):
        kept.settle(stage(tmp_path, number), 0)
    assert found(tmp_path) == "of round 3, 2 others"
    again = BestModel(tmp_path, Best(1, 0.1))
    assert found(tmp_path) == "of round 1, 0 others"
    best = stage(tmp_path, 2)
    again.settle(best, 0)
    again.settle(best, 1)
    assert found(tmp_path) == "of round 2, 1 others"
    again.settle(best, 2)
    assert found(tmp_path) == "of round 2, 0 others"
    BestModel(tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_the_model_before_the_best_stays_while_the_newest_checkpoint_may_be_damaged(tmp_path: Path) -> None:
    """A job resumes behind it, is ended again, and then has to resume behind the one before it."""
    BestModel(tmp_path, stage(tmp_path, 1)).settle(stage(tmp_path, 3), 2)
    BestModel(tmp_path, Best(3, 0.3))
    BestModel(tmp_path, Best(1, 0.1))
    assert found(tmp_path) == "of round 1, 0 others"


@pytest.mark.parametrize(
    "others", [TENSORS[:1], TENSORS[::-1], (TENSORS[0], Tensor("linear.bias", (5,), "float32"))]
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, others: tuple[Tensor, ...]) -> None:
    save(tmp_path, saved(5))
    with pytest.raises(LocalError, match=r"step-000000005\.safetensors is a checkpoint of another model"):
        newest(tmp_path, others, 2, LOG)


def test_what_is_no_checkpoint_of_steps_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.safetensors"
    path.write_bytes(b"damaged")
    with pytest.raises(LocalError, match="is not a checkpoint of millpond, or is damaged"):
        newest(tmp_path, TENSORS, 2, LOG)
    safetensors.numpy.save_file(
        {"linear.weight": np.zeros((3, 4), np.float32)}, path, {"job": "other", "round": "2"}
    )
    with pytest.raises(LocalError, match="is not a checkpoint of a job"):
        newest(tmp_path, TENSORS, 2, LOG)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1}', '{"step": "x"}'])
def test_a_progress_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    values = {"linear.weight": np.zeros((3, 4), np.float32), "linear.bias": np.zeros(4, np.float32)}
    about = {"job": "tests", "round": "2", "progress": text}
    safetensors.numpy.save_file(values, tmp_path / "step-000000001.safetensors", about)
    with pytest.raises(LocalError, match="is not a checkpoint of a job"):
        newest(tmp_path, TENSORS, 2, LOG)


def test_a_kill_while_it_is_written_leaves_the_last_whole_one(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ENDLESS, str(tmp_path), str(Path(__file__).parents[1])]
    with subprocess.Popen(argv) as writer:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("step-*.safetensors")):
            assert writer.poll() is None and time.monotonic() < end
        time.sleep(0.013)
        writer.kill()
    left = newest(tmp_path, TENSORS, 2, LOG)
    assert left is not None and same(left, saved(left.progress.step))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.expected_log("the checkpoint cannot be saved")
def test_only_checkpoints_that_were_written_count(tmp_path: Path) -> None:
    one = saver(tmp_path)
    for step, limit in ((1, 1 << 20), (2, 1 << 20), (3, 300), (4, 300)):
        with room_for(limit):
            one.save(saved(step))
            one.wait()
    assert (one.recorded, one.final_round) == (2, 2)  # all are of epoch 3


@pytest.mark.expected_log("the checkpoint cannot be saved: File too large")
def test_without_room_it_warns_and_the_last_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = saver(tmp_path)
    one.save(saved(1))
    one.wait()
    with room_for(300):
        one.save(saved(2))
        one.wait()
    assert "step-000000002.safetensors: the checkpoint cannot be saved" in caplog.text
    assert same(newest(tmp_path, TENSORS, 2, LOG), saved(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.safetensors"]
    one.save(saved(3))
    one.wait()
    assert same(newest(tmp_path, TENSORS, 2, LOG), saved(3))


CURVES = Curves(
    (
        Profile("host", "x86_64", (Point(2, 0.25, 1 << 20), Point(4, 0.375, 1 << 21))),
        Profile("csd0", "arm64", ()),
    ),
    {"host": 4, "csd0": 0},
)


def test_curves_are_kept_with_the_job(tmp_path: Path) -> None:
    assert artifacts.read(tmp_path, Curves) is None
    artifacts.write(tmp_path, Curves((), {}))
    artifacts.write(tmp_path, CURVES)
    assert artifacts.read(tmp_path, Curves) == CURVES
    assert [path.name for path in tmp_path.iterdir()] == ["curves.json"]


def test_curves_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "curves.json").write_text('{"profiles": [], "batches": {"host": "x"}}')
    with pytest.raises(ConfigError, match=r"curves\.json"):
        artifacts.read(tmp_path, Curves)
