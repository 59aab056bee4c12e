# SPDX-License-Identifier: Apache-2.0
"""Edge: POSIX tests and random operations, on each mount of a volume."""

from __future__ import annotations

from pathlib import Path

from conformance import exercisers, places, results
from conformance.context import EXERCISED, HOSTS, OWN_FILES, Context, Update
from conformance.results import Entry, Survived
from conformance.suite import Suite
from conformance.tap import Outcomes
from millpond.fs.store.layout import PUBLIC

TITLES = {
    "device": "the device's mount",
    "device_fusepython": "the device's mount through fuse-python",
    "host": "the host's mount",
    OWN_FILES: "the host's mount of a server whose new files are its own",
}
MOUNTS = tuple(TITLES)
SUITE = tuple(f"pjdfstest_{place}_percent" for place in ("backing", *MOUNTS))
FIGURES = (*SUITE, "fsx", "fsstress")


class Posix:
    """The suite on all mounts, then the random operations on each that has them; one at a time."""

    def __init__(self, context: Context, update: Update) -> None:
        self._context, self._update = context, update
        self._arguments = context.arguments
        self._entries: list[Entry] = []
        self._exercised: dict[str, dict[str, Survived]] = {"fsx": {}, "fsstress": {}}

    def run(self) -> None:
        """All that was built and named."""
        suite, backing = self._suite()
        for mount in self._arguments.only or MOUNTS:
            if suite or (mount in EXERCISED and any(map(self._folder, self._exercised))):
                self._mount(mount, suite, backing)
            self._update(self._all_entries())

    def _suite(self) -> tuple[Suite | None, Outcomes]:
        """It, and what it says of the file system below; nothing, if none was named."""
        context, folder = self._context, self._arguments.pjdfstest
        if not folder:
            why = "PJDFSTEST=DIR names a built one"
            self._entries += [results.missing_entry(figure, "%", why) for figure in SUITE]
            return None, {}
        suite = Suite(folder, self._arguments.match, context.kind, context.scratch)
        context.say(f"pjdfstest takes every mount for {context.kind}")
        backing = suite.run(_place(context.flash / PUBLIC, "backing"))
        self._add(results.backing_entry(backing, context.kind))
        return suite, backing

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._context.say(results.brief(entry))
        self._update(self._all_entries())

    def _mount(self, mount: str, suite: Suite | None, backing: Outcomes) -> None:
        point = self._context.scratch / mount
        with self._context.mounted(mount, point) as how:
            self._context.say(f"{mount}: {how}")
            if suite:
                found = suite.run(_place(point / PUBLIC, mount))
                title, figure = f"{TITLES[mount]} ({how})", f"pjdfstest_{mount}_percent"
                self._add(results.mount_entry(figure, title, found, backing, self._context.kind))
            if mount in EXERCISED:
                self._exercise(mount, point)

    def _folder(self, name: str) -> Path | None:
        folder: Path | None = getattr(self._arguments, name)
        return folder

    def _exercise(self, mount: str, point: Path) -> None:
        for name, exercise in (("fsx", self._fsx), ("fsstress", self._fsstress)):
            folder = self._folder(name)
            if folder is None:
                continue
            try:
                found = exercise(folder.resolve() / name, _place(point / PUBLIC, f"{name}-{mount}"))
            except OSError as error:  # of the mount
                found = Survived(0, str(error))
            self._exercised[name][mount] = found
            self._context.say(f"{name} on {mount}: {found.operations} operations ({found.note})")

    def _fsx(self, program: Path, place: Path) -> Survived:
        return exercisers.fsx(program, place, self._context.scratch, self._operations("fsx"))

    def _fsstress(self, program: Path, place: Path) -> Survived:
        count, mountpoint = self._operations("fsstress"), place.parents[1]
        below = self._context.flash / PUBLIC / place.name
        if mountpoint.name not in HOSTS:
            return exercisers.fsstress(program, place, below, count)
        beside = places.beside_of(mountpoint) / PUBLIC / place.name
        with exercisers.looking(beside) as looks:
            found = exercisers.fsstress(program, place, below, count)
        return Survived(found.operations, f"{found.note}, {len(looks)} looks by the device meanwhile")

    def _operations(self, name: str) -> int:
        wanted: int = self._arguments.operations
        return wanted if name == "fsx" else wanted // 10

    def _all_entries(self) -> list[Entry]:
        entries = [*self._entries]
        for name, found in self._exercised.items():
            missing = f"{name.upper()}=DIR names a folder with it"
            entries.append(results.survival_entry(name, self._operations(name), found, missing))
        return entries


def _place(top: Path, name: str) -> Path:
    place = top / name
    place.mkdir()
    return place


def run(context: Context, update: Update) -> None:
    """All of it that can be run."""
    Posix(context, update).run()
