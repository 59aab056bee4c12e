# SPDX-License-Identifier: Apache-2.0
"""Job files: their fields, defaults and errors."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from millpond.aggregate.encoding.layout import Encoding
from millpond.base.errors import ConfigError
from millpond.base.keys import Key, keys_of
from millpond.base.schema import dump, load
from millpond.train.job import file
from millpond.train.job.check import check_work
from millpond.train.job.overrides import longer
from millpond.train.job.spec import (
    DeviceFolder,
    EvaluationSpec,
    FederatedSpec,
    Job,
    LimitsSpec,
    ModelSpec,
    OptimizerSpec,
    SchedulerSpec,
    SynchronousSpec,
    TrainingSpec,
    WorkSpec,
)

from ..job_files import described, written

EXAMPLES = Path(__file__).parents[2] / "agent" / "examples"
GOOD = """
name = "digits"
[data]
private = "private/digits"
test = "test"
[model]
factory = "mymodel:build"
files = ["./mymodel.py", "parts/head.py"]
arguments = { width = 32, layers = [1, 2] }
"""
OF_DEVICE = GOOD.replace('private = "private/digits"', 'public = "csd0:public/digits"')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job/test").mkdir(parents=True)
    (tmp_path / "job/parts").mkdir()
    (tmp_path / "job/mymodel.py").write_text("# mine")
    (tmp_path / "job/parts/head.py").write_text("# head")
    (tmp_path / "secret.py").write_text("# not mine")
    return tmp_path / "job"


def read(folder: Path, text: str) -> tuple[Job, dict[str, Path]]:
    (folder / "job.toml").write_text(text)
    return file.read(folder / "job.toml")


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


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


MANY = ", ".join(f"a{number} = 1" for number in range(300_000))
TASK = GOOD.partition("[model]")[0] + '[task]\nfactory = "a:b"\n'
ERRORS = [
    pytest.param(f"{GOOD}x = {'[' * 5000}{']' * 5000}", "job.toml: it is nested too deeply", id="nesting"),
    pytest.param(
        edited("width = 32", MANY), "job.toml: model: arguments: 300001 are too many, 1000 at most", id="many"
    ),
    (
        GOOD + "[federated]\n[synchronous]",
        "job.toml: a job is either federated or synchronous: remove one of",
    ),
    (GOOD + "[federated]\nround = 3", "job.toml: federated: unknown key 'round'; did you mean 'rounds'?"),
    (GOOD + "[train]\nmomentum = nan", "job.toml: train: momentum: nan is not between 0 and 1"),
    (GOOD + "[train]\nlearning_rate = nan", "job.toml: train: learning_rate: nan is not greater than 0"),
    (
        f'{GOOD}[train]\noptimizer = {{ name = "sgd", lr = 1 }}',
        "job.toml: train: optimizer: write learning_rate, not lr",
    ),
    *(
        (f"{GOOD}[federated]\nstrategy = {given}", f"job.toml: federated: strategy: {told}")
        for given, told in (
            ("{ name = 'apfl', alpha = 0 }", 'alpha: 0 is not above 0 and at most 1, or "adaptive"'),
            ("{ name = 'apfl', alpha = nan }", 'alpha: nan is not above 0 and at most 1, or "adaptive"'),
            ("{ name = 'perfedavg', inner_learning_rate = 0 }", "inner_learning_rate: 0 is not greater"),
            ("{ name = 'perfedavg', delta = 2 }", "delta: 2 is not greater than 0 and at most 1"),
            ("{ name = 'perfedavg', variant = 'second' }", "variant: "),
            ("'fedporx'", "there is no strategy 'fedporx'; did you mean 'fedprox'?"),
            ('{ name = "fedprox", muu = 1 }', "unknown key 'muu'; did you mean 'mu'?"),
            ('{ name = "fedprox", mu = nan }', "mu: nan is not between 0 and 1e+09"),
            ('{ name = "fedprox", mu = "x" }', "mu: expected a number, got text ('x')"),
            ('{ name = "fedavgm", momentum = 1.5 }', "momentum: 1.5 is not between 0 and 1"),
            ('{ name = "fedyogi", tau = 0 }', "tau: 0 is not between 1e-12 and 1"),
            ('{ name = "trimmed", share = 0.5 }', "share: 0.5 is not between 0 and 0.5"),
            ('{ name = "fedavg", factory = "a:b" }', "a strategy has a name, or a factory that is "),
            ('{ factory = "mine" }', "a strategy has a name, or a factory that is module:class"),
            ('{ name = "fedopt", optimizer = { lr = 1 } }', "optimizer: write learning_rate beside "),
        )
    ),
    (f"{GOOD}[federated.strategy]\nday = 2026-01-02", "job.toml: federated: strategy"),
    (
        f'{GOOD}[train]\nscheduler = {{ name = "StepLR", step_size = 2026-01-02 }}',
        "job.toml: train: scheduler.step_size: a date cannot be an argument",
    ),
    (f"{GOOD}[task]\nfactory = 'a:b'", "job.toml: a job has one of the tables [task] and [model]"),
    (GOOD.partition("[model]")[0], "job.toml: a job has one of the tables [task] and [model]"),
    (
        f'{GOOD}[federated]\nlocal = ["head.*"]',
        'job.toml: evaluate: on: layers of federated.local are on devices alone: on = ["devices"]',
    ),
    (
        f'{GOOD}[federated]\nlocal = [""]\n[evaluate]\non = ["devices"]',
        "job.toml: federated: local: a pattern is empty",
    ),
    (f"{GOOD}[federated]\nlocal = 'head.*'", "job.toml: federated: local: expected a list"),
    (edited('test = "test"', ""), 'job.toml: evaluate: on: "host" needs a folder of the host: data.test'),
    (f'{GOOD}[evaluate]\non = ["disk"]', "job.toml: evaluate: on"),
    (f'{GOOD}[evaluate]\non = ["host", "host"]', "job.toml: evaluate: on: a place is named twice"),
    (
        f'{GOOD}[evaluate]\non = ["devices"]\nheld_out = 1',
        "job.toml: evaluate: held_out: 1.0 holds no samples out, or all",
    ),
    (
        f"{GOOD}[evaluate]\non = []\ntarget = 0.5",
        "job.toml: evaluate: without a place in 'on' there is nothing to end the job early",
    ),
    (f'{GOOD}[evaluate]\nmode = "most"', "job.toml: evaluate: mode: "),
    (
        f'{GOOD}[train]\nrepeat = "score"',
        "job.toml: train: repeat: it is for mini-epochs: set train.mini_epoch, too",
    ),
    (
        f'{GOOD}[train]\nmini_epoch = 64\nrepeat = "score"',
        "job.toml: train: repeat: it repeats train.epochs times at most: set epochs above 1",
    ),
    (
        f'{GOOD}[train]\nmini_epoch = 64\nepochs = 9\nrepeat = "auto"',
        "job.toml: train: repeat: there is no rule 'auto' in jobs; it goes by the clock",
    ),
    (
        f'{GOOD}[train]\nmini_epoch = 64\nepochs = 9\nrepeat = {{ name = "score", weights = [1, 0, 1] }}',
        "job.toml: train: repeat: weights: a validation error needs samples that are held out: evaluate.on",
    ),
    *(
        (
            f"{GOOD}[train]\n{key} = {value}\n[synchronous]",
            f"job.toml: train: {key}: a step of one gradient has no epochs: set synchronous.local_steps",
        )
        for key, value in (("mini_epoch", "64"), ("repeat", "'score'"))
    ),
    (f"{GOOD}[evaluate]\ntarget = nan", "job.toml: evaluate: target: nan is never reached"),
    (GOOD + "[limits]\nclips = 1", "job.toml: limits: unknown key 'clips'; did you mean 'clip'?"),
    (GOOD + "[train]\nbatch = 'x'", "job.toml: train: batch: expected a whole number, got text ('x')"),
    (
        edited('private = "private/digits"', ""),
        "job.toml: data: private: it is missing; a job without private",
    ),
    *(
        (
            edited('private = "private/digits"', f'private = "{bad}"'),
            f"job.toml: data: private: '{bad}': it is a folder",
        )
        for bad in (
            "digits",
            "public/digits",
            "/private/digits",
            "private/../public",
            "private/.millpond-logs",
        )
    ),
    (
        OF_DEVICE,
        "job.toml: data: public: without data.private its samples are streamed, which is for [synchronous",
    ),
    (
        f'{OF_DEVICE}[synchronous]\n[evaluate]\non = ["devices"]',
        "job.toml: data: private: devices hold out private samples, and there are none",
    ),
    (
        f'devices = ["csd1"]\n{OF_DEVICE}[synchronous]',
        "job.toml: data: public: 'csd0' is none of the job's devices",
    ),
    *(
        (
            OF_DEVICE.replace("csd0:public/digits", bad) + "[synchronous]",
            f"job.toml: data: public: '{bad}': of one",
        )
        for bad in ("csd0:private/digits", "csd0:digits", ":public/digits", "csd0:public/../private/digits")
    ),
    (edited("[model]", "[model"), "job.toml: Expected ']'"),
    (edited('"test"', '"tset"'), "job.toml: data: test: missing data: there is no folder "),
    (edited("./mymodel.py", "mymodl.py"), "job.toml: model: files: mymodl.py: no such file"),
    (edited("./mymodel.py", "../secret.py"), "job.toml: model: files: ../secret.py: must be below"),
    (edited("./mymodel.py", "/etc/hosts"), "job.toml: model: files: /etc/hosts: must be below"),
    (edited("./mymodel.py", "link.py"), "job.toml: model: files: link.py: leads out of"),
    (edited("./mymodel.py", "."), "job.toml: model: files: .: must be below"),
    (edited("./mymodel.py", "pipe"), "job.toml: model: files: pipe: neither a file nor a folder"),
    (edited("[1, 2]", "[1, 2026-01-02]"), "job.toml: model: arguments.layers[1]: a date cannot be"),
    (edited("./mymodel.py", "no.py").replace("[model]", "[task]"), "job.toml: task: files: no.py: no such"),
    (TASK + 'wheels = ["no.whl"]', "job.toml: task: wheels: no.whl: no such file"),
    (TASK + 'wheels = ["mymodel.py"]', "job.toml: task: wheels: mymodel.py: a wheel's name ends with .whl"),
    (TASK + 'initial = "no.safetensors"', "job.toml: task: initial: no.safetensors: no such file"),
    (TASK + 'signature = "a/b.sig"', "job.toml: task: signature: 'a/b.sig' must be beside the job file"),
]
ASYNCHRONOUS = [
    ("max_staleness = 3", 'federated: max_staleness: without a buffer or late = "carry" no update is stale'),
    ('late = "keep"', "federated: late: "),
    ('late = "carry"\nstrategy = "median"', "federated: late: the rule 'median' takes votes of one round"),
    ('buffer = 3\nstrategy = "apfl"', "federated: buffer: personal models are trained from round to round"),
    ('buffer = 3\nlate = "carry"', "federated: buffer: asynchronous rounds have no 'late': remove"),
    ('buffer = 3\ndeadline = "auto"', "federated: buffer: asynchronous rounds have no 'deadline': remove"),
    ("buffer = 3\nfraction = 0.5", "federated: buffer: asynchronous rounds have no 'fraction': remove"),
    ('buffer = 3\n[evaluate]\non = ["host", "devices"]', "federated: buffer: asynchronous devices are never"),
]
SYNCHRONOUS = [
    ('strategy = "fedprox"', "strategy: applies differences, not gradients: set local_steps, or "),
    ('local_steps = 4\nstrategy = "fednova"', "strategy: all workers take the same number of local steps"),
    ('local_steps = 4\nstrategy = "median"', "strategy: votes of late updates and of parts of an epoch"),
    ('local_steps = 4\nstrategy = "apfl"', "strategy: personal models are trained and scored from round to"),
    ('local_steps = 4\nstrategy = "perfedavg"', "strategy: personal models are trained and scored from"),
    ('local_steps = 4\nstrategy = "medium"', "strategy: there is no strategy 'medium'; did you mean"),
    ("epoch = 3", "unknown key 'epoch'; did you mean 'epochs'?"),
    ("epochs = 1.5", "epochs: expected a whole number"),
    ("target = 0.9", "unknown key 'target'"),
    ('policy = "balanced"', "policy: "),
    ("patience = 0.9", "patience: 0.9 is neither 0 nor at least 1"),
    ("patience = -1", "patience: -1.0 is neither 0 nor at least 1"),
    ("patience = nan", "patience: nan is neither 0 nor at least 1"),
    ('scaling = "square"', "scaling: "),
    ("host = 1", "host: expected "),
]
UNREPAIRED = [
    ("star", "", 'without topology = "udp" nothing is lost'),
    ("udp", "[synchronous]", "workers of a [synchronous] job must have the same model"),
    ("udp", "[federated]\nfraction = 0.5", "all devices must take part in all rounds"),
    ("udp", '[federated]\nlate = "carry"', "all devices must take part in all rounds"),
    ("udp", '[federated]\nstrategy = "median"', "the rule 'median' takes the votes of all devices"),
    ("udp", '[federated]\nstrategy = "fednova"', "differences that are normalized by local steps are"),
    ("udp", '[federated]\nstrategy = "fedadam"', "the server's step is more than the mean"),
    ("udp", '[federated]\nstrategy = { name = "fedavg", learning_rate = 0.5 }', "the server's step is more"),
]
ERRORS += [
    (f'topology = "{topology}"\nrepair = false{GOOD}{table}', f"job.toml: repair: {error}")
    for topology, table, error in UNREPAIRED
]
ERRORS += [(f"{GOOD}[synchronous]\n{text}", f"job.toml: synchronous: {error}") for text, error in SYNCHRONOUS]
ERRORS += [(f"{GOOD}[federated]\n{text}", f"job.toml: {error}") for text, error in ASYNCHRONOUS]


TABLES = {
    "train": TrainingSpec,
    "federated": FederatedSpec,
    "synchronous": SynchronousSpec,
    "evaluate": EvaluationSpec,
    "limits": LimitsSpec,
}
BEYOND = [
    (table, name, bad)
    for table, kind in TABLES.items()
    for name, key in keys_of(kind).items()
    if key != Key(key.about, example=key.example)
    for bad in (key.above if key.least is None else key.least - 1, int(key.most) + 1)
]


@pytest.mark.parametrize(("table", "name", "bad"), BEYOND)
def test_a_number_beyond_its_keys_bounds_is_refused(folder: Path, table: str, name: str, bad: float) -> None:
    error = rf"^job\.toml: {table}: {name}: {bad}(\.0)? is not (between|greater than) "
    with pytest.raises(ConfigError, match=error):
        read(folder, f"{GOOD}[{table}]\n{name} = {bad}")


@pytest.mark.parametrize(("text", "error"), ERRORS)
def test_what_is_wrong_is_said_and_where(folder: Path, text: str, error: str) -> None:
    (folder / "link.py").symlink_to(folder.parent / "secret.py")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    assert str(caught.value).startswith(error)


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml: No such file"):
        file.read(tmp_path / "job.toml")


def test_a_job_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"job\.toml: 'utf-8' codec"):
        file.read(tmp_path / "job.toml")
