# SPDX-License-Identifier: Apache-2.0
"""Trackers of jobs: runs for TensorBoard and MLflow, read by their own readers, and those of a program."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from documents.blocks import blocks
from documents.site import ROOT
from millpond import Fleet
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.program.trackers.tracking import Tracking, trackers_of
from millpond.host.program.trackers.update import JobUpdate
from millpond.host.records.jobs import JobEvent

from ..ports import unused_port
from ..waiting import eventually
from .daemon_rig import Rig

PAGE = ROOT / "docs" / "how-to" / "trackers.md"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's models have a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"values")


def add_rounds(rig: Rig, number: int, *rounds: int) -> None:
    """Store rounds whose score is a tenth of their number."""
    for each in rounds:
        rig.add_round(
            number,
            round=each,
            scores={"host": {"accuracy": each / 10}},
            samples=40,
            workers={"csd0": 30, "csd1": 10},
            tunnel={"csd0": (100, 40), "csd1": (10, 4)},
            joules={"csd0": 1.5},
            by_worker={"csd0": {"loss": 1 / each}},
            events=(JobEvent(1.7e9, "plan", "", "csd0 30, csd1 10"),) if each == 1 else (),
        )
    rig.begun[number].context.changed()


def ended(rig: Rig, *rounds: int, text: str = "") -> int:
    """Return a job that is done after these rounds."""
    number = rig.submit(text=text)
    rig.wait_for(number, "running")
    add_rounds(rig, number, *rounds)
    rig.finish(number)
    return number


def run_of(folder: Path) -> EventAccumulator:
    """Return all events of a run, read by TensorBoard."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def scalars(run: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in run.Scalars(name)]


def test_train_writes_a_run_for_tensorboard(rig: Rig, tmp_path: Path) -> None:
    def course() -> None:
        eventually(lambda: 1 in rig.begun, "the job has begun", 20, 0.01)
        add_rounds(rig, 1, 1, 2)
        rig.finish(1)

    thread = threading.Thread(target=course)
    thread.start()
    job_file = rig.write_job("own", '[track]\ntensorboard = "runs"\n[train]\nlearning_rate = 0.125\n')
    code, _, err = rig.command("train", str(job_file))
    thread.join()
    assert (code, err) == (0, "")
    run = run_of(rig.directory / "runs" / "own-1")
    assert scalars(run, "host/accuracy") == [(1, 0.1), (2, 0.2)]
    assert scalars(run, "worker/csd0/loss") == [(1, 1.0), (2, 0.5)]
    assert scalars(run, "worker/csd1/share") == [(1, 0.25), (2, 0.25)]
    assert scalars(run, "total/bytes_from_devices") == [(1, 44), (2, 88)]
    assert scalars(run, "total/joules") == [(1, 1.5), (2, 3.0)]
    (plan,) = run.Tensors("events/plan")
    assert plan.tensor_proto.string_val == [b"csd0 30, csd1 10"]
    begun = HParamsPluginData.FromString(
        run.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    )
    given = begun.session_start_info.hparams
    assert given["train.learning_rate"].number_value == 0.125
    assert not [key for key in given if key.startswith("track")]
    end = HParamsPluginData.FromString(run.summary_metadata["_hparams_/session_end_info"].plugin_data.content)
    assert end.session_end_info.status == STATUS_SUCCESS
    assert (rig.directory / "runs/own-1/model.safetensors").read_bytes() == b"values"


def test_a_run_of_tensorboard_that_is_written_again_is_replaced(rig: Rig, tmp_path: Path) -> None:
    ended(rig, 1, 2, 3)
    for _ in range(2):
        code, out, err = rig.command("jobs", "track", "1", "--tensorboard", "mine")
        assert (code, out, err) == (0, f"job 1 is in {tmp_path / 'mine'}\n", "")
        run = run_of(tmp_path / "mine" / "job1-1")
        assert scalars(run, "host/accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_run_of_tensorboard_needs_no_torch(rig: Rig) -> None:
    """A command that trains nothing loads none: another writer does where torch is installed."""
    ended(rig, 1)
    words = ["jobs", "track", "1", "--tensorboard", "runs", "--fleet", str(rig.directory)]
    lacking = "sys.modules.update(dict.fromkeys(('torch', 'tensorflow')))"
    code = f"import sys; {lacking}; from millpond.host.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_resumed_job_goes_on_with_its_run(rig: Rig) -> None:
    number = rig.submit(text='[track]\ntensorboard = "runs"\n')
    rig.wait_for(number, "running")
    add_rounds(rig, number, 1)
    rig.jobs.stop(number)

    def course() -> None:
        eventually(lambda: rig.info(number).state == "running", "the job has begun again", 20, 0.01)
        add_rounds(rig, number, 2)
        rig.finish(number)

    thread = threading.Thread(target=course)
    thread.start()
    code, _, err = rig.command("resume", str(number))
    thread.join()
    assert (code, err) == (0, "")
    assert scalars(run_of(rig.directory / "runs" / "job1-1"), "host/accuracy") == [(1, 0.1), (2, 0.2)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mlflow_goes_on_behind_the_last_round_of_a_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    number = rig.submit(text='[track]\nmlflow = "mlruns"\n')
    rig.wait_for(number, "running")
    add_rounds(rig, number, 1, 2)
    client = MlflowClient((rig.directory / "mlruns").as_uri())

    def run() -> Any:
        experiment = client.get_experiment_by_name("job1")
        try:
            found = client.search_runs([experiment.experiment_id]) if experiment else []
        except ValueError:  # a file is being written
            return None
        return found[0] if found else None

    def logged() -> str | None:
        found = run()
        return found.data.tags.get("millpond.round") if found else None

    def history() -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(run().info.run_id, "host/accuracy")]

    with DaemonClient(rig.directory) as daemon:
        track = daemon.job(number).job.track
    Tracking(rig.directory, number, trackers_of(track), pytest.fail)
    eventually(lambda: logged() == "2", "two rounds are logged")
    add_rounds(rig, number, 3)
    eventually(lambda: logged() == "3", "the third one is logged")
    rig.finish(number)
    code, out, err = rig.command("jobs", "track", "1")
    assert (code, out) == (0, f"job 1 is in {rig.directory / 'mlruns'}\n"), err
    assert history() == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (run().info.run_name, run().info.status) == ("job1-1", "FINISHED")
    assert run().data.params["federated.rounds"] == "20"
    assert [each.path for each in client.list_artifacts(run().info.run_id)] == ["model.safetensors"]


def test_a_server_of_mlflow_that_is_down_costs_a_line(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = f"http://127.0.0.1:{unused_port()}"
    ended(rig, 1, text=f'track = {{ mlflow = "{address}" }}\n')
    Fleet(rig.directory).job(1).wait()
    told = capsys.readouterr().err
    code, _, err = rig.command("jobs", "track", "1")
    assert code == 1 and err == f"millpond: {told}" and err.count("\n") == 1
    assert "MlflowTracker failed behind round 1" in err and "'millpond jobs track 1' begins anew" in err


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.updates: list[JobUpdate] = []

    def track(self, update: JobUpdate) -> None:
        self.updates.append(update)


class Raises:
    def track(self, update: JobUpdate) -> None:
        raise ValueError("no such\nproject")


class Hangs:
    def __init__(self) -> None:
        self.end = threading.Event()

    def track(self, update: JobUpdate) -> None:
        self.end.wait(60)


@pytest.fixture
def hangs() -> Iterator[Hangs]:
    tracker = Hangs()
    yield tracker
    tracker.end.set()


def test_trackers_that_raise_or_hang_disturb_nobody(rig: Rig, hangs: Hangs) -> None:
    number = rig.submit()
    rig.wait_for(number, "running")
    kept, told = Kept(), list[str]()
    tracking = Tracking(rig.directory, number, [Raises(), hangs, kept], told.append)
    add_rounds(rig, number, 1, 2)
    eventually(lambda: len(kept.updates) == 2, "the rounds are there")
    rig.finish(number)
    rounds = [each.round for each in Fleet(rig.directory).job(number)]
    assert rounds == [1, 2]
    eventually(lambda: len(kept.updates) == 3, "so is the end")
    tracking.finish(0.05)
    again = "'millpond jobs track 1' begins anew"
    assert told == [
        f"Raises failed behind round 1: ValueError: no such project; {again}",
        f"Hangs has not taken all of job 1 in 0.05 s; {again}",
    ]
    last = kept.updates[-1]
    assert (last.name, last.job.state, last.round) == ("job1-1", "done", None)
    assert last.model is not None and not last.model.exists()  # it was for the call alone


def test_a_program_writes_to_the_trackers_of_the_job_file_once(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    number = ended(rig, 1, 2, text='[track]\ntensorboard = "runs"\n')
    job = Fleet(rig.directory).job(number)
    job.track(Raises())
    job.wait()
    job.wait()
    assert capsys.readouterr().err.count("Raises failed behind round 1") == 1
    (file,) = (rig.directory / "runs" / "job1-1").glob("events.*")
    assert scalars(run_of(file.parent), "round/seconds") == [(1, 2.0), (2, 2.0)]


def test_the_tracker_of_the_documents_works(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(rig, 1, 2)
    tracker, program = (block.text for block in blocks(PAGE.read_text()) if block.language == "python")
    (tmp_path / "json_lines.py").write_text(tracker)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MILLPOND_FLEET", str(rig.directory))
    exec(compile(program, PAGE.name, "exec"), {})  # noqa: S102 - a page's own program
    del sys.modules["json_lines"]
    first, second, end = map(json.loads, (tmp_path / "rounds.jsonl").read_text().splitlines())
    assert (first["round"], second["host/accuracy"], second["total/samples"]) == (1, 0.2, 80)
    assert (end["state"], end["parameters"]["data.private"]) == ("done", "private/digits")


@pytest.mark.parametrize("option", ["--tensorboard", "--mlflow"])
def test_no_place_is_no_current_folder(rig: Rig, option: str) -> None:
    """Before: a run for TensorBoard went into the current folder."""
    ended(rig, 1)
    code, _, err = rig.command("jobs", "track", "1", option, "")
    assert code == 2 and "need a place" in err and err.count("\n") == 1


@pytest.mark.parametrize("extra", ["tensorboard", "mlflow"])
def test_an_extra_that_is_missing_is_told_before_the_job_is_queued(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    code, _, err = rig.command("train", str(rig.write_job("own", f'[track]\n{extra} = "runs"\n')))
    assert code == 2 and f"pip install 'millpond[{extra}]'" in err and err.count("\n") == 1
    assert not rig.jobs.infos()


def test_a_job_without_trackers_is_told(rig: Rig) -> None:
    ended(rig, 1)
    code, _, err = rig.command("jobs", "track", "1")
    assert code == 2 and "job 1 has no table [track]" in err
