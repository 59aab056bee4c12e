# SPDX-License-Identifier: Apache-2.0
"""What people see on a terminal: tables of devices, a job as it runs, and plots of workers' profiles."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor
from rich.console import Console

from millpond.base.text import counted
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.cli.jobs import ending
from millpond.host.records.jobs import Round
from millpond.host.remote.doctor.device_checks import concerns
from millpond.host.terminal import profile_plot, tables
from millpond.host.terminal.tables import JobView
from millpond.train.balance.profiling import Point, Profile
from millpond.wire.control_messages import AtRest, DriveHealth, Ledger, Load, Welcome

from ..waiting import eventually

LOAD = Load(0.0, 1, 1, None, ())


def device(name: str, at_rest: AtRest) -> DeviceInfo:
    welcome = Welcome(name, "1", "boot", "aarch64", 4, 2, 2, at_rest)
    return DeviceInfo(name, "real", "ready", "", "10.77.0.2", welcome, LOAD, (0, 0))


def test_a_device_without_encryption_is_named_with_the_reason() -> None:
    infos = [
        device("csd0", AtRest("AES-256-XTS")),
        device("csd1", AtRest(reason="it held files already")),
        device("csd2", AtRest(reason="it held files already")),
        DeviceInfo("csd3", "real", "absent", "not seen yet", "10.77.0.14", None, None, (0, 0)),
    ]
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices(infos))
    rows = output.getvalue().splitlines()
    assert ["encrypted" in row for row in rows] == [False, True, False, False, False]
    assert ["plain" in row for row in rows] == [False, False, True, True, False]
    assert concerns(infos) == [
        "csd1, csd2: private data are not encrypted on the flash: it held files already"
    ]


def test_an_agent_that_does_not_say_counts_as_plain() -> None:
    old = DeviceInfo(
        "csd0", "real", "ready", "", "10.77.0.2", Welcome("csd0", "1", "b", "arm", 1, 2, 2), LOAD, (0, 0)
    )
    assert concerns([old]) == ["csd0: private data are not encrypted on the flash: the agent does not say"]


def test_a_device_that_can_run_no_job_is_shown_with_the_reason() -> None:
    """Before: the reason was told in JSON alone."""
    reason = "no process starts in a sandbox: exit code 70"
    faulty = replace(device("csd0", AtRest("AES-256-XTS")), state="faulty", reason=reason)
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices([faulty, device("csd1", AtRest("AES-256-XTS"))]))
    row, other = output.getvalue().splitlines()[1:]
    assert "faulty" in row and reason in row
    assert "ready" in other and "encrypted" in other


def test_the_wear_of_drives_is_shown_where_there_are_some() -> None:
    worn = replace(LOAD, drive=DriveHealth("emmc", 0.3, "its spare blocks run out"))
    infos = [replace(device("csd0", AtRest("AES-256-XTS")), load=worn), device("csd1", AtRest("AES-256-XTS"))]
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices(infos))
    assert [" 30% worn " in row for row in output.getvalue().splitlines()] == [False, True, False]
    assert concerns(infos) == ["csd0: its drive (emmc) warns: its spare blocks run out"]
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices(infos[1:]))
    assert "drive" not in output.getvalue()


@pytest.mark.parametrize("width", [64, 80, 120])
def test_a_narrow_terminal_shows_what_is_needed_and_cuts_nothing(width: int) -> None:
    """Before: at 80 columns names, states and jobs were cut."""
    reason = "the handshake failed: it speaks another version of the protocol than this host"
    load = replace(LOAD, jobs=("digits-of-all-hospitals", "another-job"))
    infos = [replace(device(f"csd{number}", AtRest("AES-256-XTS")), load=load) for number in range(2)]
    infos.append(
        DeviceInfo("a-long-name-1", "qemu-virt", "incompatible", reason, "10.77.0.14", None, None, (0, 0))
    )
    output = io.StringIO()
    Console(width=width, file=output).print(tables.devices(infos, width))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "\N{HORIZONTAL ELLIPSIS}" not in output.getvalue()
    whole = " ".join(output.getvalue().split())
    for word in ("csd0", "csd1", "a-long-name-1", "incompatible", "ready", "flash"):
        assert word in whole
    assert "tunnel to / from" not in whole
    letters = "".join(whole.split())
    assert all(letter in letters for letter in "".join(reason.split()))


def test_no_heading_of_a_narrow_terminal_is_folded() -> None:
    """Before: at 80 columns the jobs had one character, and their heading four lines."""
    welcome = Welcome("csd0", "1", "boot", "x86_64", 2, 25_300_000_000, 270_600_000_000)
    load = Load(1.0, 6_000_000_000, 65_000_000_000, None, ())
    info = DeviceInfo("csd0", "emulated", "ready", "", "10.77.0.2", welcome, load, (0, 0))
    for width in range(64, 120):
        output = io.StringIO()
        Console(width=width, file=output).print(tables.devices([info], width))
        heading, _row = output.getvalue().splitlines()
        assert "jobs" in heading.split()


def test_the_jobs_of_a_narrow_terminal_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    error = "csd1, csd2: the data folder 'private/digits' is not there; 'millpond data check' shows what is"
    info = replace(JOB, name="digits", state="failed", error=error)
    output = io.StringIO()
    Console(width=80, file=output).print(tables.jobs([info], 80))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 2
    column = lines[1].index("csd1, csd2")
    assert "".join(line[column:] for line in lines[1:]).replace(" ", "") == error.replace(" ", "")


JOB = JobInfo(7, "digits", "running", "", "", 3, 30, "round", "loss", None, None, 0, 0.0, None)


def test_a_device_whose_ledger_is_not_known_is_in_the_table_of_ledgers() -> None:
    output = io.StringIO()
    known = {"csd1": Ledger({"control": 700, "metrics": 20}, {"canary": 1}, 4096)}
    Console(width=160, file=output).print(tables.ledgers(known, ["csd0", "csd1"]))
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert rows[1] == ["csd0", "?", "?", "?", "not", "ready"]
    assert rows[2] == ["csd1", "700", "B", "20", "B", "4.1", "kB", "kept", "canary", "1"]


def test_a_job_that_is_done_names_the_devices_its_last_round_lacked() -> None:
    done, last = replace(JOB, round=2, score=0.5), Round(2, {}, 1.0, 8, {}, {"csd1": "no folder"}, {})
    assert ending(done, [replace(last, missing={})]) == "job 7 is done: loss 0.5000 after 2 rounds"
    assert ending(done, [last]).endswith("after 2 rounds, the last one without csd1")


def test_a_round_says_which_devices_it_lacked() -> None:
    whole = Round(1, {"host": {"loss": 0.5}}, 1.0, 8, {}, {}, {})
    lacking = replace(whole, round=2, missing={"csd1": "no folder"})
    for is_terminal in (False, True):
        output = io.StringIO()
        console = Console(width=120, file=output, force_terminal=is_terminal)
        JobView(console, ("csd0",)).follow([JobProgress(JOB, (whole, lacking))])
        assert "without csd1" in output.getvalue() and "missing" not in output.getvalue()


def test_numbers_have_their_nouns() -> None:
    assert (counted(0, "file"), counted(1, "file"), counted(2, "file")) == ("0 files", "1 file", "2 files")


def test_the_newest_rounds_are_shown_on_a_terminal_with_fewer_lines_and_all_in_the_end() -> None:
    output = io.StringIO()
    console = Console(width=120, height=10, file=output, force_terminal=True)

    def progresses() -> Iterator[JobProgress]:
        for number in range(1, 31):
            yield JobProgress(JOB, (Round(number, {"host": {"loss": 0.5}}, 1.0, 8, {}, {}, {}),))
        eventually(lambda: 30 in rounds(output.getvalue()), "the newest round")
        output.truncate(0)

    JobView(console, ("csd0",)).follow(progresses())
    assert rounds(output.getvalue()) == list(range(1, 31))


def rounds(shown: str) -> list[int]:
    """Return the rounds whose lines are shown."""
    words = [line.split() for line in shown.splitlines()]
    return [int(line[0]) for line in words if line[1:2] == ["0.5000"]]


HOST, DEVICE = "#12766f", "#c8553d"


def profile(worker: str, kind: str, slow: float, batches: tuple[int, ...] = (2, 4, 8, 16)) -> Profile:
    points = tuple(Point(batch, slow * (0.1 + 0.02 * batch), (300 + batch) << 20) for batch in batches)
    return Profile(worker, kind, points)


def pixels(path: Path, color: str) -> int:
    """How many there are of a color in a PNG."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        found = np.asarray(image.convert("RGB")) == ImageColor.getrgb(color)
        return int(found.all(axis=2).sum())


@pytest.mark.parametrize("slow", [2.0, 12.0])
def test_each_worker_has_a_line_and_its_chosen_batch_is_marked(tmp_path: Path, slow: float) -> None:
    profiles = [profile("host", "x86_64", 1), profile("csd0", "arm64", slow), Profile("csd1", "arm64", ())]
    for name, chosen in (("plain", {}), ("chosen", {"host": 12, "csd0": 4, "csd1": 0})):
        profile_plot.draw(profiles, chosen, "a model", tmp_path / f"{name}.png")
    for color in (HOST, DEVICE):
        assert 500 < pixels(tmp_path / "plain.png", color) < pixels(tmp_path / "chosen.png", color)


def test_of_many_workers_each_kind_has_a_color(tmp_path: Path) -> None:
    profiles = [profile("host", "x86_64", 1)] + [profile(f"csd{n}", "arm64", 3 + n / 20) for n in range(36)]
    profile_plot.draw(profiles, {}, "many", tmp_path / "many.png")
    assert pixels(tmp_path / "many.png", DEVICE) > pixels(tmp_path / "many.png", HOST) > 500
    assert pixels(tmp_path / "many.png", "#4464ad") == 0


def test_one_measured_batch_is_enough_and_none_gives_no_picture(tmp_path: Path) -> None:
    profile_plot.draw([profile("host", "x86_64", 1, (2,))], {"host": 2}, "one", tmp_path / "one.png")
    assert pixels(tmp_path / "one.png", HOST) > 100
    profile_plot.draw([Profile("host", "x86_64", ())], {}, "none", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
