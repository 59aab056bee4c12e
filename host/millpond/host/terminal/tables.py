# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): tables and a live view of a job for users; JSON for programs."""

from __future__ import annotations

import json
import pwd
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from millpond.base.text import printable
from millpond.host.api.daemon import Curves, DeviceInfo, JobInfo
from millpond.host.api.progress import JobProgress
from millpond.host.records.comparison import JobComparison
from millpond.host.records.data_costs import shares, waiting, waiting_for_data
from millpond.host.records.energy import per_image, rounded
from millpond.host.records.jobs import Round
from millpond.host.terminal.fitted_table import Cell, fitted
from millpond.host.terminal.job_clock import JobClock
from millpond.host.terminal.printing import size
from millpond.host.terminal.progress_lines import PERIOD_SECONDS
from millpond.wire.control_messages import CohortInForce, Ledger

WIDE = 160
"""Characters of a line that goes to no terminal."""
COLOURS = {
    "ready": "green",
    "up": "green",
    "down": "red",
    "connecting": "yellow",
    "absent": "red",
    "incompatible": "red",
    "revoked": "red",
    "refused": "red",
    "faulty": "red",
    "queued": "cyan",
    "running": "yellow",
    "done": "green",
    "failed": "red",
    "stopped": "magenta",
}


def console() -> Console:
    """Return the console for tables; wide enough for a whole row when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)


def quiet_console() -> Console:
    """Return a console that shows nothing, where standard output is for a program."""
    return Console(quiet=True)


def state(name: str) -> Text:
    """Return a state in its colour."""
    return Text(name, COLOURS.get(name, ""))


def figures(*headings: str) -> Table:
    """Return an empty table whose columns behind the first one are numbers."""
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


_LESS_NEEDED = (
    "tunnel to / from",
    "agent",
    "cores",
    "temp",
    "board",
    "power",
    "drive",
    "cohort",
    "budget",
    "private",
    "cpu",
    "memory",
)
"""Columns of devices, those that go first on a narrow terminal first."""
_IF_ANY = {"power", "drive", "cohort", "budget", ""}
"""Columns that are shown if any device has something in them."""


def devices(infos: Sequence[DeviceInfo], width: int = WIDE) -> Table:
    """Return the table of ``millpond devices`` in so many characters."""
    headings = ["device", "board", "state", "agent", "cores", "cpu", "memory", "flash", "private", "temp"]
    headings += ["power", "drive", "cohort", "budget", "jobs", "tunnel to / from", ""]
    rows: list[list[Cell]] = [
        [info.name, info.board, state(info.state), *_device_cells(info)] for info in infos
    ]
    empty = [name for place, name in enumerate(headings) if all(str(row[place]) in ("", "-") for row in rows)]
    kept = [
        name
        for name in headings
        if name not in {"power", "drive", "cohort", "budget", ""} or name not in empty
    ]
    places = [headings.index(name) for name in kept]
    shown = [[row[place] for place in places] for row in rows]
    return fitted(kept, shown, width, dropped=_LESS_NEEDED, wrapped=("jobs", ""))


def ledgers(found: Mapping[str, Ledger], devices: Iterable[str]) -> Table:
    """Return the table of what has left each device by kind, and of its sightings of canaries and tracers. A
    device without a ledger, as it is not ready, has a row, too.
    """
    kinds = sorted({kind for ledger in found.values() for kind in ledger.sent})
    table = figures("device", *kinds, "private", "canaries and tracers")
    for name in devices:
        if (ledger := found.get(name)) is None:
            table.add_row(name, *("?" for _ in kinds), "?", "not ready")
            continue
        seen = ", ".join(f"{pattern} {count}" for pattern, count in sorted(ledger.canaries.items()))
        sent = (size(ledger.sent.get(kind, 0)) for kind in kinds)
        table.add_row(name, *sent, f"{size(ledger.private_bytes)} kept", seen or "-")
    return table


def _device_cells(info: DeviceInfo) -> list[Cell]:
    welcome, load = info.welcome, info.load
    if welcome is None or load is None or info.state == "faulty":
        return [*[""] * 13, info.reason]
    return [
        f"{welcome.software} {welcome.machine}",
        str(welcome.cores),
        f"{load.cpu:.0%}",
        _share(load.memory_used, welcome.memory),
        _share(load.flash_used, welcome.flash),
        "encrypted" if welcome.at_rest.cipher else "plain",
        "-" if load.temperature is None else f"{load.temperature:.0f} C",
        _power(info.watts, load.energy),
        "-" if load.drive.wear is None else f"{load.drive.wear:.0%} worn",
        _cohort(load.cohort),
        ", ".join(map(_spent, load.budgets)) or "-",
        ", ".join(load.jobs) or "-",
        f"{size(info.tunnel[0])} / {size(info.tunnel[1])}",
        "",
    ]


def _power(watts: float | None, source: str) -> str:
    return "-" if watts is None else f"{watts:.1f} W ({source})"


def _cohort(cohort: CohortInForce) -> str:
    """Return for which devices one masks its updates."""
    if cohort.roster is None:
        return f"{cohort.devices} pinned" if cohort.devices else "-"
    return f"roster {cohort.roster}: {cohort.devices}" if cohort.roster else "no roster"


def _spent(budget: tuple[str, float]) -> str:
    """Return how much of a private folder's privacy budget is spent."""
    folder, share = budget
    return f"{folder} {'spent' if share >= 1 - 1e-9 else f'{share:.0%} spent'}"


def _share(used: int, total: int) -> str:
    return f"{used / max(total, 1):.0%} of {size(total)}"


def jobs(infos: Iterable[JobInfo], width: int = WIDE) -> Table:
    """Return the table of ``millpond jobs`` in so many characters."""
    headings = ["id", "job", "state", "round", "score", "owner", ""]
    rows = list[list[Cell]]()
    for info in infos:
        score = "-" if info.score is None else f"{info.metric} {info.score:.4f}"
        pruned = "its files are pruned" if info.pruned is not None else ""
        said = (info.error or info.model or info.reason, pruned, waiting_for_data(info.waits))
        about = "; ".join(filter(None, said))
        rounds = f"{info.round}/{info.rounds}"
        rows.append([str(info.id), info.name, state(info.state), rounds, score, user(info.owner), about])
    return fitted(headings, rows, width, dropped=("owner",), wrapped=("job", "score", ""))


def user(uid: int | None) -> str:
    """Return the name of a user of this host, or the uid of one without a name; "-" for an unknown user."""
    if uid is None:
        return "-"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def comparison(found: JobComparison) -> tuple[Table, Table]:
    """Return the tables of ``millpond jobs compare``: a job per line, and a key per line that differs."""
    headings = [
        "id",
        "job",
        "state",
        "rounds",
        "metric",
        "final",
        "best",
        "seconds",
        "tunnels to / from",
        "energy",
    ]
    outcome = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for job in found.jobs:
        outcome.add_row(
            str(job.id),
            job.name,
            state(job.state),
            str(job.rounds),
            job.metric or "-",
            *("-" if score is None else f"{score:.4f}" for score in (job.final, job.best)),
            f"{job.seconds:.1f}",
            f"{size(job.to_devices)} / {size(job.from_devices)}",
            "-" if job.joules is None else f"{rounded(job.joules)} J",
        )
    keys = Table(
        "key", *(f"job {job.id}" for job in found.jobs), box=None, pad_edge=False, header_style="bold"
    )
    for key, values in found.differences.items():
        keys.add_row(_toml(key), *("-" if value is None else _toml(value) for value in values))
    return outcome, keys


def _toml(value: Any) -> str:
    return printable(value, len(value)) if isinstance(value, str) else json.dumps(value)


def curves(found: Curves) -> Table:
    """Return the table of ``millpond profile``: samples per second and memory by batch, the planned one
    marked.
    """
    headings = ("worker", "kind", "batch", "seconds", "samples/s", "memory", "")
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for profile in found.profiles:
        planned = found.batches[profile.worker]
        chosen = min((point.batch for point in profile.points if point.batch >= planned), default=None)
        for number, point in enumerate(profile.points):
            table.add_row(
                "" if number else profile.worker,
                "" if number else profile.kind,
                str(point.batch),
                f"{point.seconds:.4f}",
                f"{point.batch / point.seconds:.1f}",
                size(point.peak_bytes),
                f"plan: {planned}" if point.batch == chosen else "",
            )
    return table


def _joules(figure: float | None) -> str:
    return "-" if figure is None else rounded(figure)


NARROW = 110
_WAITING = "waiting for the workers"
MOST_FIGURES = 4
"""Scores that have a column; the JSON document has all of them."""


class JobView:
    """A job as it runs: a live table on a terminal, a line for each round elsewhere. ``unit`` names a round
    in the table's head.
    """

    def __init__(self, output: Console, devices: Sequence[str], unit: str = "round") -> None:
        self._console, self._devices, self._unit = output, devices, unit
        self._narrow = output.width < NARROW
        self._rounds: list[Round] = []
        self._lines: list[list[str]] = []
        self._table = Table()
        self._metered = False
        self._clock = JobClock()
        self._told = time.monotonic()
        self._metric = ""
        self._figures: list[tuple[tuple[str, str], str]] = []

    def _begin(self, first: Round) -> None:
        self._metered = bool(first.joules)
        self._figures = _figures(first, self._metric)
        self._table = self._new_table()

    def _new_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        joules = ("J/image",) if self._metered else ()
        figures = [name for _, name in self._figures]
        wait = "waiting" if self._narrow else "waiting for data"
        for heading in (self._unit, *(figures or ["scores"]), "seconds", "samples", wait, *joules):
            table.add_column(heading, justify="right", no_wrap=True)
        tunnels = ["tunnels"] if self._narrow else self._devices
        for name in tunnels:
            table.add_column(f"{name} to / from", justify="right", no_wrap=True)
        table.add_column("")  # what a round went without; empty in most jobs
        return table

    def follow(self, progresses: Iterable[JobProgress]) -> tuple[JobInfo, list[Round]]:
        """Show a job until it ends. Returns how it ended, and its rounds."""
        if not self._console.is_terminal:
            return self._follow(progresses, None)
        with Live(Spinner("dots", _WAITING), console=self._console) as live:
            result = self._follow(progresses, live)
            live.update(self._table_of(self._lines) if self._rounds else "")  # what stays has all rounds
            return result

    def _follow(self, progresses: Iterable[JobProgress], live: Live | None) -> tuple[JobInfo, list[Round]]:
        info: JobInfo | None = None
        reason = ""
        for progress in progresses:
            info = progress.info
            self._metric = info.metric
            if info.reason != reason and (reason := info.reason):
                self._console.print(Text(f"job {info.id} is queued: {reason}", "dim"))
            for line in progress.lines:
                if not line.startswith("round"):  # the table shows those
                    self._console.print(Text(line, "dim"), soft_wrap=live is None)
            for result in progress.rounds:
                self._show(result, live)
            self._tell(self._clock.told(info, self._rounds, time.monotonic()), live)
        assert info is not None
        return info, self._rounds

    def _tell(self, text: str, live: Live | None) -> None:
        """Show how far the job is: below the table, or as a line now and then."""
        if live:
            room = self._console.height - 3  # below the head, above this and the cursor: it shows no more
            table = [self._table_of(self._lines[-max(1, room) :])] if self._lines else []
            goes_on = [Spinner("dots", text or _WAITING)] if text or not table else []
            live.update(Group(*table, *goes_on))
        elif text and (now := time.monotonic()) - self._told >= PERIOD_SECONDS:
            self._told = now
            self._console.print(Text(text, "dim"), soft_wrap=True)

    def _show(self, result: Round, live: Live | None) -> None:
        if not self._rounds:
            self._begin(result)
        self._rounds.append(result)
        cells = self._cells(result)
        if live:
            self._lines.append(cells)
            return
        self._told = time.monotonic()
        headings = [str(column.header) for column in self._table.columns]
        widths = [max(len(heading), 9) for heading in headings[:-1]] + [0]
        for row in ([headings] if len(self._rounds) == 1 else []) + [cells]:
            line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            self._console.print(line.rstrip(), soft_wrap=True)

    def _table_of(self, lines: Iterable[list[str]]) -> Table:
        """Return the table of some rounds' cells."""
        table = self._new_table()
        for cells in lines:
            table.add_row(*cells)
        return table

    def _scores(self, result: Round) -> list[str]:
        """Return the figures of a round, or all in one cell where the first round had none."""
        if not self._figures:
            return [" ".join(f"{name} {value}" for (_, name), value in _all_figures(result)) or "-"]
        found = dict(_all_figures(result))
        return [found.get(key, "-") for key, _ in self._figures]

    def _cells(self, result: Round) -> list[str]:
        tunnels = [result.tunnel.get(device, (0, 0)) for device in self._devices]
        if self._narrow:
            tunnels = [(sum(to for to, _ in tunnels), sum(back for _, back in tunnels))]
        return [
            str(result.round),
            *self._scores(result),
            f"{result.seconds:.2f}",
            str(result.samples),
            waiting(shares(result.data), named=1) or "-",
            *([_joules(per_image(result))] if self._metered else []),
            *(f"{size(to)} / {size(back)}" for to, back in tunnels),
            f"without {', '.join(result.missing)}" if result.missing else "",
        ]


def _all_figures(result: Round) -> list[tuple[tuple[str, str], str]]:
    """Return the figures of a round by place and name."""
    return [
        ((place, name), "not finite" if value is None else f"{value:.4f}")
        for place, figures in result.scores.items()
        for name, value in figures.items()
    ]


def _figures(first: Round, metric: str) -> list[tuple[tuple[str, str], str]]:
    """Return the figures that have columns, and their headings: first the deciding one and the loss."""
    places = list(first.scores)
    found = [key for key, _ in _all_figures(first)]
    found.sort(key=lambda key: (key[1] != metric, key[1] != "loss", places.index(key[0])))
    return [
        ((place, name), name if place == places[0] else f"{place} {name}")
        for place, name in found[:MOST_FIGURES]
    ]
