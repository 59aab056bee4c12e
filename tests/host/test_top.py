# SPDX-License-Identifier: Apache-2.0
"""The live view of a fleet, in a terminal of 80 x 24 characters in memory and as lines of text."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from textual.pilot import Pilot
from textual.widgets import RichLog

from millpond.host.api.daemon import DeviceInfo, Devices, JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.cli.views import top as command
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor.feed import Feed
from millpond.host.monitor.fleet_history import DeviceSample, FleetHistory
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import JobCourse
from millpond.host.monitor.top import app as top_app
from millpond.host.monitor.top import plain, texts
from millpond.host.monitor.top.app import TopApp
from millpond.host.records.jobs import JobEvent, Round
from millpond.wire.control_messages import Load, Welcome

from .daemon_rig import Rig

CSD0 = DeviceInfo(
    "csd0",
    "emulated",
    "ready",
    "",
    "10.77.0.2",
    Welcome("csd0", "1.0", "boot", "aarch64", 4, 4 << 30, 8 << 30),
    Load(0.5, 1 << 30, 2 << 30, 51.0, ("digits",)),
    (1000, 5000),
    7.5,
)
JOB = JobInfo(
    *(7, "digits", "running", "", "", 2, 10, "round", "accuracy", 0.6, 0.7, 1, 0.0, None),
    stage="training",
    done=0.25,
)
HOSTILE = "[red]x[/red] \x1b[2J\x1b]0;owned\x07\u202eabc"
CLEAN = "[red]x[/red]  [2J ]0;owned  abc"
Screen = Callable[[str], Awaitable[str]]


class PlainFeed:
    """A feed that shows what a test has put there."""

    directory = Path("/nowhere")

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self.snapshot = snapshot
        self.follow = self.unfollow = self.ask_now = lambda *_: None

    def put(self, **changes: Any) -> None:
        self.snapshot = replace(self.snapshot, version=self.snapshot.version + 1, **changes)


def fleet(*devices: DeviceInfo, before: tuple[DeviceInfo, ...] = ()) -> FleetHistory:
    found = FleetHistory().after(100.0, Devices(before)) if before else FleetHistory()
    return found.after(101.0, Devices(devices))


def screen(app: TopApp) -> str:
    """What the terminal shows now."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


def look(feed: object, test: Callable[[TopApp, Pilot[None], Screen], Awaitable[None]]) -> None:
    """Run a test of the view in a terminal of 80 x 24."""
    app = TopApp(cast(Feed, feed), "rig")

    async def shows(text: str) -> str:
        end = time.monotonic() + 30
        while text not in (found := screen(app)) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if text in found:
            return found
        pytest.fail(f"'{text}' is not in:\n{found}")

    async def run() -> None:
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await test(app, pilot, shows)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_app, "LOOK_SECONDS", 0.1)


def test_fleet_jobs_and_events_fit_a_small_terminal() -> None:
    csd1 = replace(CSD0, name="csd1", state="faulty", reason="the flash is full: 12 bytes are left")
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(CSD0, replace(csd1, state="ready")), jobs=(JOB,)))

    async def test(_app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
        found = (await shows("digits")).splitlines()
        assert len(found) <= 24 and max(map(len, found)) <= 80
        assert found[0] == "fleet rig, 2 devices, 2 ready, 1 job running"
        (row,) = (line for line in found if line.startswith("csd0 "))
        assert row.split()[:6] == ["csd0", "ready", "50%", "25%", "25%", "51"]
        (row,) = (line for line in found if line.startswith("7 "))
        assert row.split()[:6] == ["7", "digits", "running", "2/10", "accuracy", "0.6000"]
        feed.put(fleet=feed.snapshot.fleet.after(102.0, Devices((CSD0, csd1))))
        await shows("csd1 is faulty: the flash is full: 12 bytes are left")
        await pilot.press("down")
        assert "csd1: faulty: the flash is full: 12 bytes are left" in await shows("csd1: faulty")
        await pilot.press("tab")
        await shows("job 7 digits: running, round 2 of 10, training 25%")
        feed.put(fault="the host daemon has ended")
        assert (await shows("NO ANSWER: the host daemon has ended; fleet rig")).startswith("NO ANSWER")

    look(feed, test)


def test_the_rows_follow_what_is_there() -> None:
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(CSD0, replace(CSD0, name="csd1")), jobs=(JOB,)))

    async def test(app: TopApp, _pilot: Pilot[None], shows: Screen) -> None:
        await shows("csd1")
        busy = replace(CSD0, load=replace(CSD0.load, cpu=0.93))  # type: ignore[type-var]
        feed.put(fleet=fleet(busy, replace(CSD0, name="csd2")), jobs=(JOB, replace(JOB, id=8, name="new")))
        found = await shows("93%")
        assert "csd2" in found and "\ncsd1" not in found
        order = [line.split()[1] for line in found.splitlines() if line.startswith(("7 ", "8 "))]
        assert order == ["new", "digits"], "the newest job comes first"

    look(feed, test)


def test_cells_of_rates_leave_room_to_the_next_column() -> None:
    """Before: "582.3 kB/s" filled its column, and touched the next one."""
    sample = DeviceSample(0.0, to=582_300.0, back=999_900.0)
    cells = dict(zip(texts.DEVICE_COLUMNS, texts.device_cells(CSD0, sample), strict=True))
    assert all(len(cells[name]) < texts.DEVICE_COLUMNS[name] for name in ("to", "from"))


def test_texts_of_devices_and_jobs_have_no_effect() -> None:
    csd0 = replace(CSD0, state="faulty", reason=HOSTILE)
    job = replace(JOB, name=HOSTILE, error=HOSTILE, metric="[b]m")
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(csd0, before=(CSD0,)), jobs=(job,), fault=HOSTILE))
    course = JobCourse(job).after(JobProgress(job, (one_round(1),), (HOSTILE,)))

    async def test(app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
        await shows(f"csd0: faulty: {CLEAN}")
        await shows(f"csd0 is faulty: {CLEAN}")
        assert f"NO ANSWER: {CLEAN}" in await shows("[b]m 0.6000")
        await pilot.press("tab", "x")
        assert "Stop job 7 ([red]x[/red]" in await shows("Stop job 7")
        await pilot.press("n", "o")
        feed.put(followed={7: course})
        await shows(f"\n{CLEAN}")  # a line of its log
        assert "\x1b" not in screen(app)

    look(feed, test)


def one_round(number: int, **values: Any) -> Round:
    scores = {"host": {"accuracy": 0.1 * number}}
    return replace(Round(number, scores, 2.0, 40, {"csd0": 30, "host": 10}, {}, {}), **values)


def test_a_job_shows_its_curve_and_the_parts_of_workers() -> None:
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(CSD0), jobs=(JOB,)))
    course = JobCourse(JOB).after(JobProgress(JOB, (one_round(1), one_round(2)), ("round 2: all well",)))

    async def test(_app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
        await shows("digits")
        await pilot.press("tab", "enter")
        feed.put(followed={7: course})
        found = await shows("accuracy (host)")
        assert "about 16 s left" in " ".join(found.split()) and "round 2: all well" in found
        (row,) = (line for line in found.splitlines() if line.startswith("csd0 "))
        assert row.split()[:4] == ["csd0", "30", "75.0%", "0%"]
        again = course.after(JobProgress(JOB, (one_round(3, missing={"csd1": "no answer"}),)))
        feed.put(followed={7: again})
        await shows("missing: no answer")
        await pilot.press("escape")
        await shows("fleet rig")

    look(feed, test)


def test_keys_stop_and_resume_a_job_once_that_is_confirmed(rig: Rig) -> None:
    rig.submit("--set", "name=digits")
    rig.wait_for(1, "running")
    with Feed(rig.directory, period=0.1) as feed:

        async def test(_app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
            await shows("digits")
            await pilot.press("x")
            await shows("the cursor is on no job")
            await pilot.press("tab", "x")
            await shows("Stop job 1 (digits)?")
            await pilot.press("n")
            assert rig.info(1).state == "running"
            await pilot.press("x", "y")
            await shows("job 1 digits: stopped")
            await pilot.press("x")
            await shows("job 1 is stopped")
            await pilot.press("r")
            await shows("Resume job 1 (digits)?")
            await pilot.press("y")
            await shows("job 1 digits: running")

        look(feed, test)


def test_logs_of_jobs_and_devices(rig: Rig) -> None:
    rig.submit("--set", "name=digits")
    rig.wait_for(1, "running")
    rig.set_device("csd0", state=DeviceState.ABSENT, reason="its endpoint is down")
    rig.begun[1].log.info("[red]not red[/red]")
    with Feed(rig.directory, period=0.1) as feed:

        async def test(app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
            await shows("digits")
            await pilot.press("l")
            await shows("-- csd0 is gone: its endpoint is down")
            await pilot.press("escape", "tab", "l")
            await shows("INFO [red]not red[/red]")
            rig.begun[1].log.info("one more")
            await shows("INFO one more")
            assert isinstance(app.focused, RichLog)
            rig.finish(1)
            await shows("-- the end")
            await pilot.press("q")
            await shows("fleet rig")

        look(feed, test)


def test_a_terminal_that_cannot_be_given_away_gets_no_shell() -> None:
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(CSD0)))

    async def test(_app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
        await shows("csd0")
        await pilot.press("s")
        await shows("this terminal cannot be given to")

    look(feed, test)


def test_lines_for_a_screen_reader_tell_the_fleet_then_changes(rig: Rig) -> None:
    rig.submit("--set", "name=digits", text="\n[federated]\nrounds = 3\n")
    rig.wait_for(1, "running")
    with Feed(rig.directory, period=0.1) as feed:
        told = plain.lines(feed, "rig")
        assert next(told) == "fleet rig, 3 devices, 3 ready, 1 job running"
        assert next(told).startswith("csd0: ready, cpu 25%, memory 25%, flash 25%, temperature 41 C, agent 1")
        assert [next(told).partition(":")[0] for _ in range(3)] == ["csd1", "csd2", "job 1 digits"]
        rig.set_device("csd1", state=DeviceState.ABSENT, reason=HOSTILE)
        line = next(told)
        assert line.endswith(f" csd1 is lost: {CLEAN}") and line.isprintable()
        rig.add_round(1)
        rig.begun[1].context.changed()
        assert "job 1 digits: running, round 1 of 3" in next(told)
        rig.finish(1)
        assert "job 1 digits: done" in next(told)
        rig.server.close()
        assert feed._client
        feed._client.close()  # as the kernel does at the end of a daemon's process
        assert next(told).startswith("no answer: ")


def test_changes_name_events_of_followed_jobs() -> None:
    before = FleetSnapshot(1, fleet=fleet(CSD0), jobs=(JOB,), followed={7: JobCourse(JOB)})
    event = JobEvent(5.0, "lost", "csd0", "no answer\x07")
    course = JobCourse(JOB).after(JobProgress(JOB, (one_round(2), one_round(3, events=(event,)))))
    now = replace(before, version=2, followed={7: course})
    (line,) = texts.changes(before, now, rounds=False)
    assert line.endswith(" job 7: csd0 lost: no answer ")


def test_without_a_terminal_the_command_prints_lines(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        """Ends after the lines of the fleet."""

        def write(self, text: str) -> int:
            if "csd2: ready" in self.getvalue():
                raise BrokenPipeError
            return super().write(text)

    out = Closed()
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdin=io.StringIO(), stdout=out, stderr=out))
    monkeypatch.setattr("sys.stdout", out)
    with pytest.raises(BrokenPipeError):
        command.top(rig.directory, plain=False)
    assert "fleet rig, 3 devices, 3 ready" in out.getvalue() and "\x1b" not in out.getvalue()


def test_the_command_needs_a_daemon(rig: Rig) -> None:
    rig.server.close()
    code, out, err = rig.command("top")
    assert (code, out) == (2, "") and "no host daemon runs" in err


def test_a_cell_that_is_too_long_is_marked_and_told_below() -> None:
    job = replace(JOB, name="a-job-with-quite-a-long-name", rounds=1_000_000)
    feed = PlainFeed(FleetSnapshot(1, fleet=fleet(replace(CSD0, name="a-device-of-the-lab")), jobs=(job,)))

    async def test(_app: TopApp, pilot: Pilot[None], shows: Screen) -> None:
        found = await shows("a-job-with")
        assert "a-device\N{HORIZONTAL ELLIPSIS} ready" in found
        assert "a-job-with-quite\N{HORIZONTAL ELLIPSIS} running" in found
        assert "a-device-of-the-lab: ready" in found
        await pilot.press("tab")
        await shows("job 7 a-job-with-quite-a-long-name: running")

    look(feed, test)
