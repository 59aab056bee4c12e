# SPDX-License-Identifier: Apache-2.0
"""Jobs side by side: the keys in which they differ, and what they came to."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from PIL import Image

from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor import job_plot
from millpond.host.records.comparison import differences, results
from millpond.host.records.jobs import Round
from millpond.train.job.spec import (
    DataSpec,
    FederatedSpec,
    Job,
    ModelSpec,
    SynchronousSpec,
    TrainingSpec,
)

from .daemon_rig import Rig

JOB = Job("digits", DataSpec("private/x", "/test"), ModelSpec("m:build", arguments={"width": 3}))
ROUND = Round(1, {"host": {"accuracy": 0.5}}, 2.0, 10, {"csd0": 10}, {}, {"csd0": (1, 2), "csd1": (3, 4)})


def test_equal_jobs_do_not_differ_however_they_are_written() -> None:
    assert differences([(JOB, "a"), (replace(JOB, federated=FederatedSpec()), "a")]) == {}
    assert differences([(JOB, "a")]) == {}


def test_differences_are_by_dotted_key() -> None:
    other = replace(
        JOB,
        train=TrainingSpec(batch=64),
        federated=FederatedSpec(quorum=0.9),
        model=replace(JOB.model, arguments={"depth": 2, "width": 4}),
        devices=("csd0",),
    )
    assert differences([(JOB, "a" * 64), (other, "b" * 64), (JOB, "a" * 64)]) == {
        "model.arguments.width": (3, 4, 3),
        "model.arguments.depth": (None, 2, None),
        "train.batch": (32, 64, 32),
        "federated.quorum": (0.5, 0.9, 0.5),
        "devices": ([], ["csd0"], []),
        "code": ("a" * 12, "b" * 12, "a" * 12),
    }


def test_jobs_of_two_kinds_differ_in_the_tables_of_both() -> None:
    found = differences([(JOB, ""), (replace(JOB, synchronous=SynchronousSpec()), "")])
    assert found["federated.rounds"] == (20, None)
    assert found["synchronous.epochs"] == (None, 10)
    assert {key.partition(".")[0] for key in found} == {"federated", "synchronous"}


def test_what_a_job_came_to() -> None:
    rounds = [ROUND, replace(ROUND, joules={"csd0": 1.5}), ROUND]
    found = results(3, "digits", "done", rounds, metric="f1", final=0.7, best=0.9)
    assert (found.rounds, found.metric, found.final, found.best, found.seconds) == (3, "f1", 0.7, 0.9, 6.0)
    assert (found.to_devices, found.from_devices, found.joules) == (12, 18, 1.5)
    assert results(4, "new", "queued", [ROUND]).joules is None
    none = results(4, "new", "queued", [])
    assert (none.rounds, none.final, none.best, none.seconds, none.joules) == (0, None, None, 0, None)


def compared(rig: Rig, *arguments: str) -> str:
    code, out, err = rig.command("jobs", *arguments)
    assert (code, err) == (0, ""), err
    return out


def test_the_command_compares_for_a_person_and_for_a_program(rig: Rig) -> None:
    rig.submit("--set", "train.batch=16", "--set", "name=one")
    rig.submit("--set", "train.batch=64", "--set", "name=one")
    rig.add_round(1, round=1, scores={"host": {"accuracy": 0.25}}, tunnel={"csd0": (1000, 2000)})
    rig.add_round(1, round=2, scores={"host": {"accuracy": 0.125}})
    text = compared(rig, "compare", "1", "2")
    outcome, keys = (part.splitlines() for part in text.split("\n\n"))
    assert " ".join(outcome[1].split()) == "1 one running 2 accuracy 0.1250 0.2500 4.0 1.0 kB / 2.0 kB -"
    assert outcome[2].split()[:5] == ["2", "one", "queued", "0", "-"]
    assert [line.split() for line in keys] == [["key", "job", "1", "job", "2"], ["train.batch", "16", "64"]]
    for arguments in (("compare", "2", "1", "--format", "json"), ("--format", "json", "compare", "2", "1")):
        found = json.loads(compared(rig, *arguments))
        assert found["differences"] == {"train.batch": [64, 16]}
        assert [(job["id"], job["best"]) for job in found["jobs"]] == [(2, None), (1, 0.25)]
    rig.submit("--set", "train.batch=16", "--set", "name=one")
    assert compared(rig, "compare", "1", "3").splitlines()[-1] == "their definitions are the same"


def test_what_a_job_s_author_has_written_controls_no_terminal(rig: Rig) -> None:
    """Before: 'jobs compare' printed keys and values of job files as they came, and followers the log."""
    evil = '{"\\u001b[2J" = "\\u001b]0;mine\\u0007\\u202e"}'
    rig.submit("--set", f"model.arguments={evil}")
    rig.submit()
    text = compared(rig, "compare", "1", "2")
    assert "model.arguments. [2J" in text and " ]0;mine" in text
    assert all(line.isprintable() for line in text.splitlines())
    rig.begun[1].log.error("no factory '%s'", "\x1b[2J")
    rig.finish(1, "no factory '\x1b[2J'")
    with DaemonClient(rig.directory) as client:
        (progress,) = client.watch(1)
    assert progress.info.error.startswith("no factory ' [2J'")
    assert "no factory ' [2J'" in progress.lines


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("compare", "1", "99"), "there is no job 99"),
        (("compare", "first"), "Invalid value for 'JOB JOB...'"),
        (("compare",), "Missing argument"),
    ],
)
def test_a_job_that_is_not_there_is_told_in_one_line(
    rig: Rig, arguments: tuple[str, ...], error: str
) -> None:
    rig.submit()
    code, out, err = rig.command("jobs", *arguments)
    assert (code, out) == (2, "") and error in err and err.count("\n") == 1


def test_curves_are_drawn_in_the_terminal_and_into_a_file(rig: Rig) -> None:
    rig.submit("--set", "name=one")
    rig.submit("--set", "name=two")
    for number in (1, 2):
        for each in (1, 2, 3):
            scores = {"host": {"loss": 2.0 / each, "accuracy": 0.25 * each}}
            rig.add_round(number, round=each, scores=scores, joules={"csd0": 2.0})
    text = compared(rig, "plot", "1", "2")
    assert "1 one: accuracy (host)" in text and "2 two: accuracy (host)" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "accuracy (host)" in compared(rig, "plot", "1")
    path = rig.directory / "curves.png"
    asked = ("plot", "1", "2", "--metric", "accuracy", "--over", "joules", "--to", str(path))
    assert compared(rig, *asked) == f"the curves are in {path}\n"
    with Image.open(path) as picture:
        assert picture.width > 500
    found = json.loads(compared(rig, "plot", "1", "--over", "joules", "--format", "json"))
    assert found["curves"]["accuracy (host)"] == [[2.0, 0.25], [4.0, 0.5], [6.0, 0.75]]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("plot", "1"), "no score to draw yet"),
        (("plot", "2", "--metric", "f1"), "job 2 has no score 'f1'; it has accuracy"),
        (("plot", "2", "--to", "/nowhere/x.png"), "/nowhere/x.png: No such file or directory"),
        (("plot", "2", "--to", "curves.xyz"), "curves.xyz: Format 'xyz' is not supported"),
        (("plot", "2", "--over", "joules"), "job 2 has no known joules to draw over"),
        (("plot", "99"), "there is no job 99"),
    ],
)
def test_a_curve_that_cannot_be_drawn_is_one_line(rig: Rig, arguments: tuple[str, ...], error: str) -> None:
    rig.submit()
    rig.submit()
    rig.add_round(2)
    code, out, err = rig.command("jobs", *arguments)
    assert (code, out) == (2, "") and error in err and err.count("\n") == 1


def test_the_axis_of_a_plot_goes_no_further_than_its_scores() -> None:
    """Before: the axis of scores between 0 and 1 began below 0 and went on above 1."""
    drawn = {"accuracy": [(1.0, 0.5), (2.0, 1.0)], "loss": [(1.0, 0.7), (2.0, 0.0)]}
    lines = job_plot.text(drawn, 80, 24, "round").splitlines()
    ticks = [
        float(line.partition("|")[0])
        for line in lines
        if line.partition("|")[0].strip(" -.0123456789") == "" and line.partition("|")[0].strip(" -")
    ]
    assert min(ticks) == 0.0 and max(ticks) < 1.1
    assert all(sum(mark in line for line in lines) > 1 for mark in "*o")
    job_plot.text({"accuracy": [(1.0, 0.5)]}, 80, 24, "round")


@pytest.mark.parametrize(("low", "high", "width"), [(1, 7, 60), (1, 200, 60), (3, 4, 100), (1, 1000, 45)])
def test_the_labels_of_a_plot_are_round(low: int, high: int, width: int) -> None:
    """Before: labels of rounds were such as 2.272."""
    drawn = {"loss": [(float(number), 0.1234 * number) for number in range(low, high + 1)]}
    labels = job_plot.text(drawn, width, 20, "round").splitlines()[-1].partition("|")[2].split()
    assert len(labels) > 1 and all(label.isdecimal() for label in labels)
    assert int(labels[0]) <= low and int(labels[-1]) <= 1.5 * high + 1


def test_a_missing_extra_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit()
    rig.add_round(1)
    monkeypatch.setitem(sys.modules, "plotille", None)
    code, out, err = rig.command("jobs", "plot", "1")
    assert (code, out) == (2, "")
    assert err == "millpond: the package 'plotille' is not installed: pip install 'millpond[top]'\n"
