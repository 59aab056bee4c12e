# SPDX-License-Identifier: Apache-2.0
"""Questions to a fleet: masked sums over private folders, what devices refuse, and what their logs tell."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from millpond import Fleet

from .support import EXAMPLES, Emulation

pytestmark = pytest.mark.timeout(300)
NAMES = ("csd0", "csd1", "csd2")


def labels(fleet: Emulation, folder: str, *names: str) -> np.ndarray:
    places = [fleet.fleet.device_directory(name) / "flash" / folder for name in names or NAMES]
    return np.concatenate([np.load(place / "labels.npy") for place in places])


def test_the_host_learns_masked_sums_over_private_folders(fleet: Emulation) -> None:
    known = labels(fleet, "private/digits")
    question = ("histogram", "private/digits", "--column", "label", "--bounds", "-0.5", "9.5")
    result = fleet.millpond("ask", *question, "--format", "json")
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    found = json.loads(result.out)
    assert (found["masked"], found["devices"], found["by_device"]) == (True, [*NAMES], {})
    counts = [each["count"] for each in found["figures"]["bins"]]
    assert counts == np.bincount(known, minlength=10).tolist()
    assert found["figures"]["missing"] == found["figures"]["below"] == found["figures"]["above"] == 0
    mean = Fleet(fleet.directory).ask("mean", "private/digits", column="label", low=0, high=9).figures
    assert (mean["count"], mean["missing"]) == (len(known), 0)
    assert mean["mean"] == pytest.approx(known.mean(), abs=1e-5)
    assert mean["deviation"] == pytest.approx(known.std(), abs=1e-3)
    asked = ("quantiles", "private/digits", "--column", "label", "--bounds", "0", "9", "--shares", "0.5,0.9")
    found = json.loads(fleet.millpond("ask", *asked, "--rounds", "2", "--format", "json").out)
    for each in found["figures"]["quantiles"]:
        assert each["low"] <= np.quantile(known, each["share"], method="inverted_cdf") <= each["high"]
        assert each["high"] - each["low"] == pytest.approx(0.09)
    noisy = fleet.millpond("ask", *question, "--epsilon", "8", "--format", "json")
    assert noisy.code == 0, noisy
    found = json.loads(noisy.out)
    off = np.array([each["count"] for each in found["figures"]["bins"]]) - np.bincount(known, minlength=10)
    assert off.any()
    assert np.abs(off).max() < 6 * found["noise"] < 100
    log = json.loads(fleet.millpond("audit", "csd1", "--format", "json").out)
    rows = [row for row in log["summary"]["rows"] if row["answers"]["role"] == "question"]
    row = next(
        row for row in rows if row["answers"]["name"] == "histogram of 'label' from -0.5 to 9.5, 10 bins"
    )
    assert any("10 bins, noise of rho" in each["answers"]["name"] for each in rows)
    assert row["answers"]["samples"] == {"private/digits": len(labels(fleet, "private/digits", "csd1"))}


def test_a_model_is_scored_on_private_folders(fleet: Emulation) -> None:
    code = (EXAMPLES / "mymodel.py").read_text().replace("width: int", "width: int = 4")
    number = fleet.submit(fleet.write_job("asked", rounds=1, code=code))
    info, _ = fleet.wait_for_end(number)
    assert info.state == "done", f"{info.error}\n{fleet.logs()}"
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    model = names["build"]()
    model.load_state_dict(load_file(fleet.directory / "jobs" / str(number) / "model.safetensors"))
    places = [fleet.fleet.device_directory(name) / "flash/private/digits/images.npy" for name in NAMES]
    images = np.concatenate([np.load(place) for place in places])[:, None].astype(np.float32) / 255
    with torch.no_grad():
        outputs = model.eval()(torch.from_numpy(images)).numpy()
    known, wanted = labels(fleet, "private/digits"), np.zeros((10, 10), int)
    np.add.at(wanted, (known, outputs.argmax(axis=1)), 1)
    asked = ("private/digits", "--job", str(number), "--format", "json")
    result = fleet.millpond("ask", "confusion", *asked, "--labels", "10")
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    assert json.loads(result.out)["figures"]["matrix"] == wanted.tolist()
    found = Fleet(fleet.directory).ask("auc", "private/digits", job=number, positive=3, bins=4096).figures
    positive, negative = outputs[known == 3], outputs[known != 3]
    scores = [np.exp(each[:, 3]) / np.exp(each).sum(axis=1) for each in (positive, negative)]
    pairs = scores[0][:, None] - scores[1]
    true = (pairs > 0).mean() + (pairs == 0).mean() / 2
    assert found["auc"] == pytest.approx(true, abs=1e-3)
    assert found["low"] - 1e-6 <= true <= found["high"] + 1e-6


def test_devices_tell_their_own_sums_of_public_folders_alone(fleet: Emulation) -> None:
    refused = fleet.millpond("ask", "count", "private/digits", "--plain")
    assert refused.code == 1
    assert "policy.questions: private folders are for masked questions alone (--secure)" in refused.err
    found = fleet.millpond("ask", "count", "public/digits", "--plain")
    assert found.code == 0, found
    for name in NAMES:
        assert name in found.out
    assert f"{len(labels(fleet, 'public/digits'))}" in found.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("count", "private/none"), 1, "csd0, csd1, csd2: missing data: there is no folder private/none"),
        (("count", "private/digits", "--column", "age"), 1, "private/digits has no column age"),
        (
            ("count", "private/digits", "--devices", "csd0,csd1"),
            1,
            "a masked sum is of 3 devices; 2 can answer",
        ),
        (("count", "private/digits", "--deadline", "0.001"), 1, "csd0: csd0 did not answer in time"),
        (("mean", "private/digits", "--column", "label", "--bounds", "9", "0"), 2, "no range of numbers"),
        (
            ("confusion", "private/digits", "--labels", "10"),
            2,
            "job: confusion is about a model: name its job",
        ),
        (("auc", "private/digits", "--job", "999"), 2, "there is no job 999"),
        (
            ("mean", "private/digits", "--column", "label"),
            2,
            "--bounds: mean of values need their range",
        ),
    ],
    ids=str,
)
def test_a_question_without_an_answer_says_why(
    fleet: Emulation, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = fleet.millpond("ask", *arguments)
    assert result.code == code, result
    assert words in result.err
