# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'update': installs an image on devices of the fleet, a few at a time."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.base.errors import LocalError, MillpondError
from millpond.base.text import duration
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    AuthorityOption,
    FleetOption,
    FormatOption,
    new_app,
)
from millpond.host.fleet import directory as fleets
from millpond.host.records import device_set
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import ProgressView, view
from millpond.images.boards import EMULATED
from millpond.images.format import locate

if TYPE_CHECKING:
    from millpond.host.remote.device_update import Phase

app = new_app()
FAILED = 1
_UNDONE = ("failed", "untouched")


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The outcome for one device: "updated", "current" where it ran the image already, "failed", or
    "untouched" after another device's failure.
    """

    device: str
    state: str
    slot: str = ""
    error: str = ""


@app.command("update")
def command(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="DEVICE... IMAGE", help="Devices (csd0 csd[2-4] @fast), then the image."),
    ],
    everybody: Annotated[bool, typer.Option("--all", help="All devices of the image's board.")] = False,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once", min=1, metavar="N", help="The number of devices that are updated at a time."
        ),
    ] = 1,
    patience: Annotated[
        float, typer.Option("--patience", min=10, metavar="SECONDS", help="The longest time of a restart.")
    ] = 600.0,
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Also install an image that is older than the running one.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also update devices that run the image already.")
    ] = False,
    authority: AuthorityOption = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Update devices to an image, and stop at the first failure. A device that does not come back with the
    new image starts the one before. After a failure or Ctrl-C, repeat the same command: it continues.
    """
    from millpond.host.remote import bundles  # import cryptography and paramiko, which takes long
    from millpond.host.remote.device_update import DeviceUpdate

    fleet, image = fleets.read(fleet_directory, authority), Path(targets[-1])
    path, manifest = locate.find(image)
    names = _names(fleet, targets[:-1], manifest.board, everybody=everybody)
    check(fleet, names, manifest.board)
    is_json, restarts = output is Format.JSON, Restarts(patience)

    def update(name: str, shown: ProgressView) -> UpdateOutcome:
        try:
            with UpdatePhases(shown, name, bundle.path.stat().st_size, restarts) as phases:
                device = DeviceUpdate(
                    fleet_directory, name, bundle, phases.watch, patience, authority, again=again
                )
                running = device.run(allow_older=allow_older)
                phases.end()
        except (MillpondError, OSError) as error:  # what others have done must be told, too
            return UpdateOutcome(name, "failed", error=str(error))
        already = " already; --again installs it once more" if device.was_current else ""
        shown.print(f"{name}: runs {running.version} ({running.serial}) in slot {running.slot}{already}")
        return UpdateOutcome(name, "current" if device.was_current else "updated", running.slot)

    with view(terminal=sys.stdout.isatty(), shows=not is_json) as shown:
        bundle = bundles.make(fleet, path, manifest, shown.print)
        outcomes = roll(names, at_once, lambda name: update(name, shown))
    _show_outcomes(outcomes, as_json=is_json)
    if any(outcome.state in _UNDONE for outcome in outcomes):
        raise typer.Exit(FAILED)


def _names(fleet: fleets.Fleet, named: Sequence[str], board: str, *, everybody: bool) -> Sequence[str]:
    if everybody and named:
        raise LocalError(f"--all is all devices of the board {board}: leave out {', '.join(named)}, or --all")
    if everybody:
        return [one.name for one in fleet.config.device if one.board == board]
    return [name for text in named for name in ([text] if device_set.is_one(text) else fleet.named(text))]


def check(fleet: fleets.Fleet, names: Sequence[str], board: str) -> None:
    """Raise LocalError if a device is unknown, named twice, emulated or of another board than the image."""
    known = {device.name: device.board for device in fleet.config.device}
    if not names:
        raise LocalError(f"name devices, or --all; of the board {board} there are: {_of(known, board)}")
    for name in names:
        if names.count(name) > 1:
            raise LocalError(f"{name} is named twice")
        if name not in known:
            raise LocalError(f"there is no device '{name}'; the fleet has {', '.join(known) or 'none'}")
        if known[name] == EMULATED:
            raise LocalError(
                f"{name} is emulated: it runs this machine's own software, there is nothing to update"
            )
        if known[name] != board:
            raise LocalError(f"{name} is a {known[name]}, the image is for a {board}")


def _of(known: dict[str, str], board: str) -> str:
    return ", ".join(name for name, own in known.items() if own == board) or "none"


def roll(names: Sequence[str], at_once: int, update: Callable[[str], UpdateOutcome]) -> list[UpdateOutcome]:
    """Update ``names`` in order, ``at_once`` of them at a time; none is begun after a failure."""
    found: dict[str, UpdateOutcome] = {}
    waiting, running = list(names), set[Future[UpdateOutcome]]()
    with ThreadPoolExecutor(at_once) as pool:
        while running or waiting:
            failed = any(outcome.state == "failed" for outcome in found.values())
            while waiting and len(running) < at_once and not failed:
                running.add(pool.submit(update, waiting.pop(0)))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            found |= {outcome.device: outcome for outcome in (future.result() for future in done)}
    return [found.get(name, UpdateOutcome(name, "untouched")) for name in names]


@dataclass(slots=True)
class Restarts:
    """How long restarts may take (s), and how long the last one ``took``, None before the first."""

    patience: float
    took: float | None = None

    @property
    def expected(self) -> str:
        """The time that the next restart may take."""
        most = f"at most {duration(self.patience)}"
        return most if self.took is None else f"the last device took {duration(self.took)}, {most}"


class UpdatePhases(contextlib.ExitStack):
    """Shows the phases of a device's update, how much of the bundle's ``size`` bytes it has, and how long
    others last. ``clock`` is a steady one (s).
    """

    def __init__(
        self,
        shown: ProgressView,
        device: str,
        size: int,
        restarts: Restarts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._shown, self._device, self._size, self._restarts = shown, device, size, restarts
        self._clock, self._restarted = clock, math.inf
        self._advance: Callable[[int], None] | None = None

    def watch(self, phase: Phase, more: int) -> None:
        """Take a phase, or that ``more`` bytes were sent."""
        if not more:
            self._shown.print(f"{self._device}: {phase}")
            self.close()  # the status of the phase before
            if phase == "restarting":
                self._restarted = self._clock()
            if phase != "sending":
                say = self.enter_context(self._shown.status(f"{self._device}: {phase}"))
                say(self._restarts.expected if phase == "confirming" else "")
            return
        self._advance = self._advance or self._shown.begin(f"{self._device}: sending", self._size)
        self._advance(more)

    def end(self) -> None:
        """Note how long the device took for its restart, for the next one."""
        if (now := self._clock()) > self._restarted:
            self._restarts.took = now - self._restarted


def _show_outcomes(outcomes: Sequence[UpdateOutcome], *, as_json: bool) -> None:
    if as_json:
        printing.print_json({"devices": list(outcomes)})
        return
    for outcome in outcomes:
        if outcome.state in _UNDONE:
            why = f": {outcome.error}" if outcome.error else ", because another failed"
            print(f"{outcome.device}: {outcome.state}{why}")
