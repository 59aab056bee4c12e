# SPDX-License-Identifier: Apache-2.0
"""One round of local training, and the score of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from millpond.base.errors import LocalError
from millpond.train.data.samples import Samples
from millpond.train.determinism import generators, seeds
from millpond.train.job.spec import TrainingSpec
from millpond.train.local import training as loop
from millpond.train.reduce.exact import ExactSum, RefusedUpdate
from millpond.train.state import flat, layout
from millpond.train.zoo.models import digits_cnn

from ..effort import scaled

WORKERS = ("host", "csd0", "csd1", "csd2")


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


@pytest.fixture(scope="module")
def digits() -> Samples:
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = (bunch.images[order, None] / 16).astype(np.float32)
    return Samples(images, bunch.target[order].astype(np.int64))


def part(samples: Samples, chosen: slice | np.ndarray[tuple[int], np.dtype[np.int64]]) -> Samples:
    return Samples(samples.images[chosen], samples.labels[chosen])


def trained(samples: Samples, training: TrainingSpec, seed: int) -> tuple[bytes, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 10))
    loss, seconds = loop.train_round(model, samples, training, seed)
    assert seconds > 0
    vector = np.empty(layout.size(flat.describe(model)), np.float32)
    flat.read(model, vector)
    return vector.tobytes(), loss


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_repeated_round_gives_the_same_bits(digits: Samples, optimizer: str) -> None:
    training = TrainingSpec(optimizer=optimizer, learning_rate=0.01)  # type: ignore[arg-type]
    some = part(digits, slice(100))
    assert trained(some, training, 5) == trained(some, training, 5)
    assert trained(some, training, 5) != trained(some, training, 6)


def test_seeds_differ_by_job_worker_and_round() -> None:
    made = [seeds.derive(*key) for key in [(0, "csd1", 2), (1, "csd1", 2), (0, "csd12", 2), (0, "csd1", 22)]]
    assert len(set(made)) == 4
    assert made[0] == seeds.derive(0, "csd1", 2) == 6056588976336830218
    assert all(0 <= seed < 2**63 for seed in made)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 15, 16, 17])
def test_batches_are_every_sample_once_and_none_alone(count: int) -> None:
    made = list(loop.batches(count, 8, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(made).tolist()) == list(range(count))
    assert count == 1 or min(map(len, made)) > 1
    assert max(map(len, made)) <= 9


def test_a_model_of_frozen_parameters_is_refused(digits: Samples) -> None:
    model = nn.Linear(64, 10).requires_grad_(False)
    with pytest.raises(LocalError, match="no parameter that may be trained"):
        loop.train_round(model, digits, TrainingSpec(), 0)


def test_evaluate_counts_and_does_not_train(digits: Samples) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accuracy, loss = loop.evaluate(model, part(digits, slice(300)))
    with torch.no_grad():
        logits = model(torch.from_numpy(digits.images[:300]))
    labels = torch.from_numpy(digits.labels[:300])
    assert accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_loss_is_the_mean_over_samples(digits: Samples) -> None:
    model = digits_cnn()
    frozen = TrainingSpec(learning_rate=1e-30, batch=7, epochs=2)
    loss, _ = loop.train_round(model, part(digits, slice(50)), frozen, 0)
    assert loss == pytest.approx(loop.evaluate(model, part(digits, slice(50)))[1], rel=1e-5)


def dirichlet(labels: np.ndarray[tuple[int], np.dtype[np.int64]], seed: int) -> list[list[int]]:
    """Indices of three devices' shards, each class shared out unevenly."""
    rng = np.random.default_rng(seed)
    shards: list[list[int]] = [[], [], []]
    for digit in range(10):
        own = np.flatnonzero(labels == digit)
        cuts = (np.cumsum(rng.dirichlet([0.5] * 3))[:-1] * len(own)).astype(int)
        for shard, piece in zip(shards, np.split(own, cuts), strict=True):
            shard.extend(piece.tolist())
    return shards


@pytest.mark.parametrize("seed", scaled(quick=[0], full=[0, 1]))
def test_federated_digits_reach_their_target(digits: Samples, seed: int) -> None:
    test, public, private = (
        part(digits, slice(360)),
        part(digits, slice(360, 630)),
        part(digits, slice(630, None)),
    )
    shards = [public, *(part(private, np.array(shard)) for shard in dirichlet(private.labels, seed))]
    torch.manual_seed(seed)
    model = digits_cnn()
    tensors = flat.describe(model)
    vector = np.empty(layout.size(tensors), np.float32)
    assert len(vector) <= 100_000
    flat.read(model, vector)
    for round_ in range(12):
        total = ExactSum(tensors, 1437)
        for worker, shard in zip(WORKERS, shards, strict=True):
            flat.write(model, vector)
            seed_of_round = seeds.derive(seed, worker, round_)
            loop.train_round(model, shard, TrainingSpec(batch=16), seed_of_round)
            update = np.empty_like(vector)
            flat.read(model, update)
            total.add(update, len(shard), worker)
        vector = total.average()
        flat.write(model, vector)
        if loop.evaluate(model, test)[0] >= 0.965:
            return
    pytest.fail("0.965 was not reached in 12 rounds")


def test_a_model_that_diverges_is_refused_by_the_sum(digits: Samples) -> None:
    model = digits_cnn()
    loss, _ = loop.train_round(model, part(digits, slice(100)), TrainingSpec(learning_rate=1e30), 0)
    assert not np.isfinite(loss)
    tensors = flat.describe(model)
    vector = np.empty(layout.size(tensors), np.float32)
    flat.read(model, vector)
    with pytest.raises(RefusedUpdate, match=r"csd1: update refused: a value of 'conv1\.weight' is"):
        ExactSum(tensors, 100).add(vector, 100, "csd1")
