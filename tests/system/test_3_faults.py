# SPDX-License-Identifier: Apache-2.0
"""Parts of a fleet die in the middle of a job, which goes on without them, and with them on return."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.host.records.jobs import Round

from ..waiting import eventually
from .support import Emulation, Pace

pytestmark = pytest.mark.timeout(240)
ROUNDS, TARGET = 1000, 0.12  # it ends when it is told to finish


def test_a_board_dies_in_a_round_and_joins_again(fleet: Emulation) -> None:
    with fleet.pace() as pace:
        job = fleet.submit(fleet.write_job("board-dies", rounds=ROUNDS, target=TARGET))
        fleet.wait_for_rounds(job, 2)
        fleet.pid_one("csd1").kill()

        def rejoined() -> bool:
            _, rounds = fleet.progress(job)
            lost = [result.round for result in rounds if "csd1" in result.missing]
            return bool(lost) and any("csd1" in r.workers for r in rounds if r.round > lost[0])

        eventually(rejoined, "csd1 in a round again", 120, 0.1)
        pace.finish()
        info, rounds = fleet.wait_for_end(job)
    assert info.state == "done", info.error
    first = next(result for result in rounds if result.missing)
    assert set(first.missing) == {"csd1"}
    assert set(first.workers) == {"csd0", "csd2"}
    assert first.missing["csd1"]
    assert all({"csd0", "csd2"} <= set(result.workers) for result in rounds)


@pytest.mark.full
def test_an_upload_that_ends_in_the_middle_does_not_count(dying: Emulation) -> None:
    with dying.pace() as pace:
        job = dying.submit(dying.write_job("upload-dies", rounds=ROUNDS, target=TARGET))

        def rejoined() -> bool:
            _, rounds = dying.progress(job)
            return any("csd1" in result.workers for result in rounds if result.round > 2)

        eventually(rejoined, "csd1 in a round again", 120, 0.1)
        pace.finish()
        info, rounds = dying.wait_for_end(job)
    assert info.state == "done", info.error
    assert set(rounds[0].workers) == {"csd0", "csd1"}
    assert set(rounds[1].workers) == {"csd0"}
    assert "csd1" in rounds[1].missing
    assert set(rounds[-1].workers) == {"csd0", "csd1"}
    console = dying.fleet.device_directory("csd1") / "console.log"
    assert "the agent ended with -9" in console.read_text()


def test_a_killed_daemon_resumes_the_job_and_comes_to_the_same_bits(fleet: Emulation) -> None:
    job_file = fleet.write_job("resumed", rounds=16)  # enough for the daemon to be killed before the last
    job = fleet.submit(job_file)
    finished = len(fleet.wait_for_rounds(job, 3))
    fleet.daemon().kill()
    with fleet.pace() as pace:
        fleet.wait_ready()
        pace.hurry()
        info, rounds = fleet.wait_for_end(job)
        assert info.state == "done", info.error
        assert [result.round for result in rounds] == list(range(1, 17))
        assert not any(result.missing for result in rounds)
        log = (fleet.fleet.job_directory(job) / "job.log").read_text()
        resumed = int(log.partition("resumed after round ")[2].split()[0])
        assert finished <= resumed < 16
        straight, _ = fleet.wait_for_end(fleet.submit(job_file))
    assert straight.state == "done", straight.error
    assert Path(info.model).read_bytes() == Path(straight.model).read_bytes()
    assert not list(Path(info.model).parent.glob(".*.part"))


def slow_third_device(fleet: Emulation, pace: Pace, name: str, keys: str) -> int:
    """Submit a job with further keys of its rounds, in which the first two devices need not wait."""
    for folder in pace.folders[:2]:
        (folder / "hurry").touch()
    path = fleet.write_job(name, rounds=ROUNDS, target=TARGET)
    path.write_text(path.read_text().replace("[federated]\n", f"[federated]\n{keys}\n"))
    return fleet.submit(path)


def test_asynchronous_rounds_go_on_while_a_device_is_slow_and_count_it_less(fleet: Emulation) -> None:
    def has_come() -> bool:
        _, rounds = fleet.progress(job)
        late = any("csd2" in r.workers and r.metrics["most_staleness"] >= 2 for r in rounds)
        took = took_part(rounds)  # others may have been slow, too, at first
        return late and took["csd2"] + 2 < min(took["csd0"], took["csd1"])

    def took_part(rounds: list[Round]) -> dict[str, int]:
        return {name: sum(name in r.workers for r in rounds) for name in ("csd0", "csd1", "csd2")}

    with fleet.pace() as pace:
        job = slow_third_device(fleet, pace, "asynchronous", "buffer = 2")
        eventually(has_come, "an update that began rounds ago", 120, 0.1)
        pace.finish()
        info, rounds = fleet.wait_for_end(job)
    assert info.state == "done", info.error
    assert not any(result.missing for result in rounds)
    took = took_part(rounds)
    assert took["csd2"] < min(took["csd0"], took["csd1"])
    log = (fleet.fleet.job_directory(job) / "job.log").read_text()
    assert " rounds old, " in log and "banned" not in log and "goes on without" not in log


def test_a_late_update_is_carried_into_the_round_in_which_it_comes(fleet: Emulation) -> None:
    def has_come() -> bool:
        _, rounds = fleet.progress(job)
        return any("csd2" in r.workers and r.metrics["most_staleness"] == 1 for r in rounds)

    with fleet.pace() as pace:
        job = slow_third_device(fleet, pace, "carried", 'late = "carry"\ndeadline = 0.3')
        eventually(has_come, "an update of the round before", 120, 0.1)
        pace.finish()
        info, rounds = fleet.wait_for_end(job)
    assert info.state == "done", info.error
    missing = [result.missing["csd2"] for result in rounds if "csd2" in result.missing]
    assert missing and missing[0] == "no answer within 0.3 s"
