# SPDX-License-Identifier: Apache-2.0
"""The demo: its output is true, and its end leaves nothing behind, however it comes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from ..waiting import eventually
from .processes import descendants, mounts_below, running
from .support import MILLPOND

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
INTERFACES = {"mp0", "mp-csd0", "mp-csd1", "mp-csd2"}
"""Those of a demo, which are in namespaces that it has made."""


STOPPING = """
import os, signal, tempfile

really = tempfile.mkdtemp


def mkdtemp(*arguments, **options):
    place = really(*arguments, **options)
    if options.get("prefix") == "millpond-":
        os.kill(os.getpid(), signal.SIGSTOP)
    return place


tempfile.mkdtemp = mkdtemp
"""
"""A sitecustomize: the process that is about to mount a volume stops itself, as that takes a moment."""


class Demo:
    """A demo in a session of its own, and all processes that were ever seen below it."""

    def __init__(self, directory: Path, *arguments: str, stopping: bool = False) -> None:
        self.directory = directory
        self._output = [directory.parent / f"{directory.name}.{name}" for name in ("out", "err")]
        argv = [*MILLPOND, "demo", "--in", str(directory), *arguments]
        env = os.environ | {"TMPDIR": str(directory.parent)}
        if stopping:
            (directory.parent / "sitecustomize.py").write_text(STOPPING)
            env["PYTHONPATH"] = str(directory.parent)
        with self._output[0].open("wb") as out, self._output[1].open("wb") as err:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
            )
        self._seen: set[psutil.Process] = set()

    def said(self) -> tuple[str, str]:
        """Its output and errors so far."""
        out, err = (path.read_text() for path in self._output)
        return out, err

    def watch(self, moment: Callable[[Demo], bool]) -> None:
        """Let it run until a moment that comes before its end, and note its processes."""

        def come() -> bool:
            self._seen.update(descendants(self.process.pid))
            assert self.process.poll() is None, self.said()
            return moment(self)

        eventually(come, "the moment", 120, 0.1)

    def finish(self, seconds: float) -> tuple[int, str, str]:
        """Exit code and output; its processes may outlive it by a moment only."""
        code = self.process.wait(seconds)
        eventually(lambda: not self.left(), "the end of what the demo started", 15, 0.1)
        return (128 - code if code < 0 else code), *self.said()

    def left(self) -> list[psutil.Process]:
        """What still lives of it, also what was never seen while it ran."""
        return running({*self._seen, *_of(self.directory)})

    def kill(self) -> None:
        """Whatever a test has come to."""
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


def _of(directory: Path) -> set[psutil.Process]:
    """Processes that have the directory in their command line or environment, or keep a file in it open."""
    found = set()
    for process in psutil.process_iter():
        try:
            about = [*process.cmdline(), *process.environ().values(), *_open_files(process.pid)]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(directory) in item for item in about):
            found.add(process)
    return found


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where a demo may be; in the end nothing of it may be left on the machine."""
    before = INTERFACES & psutil.net_if_addrs().keys()
    yield tmp_path / "demo"
    assert not mounts_below(tmp_path)
    assert INTERFACES & psutil.net_if_addrs().keys() <= before


def loading(demo: Demo) -> bool:
    """Python is still loading the command's modules, of which this is one."""
    return "/cryptography/" in Path(f"/proc/{demo.process.pid}/maps").read_text()


def switching_on(demo: Demo) -> bool:
    """The daemon has begun, and devices are starting."""
    return (demo.directory / "fleet" / "host.log").exists()


def starting_workers(demo: Demo) -> bool:
    """All devices are ready, and the job is submitted."""
    return "federated averaging" in demo.said()[0]


def training(demo: Demo) -> bool:
    """A round is done."""
    return re.search(r"^ +1 +0\.\d{4} ", demo.said()[0], re.MULTILINE) is not None


def mounting(demo: Demo) -> bool:
    """The job is done, and the first volume is about to be mounted."""
    return any(_is_stopped(process) for process in demo.left())


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


@pytest.mark.parametrize(
    "moment",
    [
        loading,
        switching_on,
        pytest.param(starting_workers, marks=pytest.mark.full),
        pytest.param(training, marks=pytest.mark.full),
        pytest.param(mounting, marks=pytest.mark.full),
    ],
    ids=lambda moment: moment.__name__,
)
def test_ctrl_c_leaves_nothing(place: Path, moment: Callable[[Demo], bool]) -> None:
    demo = Demo(place, stopping=moment is mounting)
    try:
        demo.watch(moment)
        os.killpg(demo.process.pid, signal.SIGINT)
        os.killpg(demo.process.pid, signal.SIGCONT)
        code, _, errors = demo.finish(60)
        assert code == 130, errors
        assert "Traceback" not in errors
    finally:
        demo.kill()


def test_a_killed_demo_is_gone_and_the_next_one_works(place: Path) -> None:
    first = Demo(place)
    try:
        first.watch(switching_on)
        first.process.kill()
        eventually(lambda: not first.left(), "the end of what the demo started", 30, 0.1)
    finally:
        first.kill()
    second = Demo(place)
    try:
        code, out, errors = second.finish(200)
        assert code == 0, errors
    finally:
        second.kill()
    _check_report(place, out)


def test_a_fleet_that_is_kept_answers_the_commands_that_are_printed(place: Path) -> None:
    """With a job of the user's own, on as many devices and for as many epochs as the user says."""
    job = ("--job", str(ROOT / "agent/examples/digits-sync.toml"))
    demo = Demo(place, "--keep", "--devices", "1", "--rounds", "1", "--seed", "3", *job)
    try:
        demo.watch(lambda demo: " shell csd0\n" in demo.said()[0])
        *lines, _shell = demo.said()[0].splitlines()[-6:]
        script = "\n".join(("set -e", *lines)).replace("digits.toml", "digits.toml --set federated.rounds=1")
        done = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "public/digits" in done.stdout and "job 2 is done" in done.stdout, done.stdout
        os.killpg(demo.process.pid, signal.SIGINT)
        code, _, errors = demo.finish(60)
        assert code == 0 and "Traceback" not in errors, errors
    finally:
        demo.kill()
    report = json.loads((place / "report.json").read_text())
    assert (report["devices"], report["rounds"], report["private_bytes_leaked"]) == (["csd0"], 1, 0)


def test_a_job_that_is_wrong_is_told_before_a_fleet_is_made(place: Path) -> None:
    (place.parent / "job.toml").write_text("rounds = 3\n")
    demo = Demo(place, "--job", str(place.parent / "job.toml"))
    try:
        code, _, errors = demo.finish(90)
    finally:
        demo.kill()
    assert code == 2 and errors.startswith("millpond: job.toml"), errors
    assert errors.count("\n") == 1 and not (place / "fleet").exists()


def _check_report(place: Path, out: str) -> None:
    report: dict[str, Any] = json.loads((place / "report.json").read_text())
    assert report["accuracy"] >= 0.95
    assert report["rounds"] == len(report["history"]) > 0
    assert report["seconds"] > report["training_seconds"] > 0
    assert report["devices"] == ["csd0", "csd1", "csd2"]
    assert report["private_bytes_kept"] > 0
    assert all(report["tunnel_bytes"][kind] > 0 for kind in ("parameters", "metrics", "control", "volume"))
    crossed = sum(interface["from"] for interface in report["tunnel_interfaces"].values())
    assert crossed >= sum(report["tunnel_bytes"].values())
    assert report["private_bytes_leaked"] == 0
    assert report["privacy"]["canaries_seen"] == {"text": 0, "image": 0, "image-float32": 0}
    assert report["privacy"]["control_found"] >= 1
    assert "csd0" in report["ssh"]["command"]["stdout"]
    assert report["ssh"]["private"]["exit_code"] != 0
    assert [volume["device"] for volume in report["volumes"]] == report["devices"]
    for volume in report["volumes"]:
        assert volume["private_exists"] is False
        assert "public/digits/images.npy" in volume["files"]
    assert len(load_file(report["model"])) > 0
    assert (place / "accuracy.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"{report['accuracy']:.4f}" in out
    assert "\x1b" not in out


def test_a_place_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    demo = Demo(tmp_path)
    try:
        code, _, errors = demo.finish(90)
    finally:
        demo.kill()
    assert code == 2
    assert errors.startswith("millpond: ")
    assert len(errors.splitlines()) == 1
    assert (tmp_path / "precious").read_text() == "mine"
