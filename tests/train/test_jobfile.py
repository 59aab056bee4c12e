# SPDX-License-Identifier: Apache-2.0
"""Job files: their fields and defaults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from millpond.aggregate.encoding.layout import Encoding
from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.train.job import file
from millpond.train.job.check import check_work
from millpond.train.job.host_spec import EvaluationSpec
from millpond.train.job.overrides import longer
from millpond.train.job.spec import (
    DeviceFolder,
    Job,
    ModelSpec,
    OptimizerSpec,
    SchedulerSpec,
    SynchronousSpec,
    WorkSpec,
)

from ..job_files import described, written
from .job_text import GOOD, OF_DEVICE, edited, job_folder, read

EXAMPLES = Path(__file__).parents[2] / "agent" / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return job_folder(tmp_path)


def test_a_job_and_its_code(folder: Path) -> None:
    job, paths = read(folder, GOOD)
    assert (job.name, job.data.test) == ("digits", str(folder / "test"))
    assert paths == {name: folder / name for name in ("mymodel.py", "parts/head.py")}
    files = {"mymodel.py": "# mine", "parts/head.py": "# head"}
    assert file.describe(paths, "job") == described(files)
    assert load(Job, msgpack.unpackb(msgpack.packb(dump(job))), "job") == job


def test_a_folder_is_all_that_lies_in_it(folder: Path) -> None:
    written(
        {".git/config": "", "lib/__pycache__/x.pyc": "", "lib/.hidden": "", "lib/a/b.bin": b"\xff"}, folder
    )
    (folder / "lib/again").symlink_to("..")  # without an end
    (folder / "lib/link").symlink_to("../mymodel.py")
    (folder / "lib/folder").symlink_to("../parts")
    _, paths = read(folder, edited('"./mymodel.py", "parts/head.py"', '"lib"'))
    again = {name for name in paths if name.startswith("lib/again/")}
    assert paths.keys() - again == {"lib/a/b.bin", "lib/link", "lib/folder/head.py"}
    assert again == {f"lib/again/{name}" for name in ("job.toml", "mymodel.py", "parts/head.py")}
    (folder / "lib/out").symlink_to("../../secret.py")
    with pytest.raises(ConfigError, match=r"files: lib/out: leads out of the job file's folder"):
        file.read(folder / "job.toml")


def test_a_file_that_goes_away_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"digits: gone\.py: No such file"):
        file.describe({"gone.py": folder / "gone.py"}, "digits")


def test_a_synchronous_job_is_one_that_has_the_table(folder: Path) -> None:
    assert read(folder, GOOD)[0].synchronous is None
    assert read(folder, GOOD + "[synchronous]")[0].synchronous == SynchronousSpec()
    text = 'epochs = 0\npolicy = "stannis"\npatience = 0\nglobal_batch = 48\nscaling = "sqrt"\nhost = false'
    job, _ = read(folder, f"{GOOD}[synchronous]\n{text}")
    assert job.synchronous == SynchronousSpec(0, "stannis", 0, 48, scaling="sqrt", host=False)
    assert load(Job, msgpack.unpackb(msgpack.packb(dump(job))), "job") == job


def test_public_data_of_one_device_are_streamed_where_no_private_data_are_read(folder: Path) -> None:
    job, _ = read(folder, f'devices = ["csd1", "csd0"]\n{OF_DEVICE}[synchronous]')
    assert job.data.of_device == DeviceFolder("csd0", "public/digits") and job.data.is_streamed
    both = 'private = "private/digits"\npublic = "csd0:public/digits"'
    for kind in ("", "[synchronous]"):
        job, _ = read(folder, edited('private = "private/digits"', both) + kind)
        assert job.data.of_device == DeviceFolder("csd0", "public/digits") and not job.data.is_streamed
    job, _ = read(folder, edited("[model]", 'public = "public/digits"\n[model]'))
    assert job.data.of_device is None and not job.data.is_streamed


def test_what_workers_and_the_server_do_follows_from_the_kind_of_job(folder: Path) -> None:
    """Rounds and local steps exchange differences, and a strategy applies them."""
    train = "[train]\nlearning_rate = 0.1\nbatch = 8\nepochs = 3\n"
    own, average = OptimizerSpec("", 0.1, {"momentum": 0.9}), {"name": "fedavg"}

    def shown(text: str) -> tuple[bool, int, int, int, dict[str, Any]]:
        job = read(folder, GOOD + train + text)[0]
        assert job.work.optimizer == own and job.work.name == "digits"
        return job.exchanges_differences, job.work.passes, job.work.batch, job.work.steps, job.strategy

    assert shown("") == (True, 3, 8, 1, average)
    yogi = '[federated.strategy]\nname = "fedyogi"\nbeta1 = 0.8'
    assert shown(yogi) == (True, 3, 8, 1, {"name": "fedyogi", "beta1": 0.8})
    assert shown('[federated]\nstrategy = "median"') == (True, 3, 8, 1, {"name": "median"})
    own_class = '[federated]\nstrategy = { factory = "mymodel:Mine", any = [1] }'
    assert shown(own_class)[4] == {"factory": "mymodel:Mine", "any": [1]}
    assert shown("[synchronous]")[:4] == (False, 0, 0, 1)
    prox = '[synchronous]\nlocal_steps = 4\nstrategy = "fedprox"'
    assert shown(prox) == (True, 1, 0, 4, {"name": "fedprox"})
    assert shown("[synchronous]\nlocal_steps = 4") == (True, 1, 0, 4, average)
    assert shown("mini_epoch = 64\n[synchronous]\nlocal_steps = 4") == (True, 3, 0, 4, average)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("", Encoding()),
        ('encoding = "int8"', Encoding("int8")),
        ('encoding = "top-k"', Encoding("top-k", 0.01)),
        ('encoding = { name = "top-k", share = 0.05 }', Encoding("top-k", 0.05)),
    ],
)
def test_an_encoding_is_a_name_or_a_table(folder: Path, text: str, encoding: Encoding) -> None:
    work = read(folder, f"{GOOD}[train]\n{text}")[0].work
    assert work.encoding == encoding
    assert load(WorkSpec, msgpack.unpackb(msgpack.packb(dump(work))), "work") == work


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ('"int9"', "encoding: name: 'int9' is not one of float32, bfloat16, int8, top-k"),
        ('{ name = "top-k", shar = 0.1 }', "encoding: unknown key 'shar'; did you mean 'share'"),
        ('{ name = "int8", share = 0.1 }', "encoding: share: 'int8' sends all values"),
        ('{ name = "top-k", share = 0 }', "encoding: share: 0.0 is not above 0 and at most 0.5"),
        ('{ name = "top-k", share = 0.6 }', "encoding: share: 0.6 is not above 0 and at most 0.5"),
        ('{ name = "top-k", share = nan }', "encoding: share: nan is not above 0 and at most 0.5"),
    ],
)
def test_an_encoding_that_makes_no_sense_is_refused(folder: Path, encoding: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"train: {re.escape(text)}"):
        read(folder, f"{GOOD}[train]\nencoding = {encoding}")


@pytest.mark.parametrize(
    ("train", "optimizer", "scheduler"),
    [
        ("", OptimizerSpec("", 0.05, {"momentum": 0.9}), SchedulerSpec()),
        ('optimizer = "sgd"\nmomentum = 0', OptimizerSpec("sgd", 0.05, {"momentum": 0.0}), SchedulerSpec()),
        ('optimizer = "AdamW"', OptimizerSpec("AdamW", None), SchedulerSpec()),
        (
            'learning_rate = 0.1\noptimizer = { name = "SGD", momentum = 0.5, nesterov = true }\n'
            'scheduler = { name = "CosineAnnealingLR", T_max = "total" }',
            OptimizerSpec("SGD", 0.1, {"momentum": 0.5, "nesterov": True}),
            SchedulerSpec("CosineAnnealingLR", {"T_max": "total"}),
        ),
        ('scheduler = "ConstantLR"', OptimizerSpec("", 0.05, {"momentum": 0.9}), SchedulerSpec("ConstantLR")),
    ],
)
def test_optimizers_and_schedulers_are_names_or_tables(
    folder: Path, train: str, optimizer: OptimizerSpec, scheduler: SchedulerSpec
) -> None:
    work = read(folder, f"{GOOD}[train]\n{train}")[0].work
    assert (work.optimizer, work.scheduler) == (optimizer, scheduler)
    assert load(WorkSpec, msgpack.unpackb(msgpack.packb(dump(work))), "work") == work


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("resize = 64", 'resize: pictures alone are scaled, of format = "images"'),
        ('format = "images"\nresize = 64\ncrop = 65', "crop: 65 is more than resize, 64"),
        ("crop = -1", "crop: -1 is not between 0 and 8192"),
    ],
)
def test_sides_of_images_that_cannot_be_are_refused(folder: Path, keys: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"data: {re.escape(text)}"):
        read(folder, GOOD.replace("[data]\n", f"[data]\n{keys}\n"))


def test_streamed_images_are_not_cropped(folder: Path) -> None:
    with pytest.raises(ConfigError, match="data: flip: streamed images come as they are stored"):
        read(folder, OF_DEVICE.replace("[data]\n", "[data]\nflip = true\n") + "[synchronous]\n")


def test_a_rate_of_each_step_is_for_synchronous_steps(folder: Path) -> None:
    scheduler = '[train]\nscheduler = { name = "PolynomialLR", power = 0.5, each = "step" }\n'
    work = read(folder, f"{GOOD}{scheduler}[synchronous]\n")[0].work
    assert work.scheduler == SchedulerSpec("PolynomialLR", {"power": 0.5}, "step")
    for kind in ("[federated]\n", "[synchronous]\nlocal_steps = 2\n"):
        with pytest.raises(ConfigError, match='scheduler: each = "step" is for \\[synchronous\\] with'):
            read(folder, f"{GOOD}{scheduler}{kind}")
    with pytest.raises(ConfigError, match="scheduler: each: 'round' is neither"):
        read(folder, f"{GOOD}{scheduler.replace('step', 'round')}")


def test_the_kind_of_job_has_its_quorum_and_every_kind_its_evaluation(folder: Path) -> None:
    evaluate = "\n[evaluate]\ntarget = 0.7\npatience = 3\n"
    rounds = read(folder, f"{GOOD}[federated]\nquorum = 0.25{evaluate}")[0]
    steps = read(folder, f"{GOOD}[synchronous]\nquorum = 0.75{evaluate}")[0]
    assert [job.quorum for job in (rounds, steps)] == [0.25, 0.75]
    for job in (rounds, steps):
        assert job.evaluate == EvaluationSpec(target=0.7, patience=3)
        assert longer(job, 99).evaluate == EvaluationSpec()
        assert longer(job, 99).total == 99
    assert longer(rounds, 99).averaging.rounds == 99


def test_samples_are_held_out_only_to_score_devices(folder: Path) -> None:
    assert read(folder, f"{GOOD}[evaluate]\nheld_out = 0.2")[0].work.held_out == 0.0
    devices = read(folder, f'{GOOD}[evaluate]\non = ["devices"]\nheld_out = 0.2')[0]
    assert devices.work.held_out == 0.2
    without = GOOD.replace('test = "test"\n', "")
    assert read(folder, f'{without}[evaluate]\non = ["devices"]')[0].data.test == ""


def test_a_task_takes_the_place_of_a_model(folder: Path) -> None:
    job = read(folder, edited("[model]", "[task]"))[0]
    assert job.work.task and job.code is job.task and job.model is None
    assert read(folder, edited("mymodel:build", "mymodel").replace("[model]", "[task]"))[0].work.task


def test_pictures_have_the_classes_of_the_test_folder(folder: Path) -> None:
    for name in ("dog", "cat", ".hidden"):
        (folder / "test" / name).mkdir()
    data = GOOD.replace("[data]", '[data]\nformat = "images"')
    assert read(folder, data)[0].work.classes == ("cat", "dog")
    own = data.replace("[data]", '[data]\nclasses = ["dog", "cat", "ant"]')
    assert read(folder, own)[0].work.classes == ("dog", "cat", "ant")
    assert read(folder, GOOD)[0].work.classes == ()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"steps": 0}, "steps: 0 is not greater than 0"),
        ({"name": ""}, "name: '' must be of letters"),
        ({"name": "../a"}, "name: '../a' must be of letters"),
        ({"name": ".a"}, "name: '.a' must be of letters"),
        ({"name": 201 * "n"}, f"name: '{20 * 'n'}...' is longer than 200 bytes"),
        ({"name": 100 * "模"}, f"name: '{20 * '模'}...' is longer than 200 bytes"),
        ({"model": ModelSpec("nets")}, "model: factory: 'nets' is not module:callable"),
        ({"model": ModelSpec("nets:"), "task": True}, "task: factory: 'nets:' is not module:callable"),
        ({"held_out": 1.0}, "held_out: all samples are held out"),
    ],
)
def test_work_that_an_agent_would_not_take(change: dict[str, Any], error: str) -> None:
    work = WorkSpec("digits", ModelSpec("nets:Net"))
    check_work(work, "the job")
    with pytest.raises(ConfigError) as caught:
        check_work(replace(work, **change), "the job")
    assert str(caught.value).startswith(f"the job: {error}")


@pytest.mark.parametrize("name", ["digits", "mymodel"])
def test_the_examples_are_jobs(tmp_path: Path, name: str) -> None:
    for path in EXAMPLES.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "test").mkdir()
    job, code = file.read(tmp_path / f"{name}.toml")
    assert (job.name, sorted(code)) == (name, ["mymodel.py"] if name == "mymodel" else [])
