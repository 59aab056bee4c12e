# SPDX-License-Identifier: Apache-2.0
"""Errors of job files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.base.keys import Key, keys_of
from millpond.train.job import file
from millpond.train.job.host_spec import EvaluationSpec, LimitsSpec
from millpond.train.job.spec import FederatedSpec, SynchronousSpec, TrainingSpec

from .job_text import GOOD, OF_DEVICE, edited, job_folder, read

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
SECURE = [
    ("", "", "sums of masked or noisy values need a public bound: set limits.clip"),
    ("buffer = 3", "limits", "the host sees sums alone, which does not go with federated.buffer"),
    ('late = "carry"', "limits", 'the host sees sums alone, which does not go with federated.late = "carry"'),
    ('strategy = "median"', "limits", "the host sees sums alone, which does not go with the rule 'median'"),
    ('strategy = "fednova"', "limits", "the host sees sums alone, which does not go with federated.strategy"),
    (
        "",
        'train]\nencoding = "int8"\n[limits',
        "the host sees sums alone, which does not go with train.encoding",
    ),
    (
        "",
        'evaluate]\non = ["devices"]\n[limits',
        "the host sees sums alone, which does not go with evaluate.on",
    ),
]
ERRORS += [
    (
        f'{GOOD}[federated]\nsecure = "cohort"\n{text}\n' + f"[{tables}]\nclip = 1.0" * bool(tables),
        f"job.toml: federated: secure: {error}",
    )
    for text, tables, error in SECURE
]
ERRORS += [
    (
        f'topology = "udp"\nrepair = false{GOOD}[federated]\nsecure = "cohort"\n[limits]\nclip = 1.0',
        "job.toml: repair: masks cancel in the sum of whole updates alone",
    ),
    (
        f"{GOOD}[federated]\nsum_bits = 32",
        "job.toml: federated: sum_bits: sums of 32 bits need a public bound: set limits.clip",
    ),
    *(
        (f"{GOOD}[privacy]\nepsilon = 3.0\n{text}", f"job.toml: {error}")
        for text, error in (
            ("[limits]\nclip = 1.0\n[outer]", "privacy: an outer job has no number of rounds"),
            (
                "[synchronous]\n[limits]\nclip = 1.0",
                "privacy: noise is planned for the rounds",
            ),
            (
                "",
                "federated: with [privacy]: sums of masked or noisy values need a public bound",
            ),
            ("delta = 0.0", "privacy: delta: 0.0 is not greater than 0"),
            ('unit = "sample"', "privacy: unit"),
            (
                'unit = "group"\n[train]\nmini_epoch = 64\n[limits]\nclip = 1.0',
                'privacy: unit = "group"',
            ),
            (
                '[evaluate]\non = ["devices"]\n[limits]\nclip = 1.0',
                "federated: with [privacy]: the host",
            ),
        )
    ),
    (f'{GOOD}[synchronous]\nsecure = "cohort"', "job.toml: synchronous: unknown key 'secure'"),
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return job_folder(tmp_path)


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
