# SPDX-License-Identifier: Apache-2.0
"""The files that a launch sends, by worker, and those that it brings back: named, bounded, never outside."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, LocalError, MillpondError
from millpond.base.text import named
from millpond.host.api.launch import (
    LaunchInput,
    LaunchInputsEnd,
    LaunchPrepares,
    LaunchSaved,
    StartLaunch,
    WorkerEnd,
)
from millpond.host.cli.launch import _about_privacy, _about_variables, module_file, read_files
from millpond.host.cli.launch import launch as launch_command
from millpond.host.client.launch_inputs import list_inputs, read_inputs
from millpond.host.launch import preparation
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.preparation import LaunchPreparation
from millpond.host.terminal.launch_progress import LaunchProgress
from millpond.host.terminal.output_folder import OutputFolder
from millpond.host.terminal.progress_lines import ProgressLines
from millpond.train.distributed.launch_messages import SAVED_PART, InputPart, InputsEnd, script_digest
from millpond.wire.channel import Channel


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work/data/deep").mkdir(parents=True)
    (tmp_path / "elsewhere/more").mkdir(parents=True)
    for name in ("work/a.py", "work/data/b.txt", "work/data/deep/c", "elsewhere/d", "elsewhere/more/e"):
        (tmp_path / name).write_bytes(name.encode() + b"\xff")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def names(*paths: Path | str) -> list[str]:
    return sorted(read_files(Path("a.py"), [Path(path) for path in paths])[1])


def test_files_keep_their_paths_below_the_current_folder(here: Path) -> None:
    assert names("data/deep/c", here / "work/data/b.txt") == ["a.py", "data/b.txt", "data/deep/c"]
    assert names("data", "../elsewhere/d") == ["a.py", "d", "data/b.txt", "data/deep/c"]
    assert names(here / "elsewhere") == ["a.py", "elsewhere/d", "elsewhere/more/e"]
    assert names(".", "./data/../data", "a.py") == ["a.py", "data/b.txt", "data/deep/c"]
    (here / "work/data/linked").symlink_to("/etc/hostname")
    _, sent = read_files(Path(here / "work/a.py"), [Path("data")])
    assert sent["data/b.txt"].endswith(b"\xff") and sent["data/linked"] == Path("/etc/hostname").read_bytes()


def test_what_cannot_be_sent_is_refused_before_anything_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere/a.py").touch()
    with pytest.raises(LocalError, match=r"two files are named 'a\.py'"):
        names(here / "elsewhere/a.py")
    os.mkfifo(here / "work/data/pipe")
    with pytest.raises(LocalError, match="data/pipe: only plain files can be sent"):
        names("data")
    (here / "work/data/pipe").unlink()
    (here / "work/data/way").symlink_to("/usr")
    with pytest.raises(LocalError, match="data/way: a link to a folder cannot be sent"):
        names("data")
    (here / "work/data/way").unlink()
    with (here / "work/data/huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LocalError, match="3 MiB are possible"):
        names("data")
    (here / "work/data/huge").unlink()
    (here / "work/many").mkdir()
    for number in range(4100):
        (here / f"work/many/{number}").touch()
    with pytest.raises(LocalError, match="4096 are possible"):
        names("many")


def part(path: str, start: int, size: int, worker: str = "csd0") -> LaunchSaved:
    return LaunchSaved(worker, path, start, size)


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out/put") as folder:
        folder.write(part("a/b", 0, 4), b"12")
        folder.write(part("a", 0, 1, "host"), b"x")
        assert not (tmp_path / "out/put/csd0/a/b").exists()
        folder.write(part("a/b", 2, 4), b"34")
        folder.write(part("half", 0, 4), b"12")
    found = {
        str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert found == {"out/put/csd0/a/b": "1234", "out/put/host/a": "x"}


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "csd0").mkdir(parents=True)
    (inside / "csd0/folder").symlink_to(outside)
    (inside / "csd0/kept").symlink_to(outside / "kept")
    (inside / "csd1").symlink_to(outside)
    with OutputFolder(inside) as folder:
        for wrong in (part("../x", 0, 1), part("/x", 0, 1), part("x", 0, 1, ".."), part("x", 0, 1, "a/../b")):
            with pytest.raises(MillpondError):
                folder.write(wrong, b"x")
        for through in (part("folder/x", 0, 1), part("x", 0, 1, "csd1")):
            with pytest.raises(OSError):
                folder.write(through, b"x")
        folder.write(part("kept", 0, 1), b"x")
        with pytest.raises(MillpondError):
            folder.write(part("long", 0, 1), b"xx")
    assert [path.name for path in outside.iterdir()] == ["kept"] and (outside / "kept").read_text() == "kept"
    assert (inside / "csd0/kept").read_text() == "x" and not (inside / "csd0/kept").is_symlink()


@pytest.mark.parametrize(("devices", "told"), [(("csd3", "csd4"), 1), ((), 0)])
def test_where_a_private_script_prints_is_told_as_a_command(devices: tuple[str, ...], told: int) -> None:
    start = StartLaunch("below/a.py", (), {"below/a.py": b""}, devices, True, confined=True)
    ends = [WorkerEnd(name, rank, 0) for rank, name in enumerate(("host", *devices))]
    lines = list(_about_privacy(start, ends))
    assert len(lines) == told
    assert all("'millpond logs --device csd3 launch-a.py'" in line for line in lines)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ((("PYTHONHASHSEED", "0"), ("OMP_NUM_THREADS", "4")), []),
        ((("PYTHONHASHSEED", "7"), ("LD_PRELOAD", "x.so"), ("A", "b")), ["PYTHONHASHSEED, LD_PRELOAD"]),
    ],
)
def test_variables_that_come_too_late_are_named(
    variables: tuple[tuple[str, str], ...], told: list[str]
) -> None:
    lines = list(_about_variables(StartLaunch("a.py", (), {"a.py": b""}, (), True, variables=variables)))
    assert [line.partition(":")[0] for line in lines] == told


def test_the_digest_of_a_module_is_not_that_of_the_file_as_a_script(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "work/own.py").write_text("")
    launch_command(Path("own.py"), ["x"], digest=True)
    launch_command(Path("own"), ["x"], module=True, digest=True)
    launch_command(Path("-m"), ["own", "x"], digest=True)
    files = {"own.py": b""}
    of_script, of_module = (script_digest("own.py", files, ["x"], module) for module in ("", "own"))
    assert capsys.readouterr().out.split() == [of_script, of_module, of_module]
    assert of_script != of_module
    with pytest.raises(LocalError, match=r"-m other: other\.py is not here"):
        launch_command(Path("other"), module=True, digest=True)  # nobody should sign it


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    for name, content in {
        "host/run/model": b"h" * (SAVED_PART + 7),
        "csd0/run/model": b"",
        "all/words": b"w",
        "wheels/extra-1-py3-none-any.whl": b"x",
    }.items():
        path = folder.parent / "wheels" / Path(name).name if name.startswith("wheels") else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def received(inputs: LaunchInputs, worker: str) -> dict[str, tuple[bytes, bool]]:
    """What a worker gets, by its path, and whether it is a wheel."""
    near, far = (Channel(end, "the other end") for end in socket.socketpair())
    found: dict[str, tuple[bytes, bool]] = {}
    with near, far:
        sent = list[int]()
        thread = threading.Thread(target=inputs.send, args=(worker, near, sent.append))
        thread.start()
        while not isinstance(message := (head := far.receive(soon())).message, InputsEnd):
            assert isinstance(message, InputPart)
            data = bytes(far.receive_payload(SAVED_PART, soon())) if head.payload_size else b""
            before = found.get(message.path, (b"", False))[0]
            assert len(before) == message.start
            found[message.path] = before + data, message.wheel
        thread.join(20)
    assert sum(sent) == inputs.size(worker) == sum(len(data) for data, _ in found.values())
    return found


def kept(inputs: LaunchInputs, folder: Path, wheels: list[Path]) -> None:
    near, far = (Channel(end, "the other end") for end in socket.socketpair())
    with near, far:
        thread = threading.Thread(target=inputs.receive, args=(far,))
        thread.start()
        for part, data in read_inputs(list_inputs(folder, wheels)):
            near.send(part, soon(), data)
        near.send(LaunchInputsEnd(), soon())
        thread.join(20)


def test_each_worker_gets_its_own_files_and_those_of_all(given: Path, tmp_path: Path) -> None:
    with LaunchInputs(tmp_path) as inputs:
        kept(inputs, given, [tmp_path / "wheels"])
        every = {"words": (b"w", False), "extra-1-py3-none-any.whl": (b"x", True)}
        assert received(inputs, "host") == {"run/model": (b"h" * (SAVED_PART + 7), False)} | every
        assert received(inputs, "csd0") == {"run/model": (b"", False)} | every
        assert received(inputs, "csd1") == every
        inputs.check(["host", "csd0"])
        with pytest.raises(
            ConfigError, match="files for 'csd0', which is no worker of this launch; it has host"
        ):
            inputs.check(["host"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "wheels"]


def test_what_cannot_be_sent_is_named(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalError, match="there are no wheels"):
        list_inputs(None, [given])
    (given / "loose").touch()
    with pytest.raises(LocalError, match="lay it into the folder of a worker"):
        list_inputs(given, [])
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/train.py", "pkg/tool/__main__.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert module_file("pkg.train") == (Path("pkg/train.py"), True)
    assert module_file("pkg.tool") == (Path("pkg/tool/__main__.py"), True)
    assert read_files(Path("pkg/train.py"), [Path("pkg")])[0] == "pkg/train.py"
    assert read_files(tmp_path / "pkg/train.py", ())[0] == "pkg/train.py"
    assert module_file("pkg.none") == (Path("pkg/none.py"), False)
    for name in ("", ".", "pkg.", "pkg..train", "../pkg", "pkg/train", "/etc/passwd"):
        with pytest.raises(LocalError, match="no name of a module"):
            module_file(name)
    assert read_files(Path("pkg/none.py"), [Path("pkg/train.py")], installed=True) == (
        "pkg/none.py",
        {"pkg/train.py": b""},
    )


def test_a_launch_says_how_far_it_is_until_its_scripts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    preparing = LaunchPreparation({"host": 0, "csd0": 300, "csd1": 100})
    assert preparing.news() is None  # a launch that starts at once says nothing
    monkeypatch.setattr(preparation, "PERIOD_SECONDS", 0.0)
    preparing.begun("host")
    preparing.sent("csd1", 100)
    assert preparing.news() == LaunchPrepares("files to csd0", 100, 400)
    preparing.sent("csd0", 300)
    assert preparing.news() == LaunchPrepares("waits for csd0, csd1 to start")
    preparing.begun("csd0")
    preparing.begun("csd1")
    assert [preparing.news(), preparing.news()] == [LaunchPrepares(), None]
    assert named([f"csd{number}" for number in range(10)]).endswith("csd7, 2 more")


def test_the_files_of_a_launch_and_its_start_are_shown_until_it_runs() -> None:
    told, clock = list[str](), iter(range(100))
    lines = ProgressLines(tell=told.append, clock=lambda: float(next(clock)))
    with LaunchProgress(lines, 8) as progress:
        part = LaunchInput("csd0", "a", 0, 8)
        for _ in progress.sending([(part, bytes(4)), (part, bytes(4))]):
            lines.look()
        progress.take(LaunchPrepares("files to csd0", 2, 8))
        lines.look()
        progress.take(LaunchPrepares())
        lines.look()
    assert told[0] == "files to the host daemon: 0% of 8 B" and told[1].startswith(
        "files to the host daemon: 50% of 8 B, "
    )
    assert len(told) == 3 and told[2].startswith("files to the workers: 25% of 8 B, ")
