# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): whether a curious host can tell that a sample was trained on.

``loss``: members have smaller losses (Yeom et al. 2018, arXiv:1709.01604). ``lira``: the confidence in a
sample beside that of models which have not seen it (Carlini et al. 2022, arXiv:2112.03570, offline): trained
by the attacker in the same way on data of the same kind, here few, so that all samples have one deviation.
"""

from __future__ import annotations

import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from bench.experiment import Experiment, Run
from bench.privacy.federation import Trained, accuracy, logits_of, train
from bench.privacy.levels import ROUND_LEVELS, ROUNDS, Level, mlp, round_devices
from bench.privacy.measures import Floats, auc, caught, told
from bench.privacy.target import Digits, Model, Vector, digits
from bench.rows import Row, summary

EACH, SHADOWS = 40, 4
MEMBERS, OTHERS = 640, 400
"""Samples of the devices, and those that nobody has trained on; the attacker has the other 757."""
SEEDS = 3


def measure(run: Run) -> list[Row]:
    """Rows ``membership.LEVEL.ATTACK.auc`` and ``.tpr``, and ``membership.LEVEL.accuracy``."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    seeds, levels = (1, (*ROUND_LEVELS[:2], ROUND_LEVELS[-1])) if run.quick else (SEEDS, ROUND_LEVELS)
    for seed in range(seeds):
        for level in levels:
            with tempfile.TemporaryDirectory() as folder:
                _attack(level, seed, Path(folder), run, found, counts)
        run.say(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.3g}" for name, values in found.items()))
    rows = list[Row]()
    for level in levels:
        rows += _rows(level, found, counts)
    return rows


def _rows(level: Level, found: dict[str, list[float]], counts: dict[str, list[tuple[int, int]]]) -> list[Row]:
    rows = list[Row]()
    for attack in ("loss", "lira"):
        name = f"membership.{level.name}.{attack}"
        words = f"{level.told}, {ROUNDS} rounds, {EACH} samples a device"
        rows.append(summary(f"{name}.auc", f"AUC, chance 0.5: {words}", found[f"{name}.auc"], ""))
        right, of = (sum(column) for column in zip(*counts[name], strict=True))
        what = f"members found where 1 % of others are taken for some, chance 1: {words}; {told(right, of)}"
        rows.append(summary(f"{name}.tpr", what, found[f"{name}.tpr"], "%"))
    name = f"membership.{level.name}.accuracy"
    return [*rows, summary(name, f"accuracy of the model: {level.told}", found[name], "%")]


def _attack(
    level: Level,
    seed: int,
    folder: Path,
    run: Run,
    found: dict[str, list[float]],
    counts: dict[str, list[tuple[int, int]]],
) -> None:
    """Train, attack, and note what came of it."""
    data, model = digits(seed), Model(mlp, seed)
    private, known = data.part(slice(0, MEMBERS)), data.part(slice(MEMBERS + OTHERS, len(data)))
    others = data.part(slice(MEMBERS, MEMBERS + OTHERS))
    trained = _train(level, private, model, folder / "target", secure=level.secure)
    members = private.part(slice(0, EACH * level.cohort))
    shadows, rng = list[Trained](), np.random.default_rng(seed)
    for number in range(1 if run.quick else SHADOWS):
        own = known.part(rng.permutation(len(known)))
        shadows.append(_train(level, own, model, folder / f"{number}"))
    scores = {"loss": [_losses(level, model, trained, each) for each in (members, others)]}
    scores["lira"] = [_likelihoods(level, model, trained, shadows, each) for each in (members, others)]
    for attack, (of_members, of_others) in scores.items():
        name = f"membership.{level.name}.{attack}"
        found[f"{name}.auc"].append(auc(of_members, of_others))
        right = caught(of_members, of_others)
        counts[name].append((right, len(of_members)))
        found[f"{name}.tpr"].append(100 * right / len(of_members))
    found[f"membership.{level.name}.accuracy"].append(accuracy(model, trained.states[-1], others))


def _train(level: Level, data: Digits, model: Model, folder: Path, *, secure: bool = False) -> Trained:
    seed = zlib.crc32(folder.name.encode())
    return train(round_devices(level, data, EACH, model, folder, secure=secure), model, level, seed)


def _models(level: Level, trained: Trained, samples: int) -> list[tuple[Vector, slice]]:
    """Return the models that the host has with the samples that it asks each about: of those that devices
    have trained alone, each device's own samples, and a part of those of nobody.
    """
    states = trained.own if level.devices == 1 else trained.states[-1:]
    step = samples // len(states)
    return [(state, slice(step * rank, step * (rank + 1))) for rank, state in enumerate(states)]


def _confidences(level: Level, model: Model, trained: Trained, data: Digits) -> Floats:
    """Return log(p / (1 - p)) of the chance of each sample's label."""
    found = list[Floats]()
    for state, places in _models(level, trained, len(data)):
        logits = logits_of(model, state, data.part(places))
        own = logits[np.arange(len(logits)), data.labels[places]]
        logits[np.arange(len(logits)), data.labels[places]] = -np.inf
        largest = logits.max(1)
        found.append(own - largest - np.log(np.exp(logits - largest[:, None]).sum(1)))
    return np.concatenate(found)


def _losses(level: Level, model: Model, trained: Trained, data: Digits) -> Floats:
    """Return the losses below 0, so that members have more."""
    found: Floats = -np.logaddexp(0.0, -_confidences(level, model, trained, data))
    return found


def _likelihoods(
    level: Level, model: Model, trained: Trained, shadows: list[Trained], data: Digits
) -> Floats:
    """Return by how many deviations a sample's confidence is above that of models that have not seen it."""
    without = np.array([_confidences(level, model, each, data) for each in shadows])
    deviation = float(without.std(0).mean()) or 1.0
    found: Floats = (_confidences(level, model, trained, data) - without.mean(0)) / deviation
    return found


EXPERIMENT = Experiment("membership", "Whether a sample was trained on", measure)
