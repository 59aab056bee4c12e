# SPDX-License-Identifier: Apache-2.0
"""Files for the workers of a launch: from folders here, by the daemon, to each its own and those of all."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, LocalError
from millpond.host.api.launch import LaunchInputsEnd
from millpond.host.cli.launch import module_file, read_files, read_inputs
from millpond.host.launch.inputs import LaunchInputs
from millpond.train.distributed.launch_messages import SAVED_PART, InputPart, InputsEnd
from millpond.wire.channel import Channel


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
        thread = threading.Thread(target=inputs.send, args=(worker, near))
        thread.start()
        while not isinstance(message := (head := far.receive(soon())).message, InputsEnd):
            assert isinstance(message, InputPart)
            data = bytes(far.receive_payload(SAVED_PART, soon())) if head.payload_size else b""
            before = found.get(message.path, (b"", False))[0]
            assert len(before) == message.start
            found[message.path] = before + data, message.wheel
        thread.join(20)
    return found


def kept(inputs: LaunchInputs, folder: Path, wheels: list[Path]) -> None:
    near, far = (Channel(end, "the other end") for end in socket.socketpair())
    with near, far:
        thread = threading.Thread(target=inputs.receive, args=(far,))
        thread.start()
        for part, data in read_inputs(folder, wheels):
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
        list(read_inputs(None, [given]))
    (given / "loose").touch()
    with pytest.raises(LocalError, match="lay it into the folder of a worker"):
        list(read_inputs(given, []))
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
