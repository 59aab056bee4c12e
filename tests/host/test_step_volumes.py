# SPDX-License-Identifier: Apache-2.0
"""The volumes of a step that 'millpond profile' shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.base.errors import LocalError
from millpond.host.cli.step_volumes import step_volumes
from millpond.train.job.spec import DataSpec, Job, ModelSpec


def test_a_step_has_the_inputs_of_its_layers_and_the_weights_of_the_model(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((3, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(3, np.int64))
    model = ModelSpec("millpond.train.zoo.models:digits_cnn")
    job = Job("digits", DataSpec("private/digits", str(tmp_path)), model=model)
    found = step_volumes(job, tmp_path, 100)
    # two convolutions, of one and 32 channels, and two linear layers
    assert found.data == 400 * (64 + 32 * 64 + 64 * 16 + 64) and found.weights == 4 * 85_066
    assert found.text.startswith("a step: data 1.3 MB, weights 0.3 MB, data/weights 3.76: exchange weights")
    with pytest.raises(LocalError, match="no test folder"):
        step_volumes(replace(job, data=DataSpec("private/digits")), tmp_path, 100)
    wrong = replace(job, model=ModelSpec("gone:build"))
    with pytest.raises(
        LocalError, match="volumes are not counted: LocalError: model: factory: there is no mod"
    ):
        step_volumes(wrong, tmp_path, 100)
