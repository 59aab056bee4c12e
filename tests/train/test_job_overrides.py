# SPDX-License-Identifier: Apache-2.0
"""Settings that change a job's document: their values, places and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import ConfigError
from millpond.train.job import file
from millpond.train.job.overrides import overridden

JOB = """
name = "digits"
data = { private = "private/digits", test = "." }
model = { factory = "millpond.train.zoo.models:digits" }
train = { batch = 16 }
"""


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (["train.batch=8"], {"train": {"batch": 8, "epochs": 2}}),
        (["train.learning_rate = 1e-2"], {"train": {"batch": 16, "epochs": 2, "learning_rate": 0.01}}),
        (["federated.strategy.optimizer=adam"], {"federated": {"strategy": {"optimizer": "adam"}}}),
        (["name=a.b-c"], {"name": "a.b-c"}),
        (["name="], {"name": ""}),
        (['name="a = b # c"'], {"name": "a = b # c"}),
        (["name=1\nseed = 2"], {"name": "1\nseed = 2"}),
        (["data.classes=['a', \"b\"]"], {"data": {"classes": ["a", "b"]}}),
        (["synchronous={}"], {"synchronous": {}}),
        (["seed=1", "seed=2", "seed=3"], {"seed": 3}),
        (["train={batch = 4}", "train.epochs=3"], {"train": {"batch": 4, "epochs": 3}}),
        (["host=true"], {"host": True}),
    ],
)
def test_a_setting_changes_its_key_alone(settings: list[str], changed: dict[str, Any]) -> None:
    document = {"name": "digits", "train": {"batch": 16, "epochs": 2}}
    assert overridden(document, settings) == document | changed
    assert document == {"name": "digits", "train": {"batch": 16, "epochs": 2}}


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("train.batch", "expected a key and a value, such as train.learning_rate=0.1"),
        ("=3", "expected a key and a value"),
        ("train..batch=3", "expected a key and a value"),
        ("name.first=3", "'name' is not a table"),
        ("train.batch.size=3", "'train.batch' is not a table"),
        ("data.classes=[1, 2", "not a TOML value: "),
        ('name="a', "not a TOML value: "),
    ],
)
def test_a_setting_that_is_none_is_refused(setting: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden({"name": "digits", "train": {"batch": 16}}, [setting])
    assert str(caught.value).startswith(f"--set {setting}: {error}")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["federated.rouds=5"], "federated: unknown key 'rouds'; did you mean 'rounds'?"),
        (["federate.rounds=5"], "unknown key 'federate'; did you mean 'federated'?"),
        (["train.batch=many"], "train: batch: expected a whole number, got text ('many')"),
        (["synchronous.epochs=1", "federated.fraction=0.5"], "a job is either federated or synchronous"),
        (["federated.fraction=2.0"], "federated: fraction: 2.0 is not between 0 and 1"),
    ],
)
def test_settings_are_checked_as_the_file_is(tmp_path: Path, settings: list[str], error: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    with pytest.raises(ConfigError) as caught:
        file.read(path, settings)
    assert str(caught.value).startswith(f"job.toml with --set: {error}")


def test_values_by_key_are_taken_as_they_are() -> None:
    document = {"train": {"batch": 16}}
    given = {
        "train.optimizer": {"name": "SGD", "nesterov": True},
        "seed": 3,
        "name": 'quoted "\u00e9\U0001f600',
    }
    changed = overridden(document, given)
    assert changed == {
        "train": {"batch": 16, "optimizer": given["train.optimizer"]},
        "seed": 3,
        "name": given["name"],
    }
    changed["train"]["optimizer"]["name"] = "other"
    assert given["train.optimizer"] == {"name": "SGD", "nesterov": True}
    for key, complaint in {"train..x": "not a key", "train.batch.x": "'train.batch' is not a table"}.items():
        with pytest.raises(ConfigError, match=f"set {key}: {complaint}"):
            overridden(document, {key: 1})
