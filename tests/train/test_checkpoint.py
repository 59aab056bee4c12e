# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of a model's state."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.state import checkpoint, flat, layout
from millpond.train.state.checkpoint import Checkpoint
from millpond.train.state.layout import Tensor


class Mixed(nn.Module):
    """A state of every dtype, in an order that is not that of their widths."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.tensor([True, False, True]))
        self.fp16 = nn.Parameter(torch.randn(3).half())
        self.bf16 = nn.Parameter(torch.randn(5).bfloat16())
        self.norm = nn.BatchNorm2d(3)
        self.small = nn.Buffer(torch.tensor([-3], dtype=torch.int8))
        self.full = nn.Parameter(torch.randn(2, 3))


def state(model: nn.Module) -> Checkpoint:
    tensors = flat.describe(model)
    vector = np.empty(layout.size(tensors), np.float32)
    flat.read(model, vector)
    return Checkpoint(vector, tensors, "digits", 3)


def test_any_library_reads_what_the_model_had(tmp_path: Path) -> None:
    model = Mixed()
    checkpoint.save(tmp_path / "model.safetensors", state(model))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    expected = model.state_dict()
    assert {name: value.dtype for name, value in loaded.items()} == {n: v.dtype for n, v in expected.items()}
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_load_gives_back_what_was_saved_in_order(tmp_path: Path) -> None:
    saved = state(Mixed())
    checkpoint.save(tmp_path / "model.safetensors", saved)
    loaded = checkpoint.load(tmp_path / "model.safetensors")
    assert (loaded.tensors, loaded.job, loaded.round) == (saved.tensors, "digits", 3)
    assert loaded.vector.tobytes() == saved.vector.tobytes()


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    saved = state(Mixed())
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, saved)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_bfloat16_is_rounded_as_torch_does(tmp_path: Path) -> None:
    vector = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    checkpoint.save(tmp_path / "m", Checkpoint(vector, (Tensor("w", (1000,), "bfloat16"),), "j", 0))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "m")["w"], torch.from_numpy(vector).bfloat16())


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Writing more to any file fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = (Tensor("w", (100_000,), "float32"),)
    checkpoint.save(path, Checkpoint(np.zeros(100_000, np.float32), tensors, "j", 1))
    before = path.read_bytes()
    with (
        files_limited_to(200_000),
        pytest.raises(LocalError, match=r"model\.safetensors: the checkpoint cannot"),
    ):
        checkpoint.save(path, Checkpoint(np.ones(100_000, np.float32), tensors, "j", 2))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(LocalError, match="m is not a checkpoint of millpond, or is damaged"):
        checkpoint.load(tmp_path / "m")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file"):
        checkpoint.load(tmp_path / "m")


def test_a_vector_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="5 values do not fit"):
        checkpoint.save(
            tmp_path / "m", Checkpoint(np.ones(5, np.float32), (Tensor("w", (4,), "float32"),), "j", 0)
        )
