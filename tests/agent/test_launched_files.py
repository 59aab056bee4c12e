# SPDX-License-Identifier: Apache-2.0
"""The files of a launched script: those that it is sent, and those that it has saved."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace

import pytest

from millpond.agent.gate import ledger
from millpond.base.errors import Refused
from millpond.train.distributed.launch_messages import (
    SAVED_PART,
    AllSaved,
    Begun,
    Exited,
    InputPart,
    InputsEnd,
    Launch,
    SavedPart,
    StopScript,
)
from millpond.wire.channel import Channel

from .launched_rig import (
    WAITING,
    Agent,
    agent,
    collected,
    output,
    script,
    soon,
)

__all__ = ["agent"]

SAVING = """\
import os, sys
from pathlib import Path
Path("deep/er").mkdir(parents=True)
Path("deep/er/model.bin").write_bytes(bytes(range(256)) * 1200)
Path("empty").touch()
Path("kept").write_text("as it was sent")
Path("changed").write_text("another")
Path("big").write_bytes(bytes(400_000))
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "folder")
os.mkfifo("pipe")
Path("__pycache__").mkdir()
Path("__pycache__/a.pyc").write_text("x")
print("saved", flush=True)
"""


def test_what_a_script_saved_comes_within_its_limit(agent: Agent) -> None:
    sent = {"kept": b"as it was sent", "changed": b"one"}
    host, thread = agent.serve(script(SAVING.replace('Path("kept")', 'Path("other")'), 500_000, **sent))
    with host:
        assert output(host) == ("saved",)
        assert host.expect(Exited, soon()).code == 0
        files, count = collected(host)
    thread.join(10)
    # 'big' came first, by name, so that the model no longer fitted
    assert sorted(files) == ["big", "changed", "empty", "other"]
    assert files["changed"] == b"another" and files["empty"] == b""
    named = ("deep/er/model.bin", "folder", "link", "pipe")
    assert count == AllSaved(4, sum(map(len, files.values())), 4, named)
    assert ledger(agent.gate, [])[0]["launched"] > 400_000


def test_files_that_are_not_wanted_are_counted_and_do_not_come(agent: Agent) -> None:
    host, thread = agent.serve(script(SAVING))
    with host:
        output(host)
        host.expect(Exited, soon())
        files, count = collected(host)
    thread.join(10)
    assert (files, count.files, count.left_out) == ({}, 5, 3)


def test_of_files_that_are_not_wanted_no_number_is_too_large(agent: Agent) -> None:
    """Before: at most 4096 were told to be gone."""
    host, thread = agent.serve(script("for number in range(4200):\n    open(str(number), 'w').close()\n"))
    with host:
        host.expect(Exited, soon())
        files, count = collected(host)
    thread.join(10)
    assert (files, count) == ({}, AllSaved(4200, 0, 0))


FOLDERS_OF_ITS_OWN = {
    "removed": ("import shutil; shutil.rmtree(os.getcwd())", AllSaved(0, 0, 0)),
    "closed": ("os.mkdir('b'); os.chmod('b', 0); os.chmod('.', 0)", AllSaved(0, 0, 0)),
    "deep": (
        "for _ in range(1500):\n    os.mkdir('b'); os.chdir('b')\n",
        AllSaved(0, 0, 1, ("b/" * 512 + "b",)),
    ),
}


@pytest.mark.parametrize("what", FOLDERS_OF_ITS_OWN)
def test_whatever_a_script_makes_of_its_folder_its_end_is_told(agent: Agent, what: str) -> None:
    code, expected = FOLDERS_OF_ITS_OWN[what]
    host, thread = agent.serve(script(f"import os\n{code}\nraise SystemExit(4)\n", 1000))
    with host:
        assert host.expect(Exited, soon()).code == 4
        files, count = collected(host)
    thread.join(10)
    assert (files, count) == ({}, expected)


def test_a_script_that_is_stopped_still_gives_what_it_has_saved(agent: Agent) -> None:
    host, thread = agent.serve(script("open('half', 'w').write('x')\n" + WAITING, 1000))
    with host:
        assert output(host) == ("begun",)
        host.send(StopScript(), soon())
        assert host.expect(Exited, soon()).code == 137
        assert collected(host) == ({"half": b"x"}, AllSaved(1, 1, 0))
    thread.join(10)


def test_a_wish_to_stop_that_comes_too_late_loses_nothing(agent: Agent) -> None:
    files = {f"file{number:02}": b"x" * number for number in range(20)}
    code = f"for name, data in {files!r}.items():\n    open(name, 'wb').write(data)\nraise SystemExit(4)\n"
    host, thread = agent.serve(script(code, 1000))
    with host:
        assert host.expect(Exited, soon()).code == 4
        host.send(StopScript(), soon())
        assert collected(host) == (files, AllSaved(20, 190, 0))
    thread.join(10)


def wheel(**modules: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for module, text in modules.items():
            archive.writestr(f"{module}.py", text)
    return packed.getvalue()


def send(host: Channel, path: str, content: bytes, *, is_wheel: bool = False) -> None:
    for start in range(0, max(len(content), 1), SAVED_PART):
        part = InputPart(path, start, len(content), is_wheel)
        host.send(part, soon(), content[start : start + SAVED_PART])


USING = """
import os, subprocess, sys
from pathlib import Path
import extra
print(extra.WORD, len(Path("run/model.bin").read_bytes()), Path("run/empty").stat().st_size)
subprocess.run([sys.executable, "-c", "import extra; print(extra.WORD)"], check=True)
Path("run/new").write_text("x")
"""


def test_a_script_has_the_files_and_wheels_that_it_was_sent(agent: Agent) -> None:
    variables = (("PYTHONPATH", "run"),)
    host, _ = agent.serve(replace(script(USING, most_saved=1 << 20), inputs=True, variables=variables))
    with host:
        send(host, "run/model.bin", bytes(3 * SAVED_PART + 1))
        send(host, "extra-1-py3-none-any.whl", wheel(extra="WORD = 'word'\n"), is_wheel=True)
        send(host, "extra-2-cp27-cp27m-win32.whl", b"", is_wheel=True)
        send(host, "run/empty", b"")
        host.send(InputsEnd(), soon())
        lines = [output(host) for _ in range(2)]
        assert lines == [(f"word {3 * SAVED_PART + 1} 0",), ("word",)]
        assert host.expect(Exited, soon()).code == 0
        assert host.expect(SavedPart, soon(), 1).path == "run/new"


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [
        ("../outside", b"x", "is no name of a file"),
        ("torch-9-py3-none-any.whl", b"", "workers have their own torch"),
        ("extra-1-cp27-cp27m-win32.whl", b"", "there is none of extra for Python"),
        ("extra-1-py3-none-any.whl", b"x", "damaged"),
    ],
)
def test_files_that_cannot_be_had_end_the_launch_with_a_line(
    agent: Agent, path: str, content: bytes, told: str
) -> None:
    host, _ = agent.serve(replace(script("print('run')"), inputs=True))
    with host:
        send(host, path, content, is_wheel=path.endswith(".whl"))
        send(host, "more", bytes(8 * SAVED_PART))
        host.send(InputsEnd(), soon())
        exited = host.expect(Exited, soon())
    assert (exited.code, told in exited.error) == (1, True), exited


def test_a_refused_launch_says_so_whatever_comes_behind_it(agent: Agent) -> None:
    host, _ = agent.serve(Launch("../a", (), {"../a": b""}, 0, 1, "", 1, inputs=True))
    with host:
        send(host, "more", bytes(30 * SAVED_PART))
        host.send(InputsEnd(), soon())
        with pytest.raises(Refused, match="is no name of a file"):
            host.expect(Exited, soon())


def test_the_host_is_told_once_all_files_are_in_place(agent: Agent) -> None:
    host, thread = agent.serve(replace(script("print('run')"), inputs=True, tells_begin=True))
    with host:
        send(host, "more", bytes(SAVED_PART))
        assert host.is_quiet  # there may be more
        host.send(InputsEnd(), soon())
        host.expect(Begun, soon())
        assert output(host) == ("run",) and host.expect(Exited, soon()).code == 0
        host.expect(AllSaved, soon())
    thread.join(10)
