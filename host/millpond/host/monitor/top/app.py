# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the live view of a fleet: devices, jobs and events, with keys to act on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, RichLog, Static

from millpond.base.errors import MillpondError
from millpond.base.text import printable
from millpond.host.api.daemon import JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor.feed import Feed
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import has_ended
from millpond.host.monitor.top import texts
from millpond.host.monitor.top.plain import follow_active
from millpond.host.monitor.top.screens import JobScreen, LogScreen, Question
from millpond.host.monitor.top.table import LiveTable

LOOK_SECONDS: Final = 1.0


class TopApp(App[None]):
    """The live view of the fleet that ``feed`` follows."""

    TITLE = "millpond top"
    ENABLE_COMMAND_PALETTE = False
    ANIMATION_LEVEL = "none"
    CSS = """
    Static, LiveTable, RichLog { background: $background; }
    .title { height: auto; max-height: 2; text-style: bold; }
    .-no-colour LiveTable:focus > .datatable--cursor { text-style: reverse; }
    LiveTable { overflow-x: hidden; }
    #devices { height: 2fr; }
    #jobs { height: 2fr; }
    #about { height: auto; max-height: 3; text-style: bold; }
    #events { height: 1fr; min-height: 3; }
    #curve { height: 2fr; min-height: 6; }
    #workers { height: 1fr; }
    #lines { height: 1fr; }
    Question { align: center middle; }
    #question { width: 60; height: auto; border: solid $foreground; padding: 1; background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "open", "open"),
        Binding("l", "log", "log"),
        Binding("s", "shell", "shell"),
        Binding("x", "stop", "stop job"),
        Binding("r", "resume", "resume job"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(self, feed: Feed, name: str) -> None:
        super().__init__(ansi_color="NO_COLOR" in os.environ or None)
        self.set_class(self.no_color, "-no-colour")
        self._feed, self._fleet_name = feed, name
        self._shown = FleetSnapshot()

    def compose(self) -> ComposeResult:
        """Yield what the screen has."""
        yield Static(Text("waiting for the host daemon"), classes="title", id="summary")
        yield LiveTable(texts.DEVICE_COLUMNS, id="devices")
        yield LiveTable(texts.JOB_COLUMNS, id="jobs")
        yield Static(id="about")
        yield Static(Text("EVENTS"), classes="title")
        yield RichLog(markup=False, highlight=False, wrap=True, max_lines=500, id="events")
        yield Footer()

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key acts on the screen that is shown."""
        if isinstance(self.screen, LogScreen):
            return action not in {"open", "log", "shell", "stop", "resume"}
        return action not in {"open", "shell"} or not isinstance(self.screen, JobScreen)

    def on_mount(self) -> None:
        """Look for a new snapshot again and again."""
        self.query_one("#devices", LiveTable).focus()
        self.set_interval(LOOK_SECONDS, self._look)
        self._look()

    def _look(self) -> None:
        before, now = self._shown, self._feed.snapshot
        if now.version == before.version or not self.screen_stack[0].query("#summary"):  # it ends
            return
        self._shown = now
        screen = self.screen
        follow_active(self._feed, now, screen.number if isinstance(screen, JobScreen) else None)
        self._show(before, now)
        if isinstance(screen, JobScreen):
            screen.show(now)

    def _show(self, before: FleetSnapshot, now: FleetSnapshot) -> None:
        main = self.screen_stack[0]
        main.query_one("#summary", Static).update(Text(texts.summary(self._fleet_name, now)))
        devices = {
            info.name: texts.device_cells(info, now.fleet.last(info.name)) for info in now.fleet.devices
        }
        main.query_one("#devices", LiveTable).show(devices)
        jobs = {str(info.id): texts.job_cells(info, now.followed.get(info.id)) for info in reversed(now.jobs)}
        main.query_one("#jobs", LiveTable).show(jobs)
        log = main.query_one("#events", RichLog)
        for line in texts.changes(before, now, rounds=False):
            log.write(Text(line))
        self._describe()

    def _describe(self) -> None:
        """Tell about the device or job below the cursor."""
        if not self.screen_stack:  # the view ends
            return
        table, now = self._table, self._shown
        text = ""
        if table.id == "devices" and (device := now.fleet.device(table.selected)):
            text = texts.about_device(device, now.fleet.last(device.name))
        elif table.id == "jobs" and (job := self._job):
            text = texts.about_job(job, now.followed.get(job.id))
        self.screen_stack[0].query_one("#about", Static).update(Text(text))

    @property
    def _table(self) -> LiveTable:
        """The table with the focus, that of devices if none has it."""
        main = self.screen_stack[0]
        found = main.focused
        return found if isinstance(found, LiveTable) else main.query_one("#devices", LiveTable)

    @property
    def _job(self) -> JobInfo | None:
        """The job that is shown alone, or lies below the cursor; None without one."""
        if isinstance(self.screen, JobScreen):
            return self._shown.job(self.screen.number)
        selected = self._table.selected if self._table.id == "jobs" else ""
        return self._shown.job(int(selected)) if selected else None

    @property
    def _device(self) -> str:
        """The name of the device below the cursor, "" without one."""
        on_main = len(self.screen_stack) == 1 and self._table.id == "devices"
        return self._table.selected if on_main else ""

    def on_data_table_row_highlighted(self, _event: DataTable.RowHighlighted) -> None:
        """Tell about the row below the cursor."""
        self._describe()

    def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        """Open what is below the cursor."""
        self.action_open()

    def on_descendant_focus(self) -> None:
        """Tell about the row below the cursor of the table that has the focus now."""
        self._describe()

    def action_open(self) -> None:
        """Open the job below the cursor, or the log of the device."""
        if self._device:
            self.action_log()
        elif (job := self._job) and not isinstance(self.screen, JobScreen):
            self._feed.follow(job.id)
            self.push_screen(screen := JobScreen(job.id))
            self.call_after_refresh(lambda: screen.show(self._shown))

    def action_log(self) -> None:
        """Show the log of the device or the job below the cursor."""
        job = self._job
        if target := self._device or (str(job.id) if job else ""):
            self.push_screen(LogScreen(self._feed.directory, target))

    def action_shell(self) -> None:
        """Open a shell on the device below the cursor; this view goes on behind it."""
        if device := self._device:
            try:
                with self.suspend():
                    _run_shell(self._feed.directory, device)
            except SuspendNotSupported:
                self._tell("this terminal cannot be given to a shell", is_error=True)

    def action_stop(self) -> None:
        """Stop the job below the cursor, once that is confirmed."""
        if (job := self._job) is None:
            self._tell("the cursor is on no job: Tab goes to the jobs")
        elif has_ended(job):
            self._tell(f"job {job.id} is {job.state}")
        else:
            self._ask(f"Stop job {job.id} ({printable(job.name)})?", job.id, DaemonClient.stop)

    def action_resume(self) -> None:
        """Resume the job below the cursor, once that is confirmed."""
        if (job := self._job) is None:
            self._tell("the cursor is on no job: Tab goes to the jobs")
        elif not has_ended(job):
            self._tell(f"job {job.id} is {job.state}")
        else:
            self._ask(f"Resume job {job.id} ({printable(job.name)})?", job.id, DaemonClient.resume)

    def _ask(self, question: str, number: int, action: Callable[[DaemonClient, int], None]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._act(number, action)

        self.push_screen(Question(question), answered)

    @work(thread=True)
    def _act(self, number: int, action: Callable[[DaemonClient, int], None]) -> None:
        """Do something to a job, and tell how that ended."""
        try:
            with DaemonClient(self._feed.directory) as client:
                action(client, number)
        except MillpondError as error:
            self.call_from_thread(self._tell, str(error), is_error=True)
        self._feed.ask_now()

    def _tell(self, text: str, *, is_error: bool = False) -> None:
        self.notify(printable(text), severity="error" if is_error else "information", markup=False)


def _run_shell(fleet: Path, device: str) -> None:
    """Run a shell on a device in this terminal, and let its user read why it has failed."""
    command = (sys.executable, "-m", "millpond.host.main", "shell", "--fleet", str(fleet), device)
    if code := subprocess.run(command, check=False).returncode:
        input(f"the shell on {printable(device)} ended with {code}; Enter goes on")
