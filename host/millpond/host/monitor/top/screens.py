# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the screens that open above the fleet: a question, a log, and a job."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, RichLog, Static

from millpond.base.errors import MillpondError
from millpond.base.text import printable
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor import job_plot, log_follow
from millpond.host.monitor.fleet_snapshot import FleetSnapshot
from millpond.host.monitor.job_view import JobCourse
from millpond.host.monitor.top import texts
from millpond.host.monitor.top.table import LiveTable

LOG_LINES = 200
BACK: list[BindingType] = [Binding("escape,q", "app.pop_screen", "back")]


class Question(ModalScreen[bool]):
    """Asks before something is done to a job; ends with whether the answer was yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,enter", "answer(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Yield what the screen has."""
        with Vertical(id="question"):
            yield Static(Text(self._text))
            yield Static(Text("y: yes    n: no"))

    def action_answer(self, answer: bool) -> None:
        """End with the answer."""
        self.dismiss(answer)


class LogScreen(Screen[None]):
    """Shows the log of a device or a job as it grows."""

    BINDINGS: ClassVar[list[BindingType]] = BACK

    def __init__(self, fleet: Path, target: str) -> None:
        super().__init__()
        self._fleet, self._target = fleet, target
        self._client: DaemonClient | None = None

    def compose(self) -> ComposeResult:
        """Yield what the screen has."""
        job = "job " if self._target.isdecimal() else ""
        yield Static(Text(f"log of {job}{self._target}"), classes="title")
        yield RichLog(markup=False, highlight=False, wrap=True, max_lines=5000)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(RichLog).focus()
        self._follow()

    def on_unmount(self) -> None:
        """End the following of the log."""
        if self._client:
            self._client.close()

    @work(thread=True, exit_on_error=False)
    def _follow(self) -> None:
        try:
            with DaemonClient(self._fleet) as self._client:
                for entry in log_follow.follow(self._client, self._target, LOG_LINES):
                    if not self.is_attached:
                        return
                    mark = "-- " if entry.is_event else ""
                    self.app.call_from_thread(self._write, f"{mark}{entry.text}")
                self.app.call_from_thread(self._write, "-- the end")
        except MillpondError as error:
            if self.is_attached:
                self.app.call_from_thread(self._write, f"-- {error}")

    def _write(self, line: str) -> None:
        self.query_one(RichLog).write(Text(printable(line, kept="\t")))


class JobScreen(Screen[None]):
    """Shows a job: its curve, its workers, and its events and log as they come."""

    BINDINGS: ClassVar[list[BindingType]] = BACK

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self._course: JobCourse | None = None

    def compose(self) -> ComposeResult:
        """Yield what the screen has."""
        yield Static(Text(f"job {self.number}"), classes="title", id="about")
        yield Static(id="curve")
        yield LiveTable(texts.WORKER_COLUMNS, id="workers")
        yield RichLog(markup=False, highlight=False, wrap=True, max_lines=1000, id="lines")
        yield Footer()

    def show(self, now: FleetSnapshot) -> None:
        """Show the job as it is in a snapshot."""
        course = now.followed.get(self.number)
        if not self.query("#lines"):  # it is only being made
            return
        if refusal := now.refused.get(self.number):
            self.query_one("#about", Static).update(Text(printable(refusal)))
        if course is None or course is self._course:
            return
        self.query_one("#about", Static).update(Text(texts.about_job(course.info, course)))
        self.query_one(LiveTable).show({part.worker: texts.worker_cells(part) for part in course.workers})
        if self._course is None or course.rounds is not self._course.rounds:
            self.call_after_refresh(self._draw, course)  # it has its size then
        self._tell(course)
        self._course = course

    def on_resize(self) -> None:
        """Draw the curve anew in the size that it has now."""
        if self._course:
            self.call_after_refresh(self._draw, self._course)

    def _draw(self, course: JobCourse) -> None:
        place = self.query_one("#curve", Static)
        drawn = dict(list(job_plot.curves([course]).items())[:1])
        if drawn and place.size.height > 2:
            curve = job_plot.text(drawn, place.size.width, place.size.height, course.info.unit)
            place.update(Text(curve, no_wrap=True))
        elif not drawn:
            place.update(Text("no score yet"))

    def _tell(self, course: JobCourse) -> None:
        new = max(0, course.line_count - (self._course.line_count if self._course else 0))
        log = self.query_one("#lines", RichLog)
        for line in course.lines[len(course.lines) - new :] if new < len(course.lines) else course.lines:
            log.write(Text(printable(line)))
