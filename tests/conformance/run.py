"""Edge: one run: a volume's file system and its mounts, and what is done on each."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from conformance import exercisers, places, results
from conformance.results import Survived
from conformance.suite import Suite
from conformance.tap import Outcomes
from millpond.fs.layout import PUBLIC

MOUNTS = ("device", "device_fusepython", "host")
EXERCISED = ("device", "host")
TITLES = {
    "device": "the device's mount",
    "device_fusepython": "the device's mount through fuse-python",
    "host": "the host's mount",
}


@dataclass(slots=True)
class Run:
    """One run, in mounts of its own."""

    arguments: argparse.Namespace
    scratch: Path
    flash: Path
    kind: str
    began: float = field(default_factory=time.monotonic)
    entries: list[results.Entry] = field(default_factory=list)
    exercised: dict[str, dict[str, Survived]] = field(default_factory=lambda: {"fsx": {}, "fsstress": {}})

    def say(self, line: str) -> None:
        """To who watches."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)

    def all(self) -> None:
        """The suite on all mounts, then the random operations on each that has them; one at a time."""
        suite = Suite(self.arguments.pjdfstest, self.arguments.match, self.kind, self.scratch)
        self.say(f"pjdfstest takes every mount for {self.kind}")
        backing = suite.run(self._place(self.flash, "backing"))
        self.entries.append(results.backing_entry(backing, self.kind))
        self.say(results.brief(self.entries[-1]))
        for mount in self.arguments.only or MOUNTS:
            self._mount(mount, suite, backing)
            self._write()

    def _mount(self, mount: str, suite: Suite, backing: Outcomes) -> None:
        point = self.scratch / mount
        point.mkdir()
        with self._up(mount, point) as how:
            self.say(f"{mount}: {how}")
            found = suite.run(self._place(point, mount))
            title = f"{TITLES[mount]} ({how})"
            figure = f"pjdfstest_{mount}_percent"
            self.entries.append(results.mount_entry(figure, title, found, backing, self.kind))
            self.say(results.brief(self.entries[-1]))
            self._write()
            if mount in EXERCISED:
                self._exercise(mount, point)

    def _up(self, mount: str, point: Path) -> AbstractContextManager[str]:
        if mount == "host":
            return places.host(self.flash, point, self.scratch / "socket")
        return places.device(self.flash, point, "raw" if mount == "device" else "fuse-python")

    def _place(self, top: Path, name: str) -> Path:
        place = top / PUBLIC / name
        place.mkdir()
        return place

    def _exercise(self, mount: str, point: Path) -> None:
        for name, exercise in (("fsx", self._fsx), ("fsstress", self._fsstress)):
            folder: Path | None = getattr(self.arguments, name)
            if folder is None:
                continue
            try:
                found = exercise(folder.resolve() / name, self._place(point, f"{name}-{mount}"))
            except OSError as error:  # of the mount
                found = Survived(0, str(error))
            self.exercised[name][mount] = found
            self.say(f"{name} on {mount}: {found.operations} operations ({found.note})")

    def _fsx(self, program: Path, place: Path) -> Survived:
        return exercisers.fsx(program, place, self.scratch, self._operations("fsx"))

    def _fsstress(self, program: Path, place: Path) -> Survived:
        below = self.flash / PUBLIC / place.name
        return exercisers.fsstress(program, place, below, self._operations("fsstress"))

    def _operations(self, name: str) -> int:
        wanted: int = self.arguments.operations
        return wanted if name == "fsx" else wanted // 10

    def _all_entries(self) -> list[results.Entry]:
        entries = [*self.entries]
        for name, found in self.exercised.items():
            missing = f"{name.upper()}=DIR names a folder with it"
            entries.append(results.survival_entry(name, self._operations(name), found, missing))
        return entries

    def _write(self) -> None:
        path = self.arguments.output / "conformance.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self._all_entries(), indent=2) + "\n")
        fresh.rename(path)

    def report(self) -> None:
        """What was found, for who reads it at the end."""
        print("", *results.lines(self._all_entries()), "", sep="\n")
        self.say(f"written: {self.arguments.output}/conformance.json")
