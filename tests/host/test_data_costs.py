# SPDX-License-Identifier: Apache-2.0
"""What data cost the workers of a job: summed, told in a line, and explained beside a prediction."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from millpond.host.api.daemon import JobInfo
from millpond.host.jobs.training.epoch import Epoch, round_summary
from millpond.host.jobs.training.exchange_engine import ExchangeOutcome
from millpond.host.records.data_costs import DataCosts, shares, total, waiting, waiting_for_data
from millpond.host.records.data_explanation import batch_wait, explanation, worker_data
from millpond.host.records.jobs import Round
from millpond.host.terminal import data_table, printing, tables
from millpond.train.job.spec import DataSpec, Job, ModelSpec, TrainingSpec
from millpond.train.protocol import DataTiming, StreamTiming, Update

JOB = Job("digits", DataSpec("private/x"), ModelSpec("m:build"), train=TrainingSpec(epochs=2, prefetch=2))
UPDATE = Update(1, 100, 100.0, 1.0, 1.0, 10.0, 0.0, 0, {"loss": (1.0, 100.0)})
ROUND = Round(1, {}, 10.0, 100, {"csd0": 100}, {}, {})


def costs(waited: float, seconds: float = 10.0, **others: Any) -> DataCosts:
    known = {"exchanges": 1, "trained": 100, "samples": 200, "size": 200_000, "batches": 20}
    return DataCosts(seconds, waited, **{**known, **others})


def shown(found: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160, markup=False).print(found)
    return out.getvalue()


def test_the_cost_of_an_update_is_in_seconds_that_the_host_has_seen_pass() -> None:
    said = replace(UPDATE, data=DataTiming(40, 10, 6.0, 200, 800, 25, 4, 50))
    found = DataCosts.of(said, 100, 12.0)
    assert found == DataCosts(10.0, 4.0, 1.0, 6.0, 1, 100, 200, 800, 25, 4, 50)
    assert DataCosts.of(replace(said, seconds=1e300), 100, 12.0).seconds == 12.0
    both = total([{"csd0": found}, {"csd0": found, "csd1": DataCosts()}])
    assert both["csd0"] == DataCosts(20.0, 8.0, 2.0, 12.0, 2, 200, 400, 1600, 50, 8, 50)
    assert shares(both) == {"csd0": 0.4, "csd1": 0.0}
    assert shares({"csd0": costs(0.46, 0.5), "csd1": costs(0.5, 0.8)}) == {"csd0": 0.0, "csd1": 0.625}


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ({}, ""),
        ({"csd0": 0.049, "csd1": 0.0}, ""),
        ({"csd0": 0.4, "csd1": 0.46}, "43 %"),
        ({"csd0": 0.0, "csd1": 0.43}, "43 % (csd1)"),
        ({"csd0": 0.43}, "43 % (csd0)"),
        ({"csd0": 0.3, "csd1": 0.5, "host": 0.0}, "40 % (csd0, csd1)"),
        ({**{f"csd{n}": 0.2 for n in range(4)}, "host": 0.0}, "20 % (4 of 5)"),
    ],
)
def test_the_workers_that_wait_are_named_where_others_do_not(waits: dict[str, float], text: str) -> None:
    assert waiting(waits) == text
    assert (waiting(waits, named=1) == text) == ("," not in text)
    assert waiting_for_data(waits) == (f"waiting for data {text}" if text else "")


def test_jobs_and_rounds_show_that_their_workers_wait() -> None:
    job = JobInfo(7, "digits", "running", "", "", 3, 20, "round", "", None, None, 0, 0.0, None)
    slow = replace(job, waits={"csd0": 0.0, "csd1": 0.43})
    assert "waiting" not in shown(tables.jobs([job]))
    assert shown(tables.jobs([slow])).splitlines()[1].endswith("waiting for data 43 % (csd1)")
    ended = shown(tables.jobs([replace(slow, state="done", model="/m.safetensors")]))
    assert "/m.safetensors; waiting for data 43 % (csd1)" in ended
    result = replace(ROUND, data={"csd0": costs(0.0), "csd1": costs(4.3)})
    assert round_summary(result) == "100 samples, 10.00 s, waiting for data 43 % (csd1)"
    assert round_summary(ROUND) == "100 samples, 10.00 s"


def test_an_epoch_has_the_waiting_of_its_exchanges_among_its_metrics() -> None:
    epoch = Epoch()
    for waited in (2.0, 4.0):
        costs_by_rank = {0: costs(waited), 1: costs(0.0)}
        epoch.count(ExchangeOutcome(counted={0: 100, 1: 100}, data=costs_by_rank), ["csd0", "csd1"])
    assert epoch.metrics["waiting_share"] == pytest.approx(6 / 40)
    assert [own["waiting_share"] for own in epoch.by_worker.values()] == [pytest.approx(0.3), 0.0]
    assert epoch.data["csd0"].exchanges == 2


def test_without_threads_that_read_ahead_all_reading_is_waited_for() -> None:
    assert batch_wait(costs(4.0, reading=4.0), threads=0, passes=2) == pytest.approx(0.4)
    assert batch_wait(costs(0.0, reading=0.0), threads=0, passes=2) == 0.0


def test_threads_hide_the_reading_that_is_faster_than_training() -> None:
    """20 batches in 2 passes, each trained on for 0.5 s."""
    hidden = batch_wait(costs(0.0, reading=8.0), threads=1, passes=2)
    assert hidden == pytest.approx(0.4 / 5.4)  # the first batch of a pass
    read = 20 * 1.5
    alone, two, four = (batch_wait(costs(0.0, reading=read), threads, 2) for threads in (1, 2, 4))
    assert alone == pytest.approx((1.5 + 9 * 1.0) / (1.5 + 9 * 1.5 + 0.5))
    assert alone > two > four == pytest.approx(1.5 / 6.5)


@pytest.mark.parametrize(("repeats", "waited", "whole"), [(1, 4 + 3 * 3, 17), (2, 4 + 3 * 2, 18), (4, 4, 20)])
def test_the_stall_of_mini_epochs_is_that_of_the_tiers(repeats: int, waited: int, whole: int) -> None:
    """4 mini-epochs of 25 samples, each read in 4 s, and trained on in 1 s for each repeat."""
    own = costs(5.0, seconds=4.0 * repeats + 5.0, stalled=5.0, reading=16.0, samples=100, mini_epochs=4)
    found = worker_data(replace(own, fitting=60), 0, repeats)
    assert found.mini_epochs is not None
    assert (found.mini_epochs.count, found.mini_epochs.size, found.mini_epochs.fitting) == (4, 25, 60)
    assert found.mini_epochs.hiding == pytest.approx(4.0)
    assert found.predicted == pytest.approx(waited / whole)
    assert found.waited == pytest.approx(5.0 / own.seconds)


def test_repeats_by_a_rule_are_those_of_the_worker() -> None:
    own = costs(0.0, seconds=40.0, reading=16.0, samples=100, mini_epochs=4)
    for told, repeats in ((0, 16), (10, 2.5)):
        found = worker_data(replace(own, repeats=told), 0, 16)
        assert found.mini_epochs is not None and found.mini_epochs.repeats == repeats
        assert found.training == pytest.approx(40.0 / (100 * repeats))


def test_figures_of_nothing_are_no_division_by_zero() -> None:
    bare = DataCosts(seconds=1.0, exchanges=1, trained=1, samples=1)
    for threads in (0, 3):
        assert worker_data(bare, threads, 1).predicted == 0.0
    assert worker_data(bare, 0, 1).rate is None
    tiered = worker_data(replace(bare, mini_epochs=1), 0, 1)
    assert tiered.predicted == tiered.waited == 0.0
    assert (
        worker_data(replace(bare, stalled=1.0, waited=1.0, mini_epochs=1, reading=1.0), 0, 1).predicted == 1
    )
    only_lost = replace(ROUND, data={"csd0": DataCosts()})
    found = explanation(7, JOB, "round", [only_lost])
    assert found is not None and found.workers == {}


def test_an_explanation_is_of_the_rounds_that_were_measured() -> None:
    assert explanation(7, JOB, "round", [ROUND]) is None
    measured = replace(ROUND, round=2, data={"csd0": costs(4.3, reading=5.0)})
    found = explanation(7, JOB, "round", [ROUND, measured, replace(measured, round=3)])
    assert found is not None
    assert (found.first, found.last, found.prefetch, found.passes) == (2, 3, 2, 2)
    assert found.workers["csd0"].waited == pytest.approx(0.43)
    assert found.workers["csd0"].reading == pytest.approx(5.0 / 200)


def test_a_table_shows_choice_prediction_and_measurement() -> None:
    stream = StreamTiming(256, 1 << 20, 1.25e8, 0.0012, 0.0001, 3)
    data = {
        "csd0": costs(4.3, reading=5.0),
        "csd1": costs(5.0, stalled=4.0, reading=6.0, samples=100, mini_epochs=4, fitting=60),
        "host": costs(0.5, reading=0.4, stream=stream),
    }
    found = explanation(7, JOB, "round", [replace(ROUND, data=data)])
    assert found is not None
    lines = shown(data_table.show(found)).splitlines()
    assert lines[0] == "job 7 digits, round 1: 2 epochs each, prefetch = 2"
    rows = {line.split()[0]: line for line in lines[1:5]}
    assert "batches" in rows["csd0"] and "43 %" in rows["csd0"] and "25.00 ms" in rows["csd0"]
    assert "mini-epochs" in rows["csd1"] and "40 %" in rows["csd1"] and rows["csd1"].endswith("50 %")
    assert "the stream" in rows["host"] and " 3 %" in rows["host"]
    text = "\n".join(lines[5:])
    assert "[tier] fast holds" in text and "2 x 60" in text and "repeats" in text
    assert "256 samples" in text and "125.0 MB/s" in text and "1.20 ms" in text and "100.00 us" in text
    assert printing.print_json(found) is None
