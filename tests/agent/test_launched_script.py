# SPDX-License-Identifier: Apache-2.0
"""A launched script on a device: bounded, counted, searched, and ended with the host's connection."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millpond.agent import launched_script as launches
from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern, ledger
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.policy.settings import Policy
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.wire.channel import Channel
from millpond.wire.launch_messages import (
    SAVED_PART,
    AllSaved,
    Exited,
    InputPart,
    InputsEnd,
    Launch,
    Output,
    SavedPart,
    StopScript,
    Taken,
    script_digest,
)
from millpond.wire.messages import Message

from ..waiting import eventually

CANARY = b"canary-of-the-tests"
WAITING = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


class Agent:
    """A gate and launches, as an agent has them, and the host's end of a connection that they serve."""

    def __init__(
        self, folder: Path, zygote: Zygote, crossed: Callable[[], int], **settings: Policy | Privacy
    ) -> None:
        (folder / "volume" / "public").mkdir(parents=True)
        link = LinkConfig(str(folder / "s"), "10.77.0.2/30")
        config = replace(AgentConfig("csd0", link, volume=str(folder / "volume")), **settings)
        self.gate = Gate([Pattern("c", CANARY, True)], LedgerCounters.in_memory())
        self.launches = LaunchedScripts(config, self.gate, [], crossed, zygote)
        self.error: Exception | None = None

    def serve(self, launch: Launch) -> tuple[Channel, threading.Thread]:
        """The host's channel to a launch, and the thread that serves it."""
        near, far = socket.socketpair()
        host = Channel(far, "host", outlet=self.gate.outlet())

        def run() -> None:
            with host:
                try:
                    self.launches.serve(launch, host)
                except (ConnectionLost, CanaryError) as error:
                    self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        return Channel(near, "csd0"), thread


@pytest.fixture
def agent(tmp_path: Path, zygote: Zygote) -> Iterator[Agent]:
    yield Agent(tmp_path, zygote, lambda: 0)
    eventually(lambda: not processes(), "no process of a script is left")


def processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [process] if process.name() == "launch.entry" else []
    return found


def script(code: str, most_saved: int = 0, **files: bytes) -> Launch:
    sent = {"a.py": code.encode(), **files}
    return Launch("a.py", (), sent, 0, 1, "127.0.0.1", 40000, "127.0.0.1", most_saved)


def soon() -> Deadline:
    return Deadline.after(30)


def output(host: Channel) -> tuple[str, ...]:
    """Take lines."""
    found = host.expect(Output, soon()).lines
    host.send(Taken(), soon())
    return found


def said(host: Channel) -> tuple[list[str], int]:
    """All lines, and the exit code."""
    lines: list[str] = []
    while True:
        found: Message = host.receive(soon()).message
        if isinstance(found, Exited):
            assert host.expect(AllSaved, soon()) == AllSaved(0, 0, 0)
            return lines, found.code
        assert isinstance(found, Output), found
        lines += found.lines
        host.send(Taken(), soon())


def test_a_script_says_its_lines_and_its_exit_code(agent: Agent) -> None:
    host, thread = agent.serve(
        script("import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(5)\n")
    )
    with host:
        assert said(host) == (["one", "two"], 5)
    thread.join(10)
    sent, _ = ledger(agent.gate, [])
    assert sent["launched"] > len("onetwo") and not sent["metrics"]


def test_more_output_than_may_leave_is_dropped_and_told(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MOST_OUTPUT", 50_000)
    host, thread = agent.serve(script("for n in range(30_000):\n    print('x' * 9)\nraise SystemExit(3)\n"))
    with host:
        lines, code = said(host)
    thread.join(10)
    assert code == 3
    assert 50_000 <= sum(len(line) + 1 for line in lines[:-1]) < 50_000 + (1 << 15)
    assert lines[-1].startswith("(more than 0 MiB of output")


PRINTING = """
import sys
for number in range(4000):
    print(number, "x" * 200, flush=True)
    print(number, file=sys.stderr, flush=True)
open("file", "w").write("y" * 300_000)
"""


def test_a_script_waits_for_whoever_reads_its_output(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what waits would fill the connection, which the kernel gives up after half a minute."""
    monkeypatch.setattr(launches, "OUTPUT_RATE", 1 << 30)
    host, thread = agent.serve(script(PRINTING, 1 << 20))
    with host:
        lines = list(host.expect(Output, soon()).lines)
        time.sleep(1)
        assert host.is_quiet  # there is nothing more, though the script prints on
        host.send(Taken(), soon())
        code = None
        while code is None:
            found = host.receive(soon()).message
            if isinstance(found, Output):
                lines += found.lines
                host.send(Taken(), soon())
            else:
                assert isinstance(found, Exited)
                code = found.code
        assert code == 0 and len(lines) == 8000
        part = host.expect(SavedPart, soon(), None)
        host.receive_payload(1 << 20, soon())
        time.sleep(0.3)
        assert part.size == 300_000 and host.is_quiet  # nor of what it has saved
        host.send(Taken(), soon())
        files, count = collected(host, {"file": b"y" * SAVED_PART})
        assert len(files["file"]) == 300_000 and count.files == 1
    thread.join(10)


def test_a_script_ends_with_the_hosts_connection(agent: Agent) -> None:
    host, thread = agent.serve(script(WAITING))
    assert output(host) == ("begun",)
    assert agent.launches.names == ["a.py"]
    host.close()
    thread.join(10)
    assert not thread.is_alive() and isinstance(agent.error, ConnectionLost)
    assert agent.launches.names == []


def test_one_script_at_a_time_and_none_with_odd_files(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "PLACE_SECONDS", 0.2)
    first, thread = agent.serve(script(WAITING))
    output(first)
    for request, code in ((script(""), "busy"), (Launch("../a", (), {"../a": b""}, 0, 1, "", 1), "launch")):
        second, other = agent.serve(request)
        with second, pytest.raises(Refused) as caught:
            second.expect(Exited, soon())
        other.join(10)
        assert caught.value.code == code
    first.close()
    thread.join(10)


def test_a_canary_in_the_output_ends_the_script(agent: Agent) -> None:
    host, thread = agent.serve(script(f"print('a')\nprint({CANARY.decode()!r}, flush=True)\n" + WAITING))
    with host:
        with contextlib.suppress(ConnectionLost):
            output(host)  # where the first line comes by itself
        thread.join(20)
    assert isinstance(agent.error, CanaryError)
    assert ledger(agent.gate, [])[1]["c"] == 1


def test_what_leaves_beside_the_gate_is_counted(tmp_path: Path, zygote: Zygote) -> None:
    crossings = itertools.chain([1000], itertools.repeat(51_000))
    agent = Agent(tmp_path, zygote, lambda: next(crossings))
    host, thread = agent.serve(script("print('one')\n"))
    with host:
        said(host)
    thread.join(10)
    # What the gate counted at the end has not crossed this counter, which stands still.
    assert 50_000 <= sum(ledger(agent.gate, [])[0].values()) < 50_200


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


def collected(host: Channel, begun: dict[str, bytes] | None = None) -> tuple[dict[str, bytes], AllSaved]:
    """The files that came, with what has come of them already, and the count of them."""
    files = dict(begun or {})
    while True:
        head = host.receive(soon())
        if isinstance(head.message, AllSaved):
            return files, head.message
        assert isinstance(head.message, SavedPart), head.message
        part, before = head.message, files.get(head.message.path, b"")
        assert part.start == len(before)
        files[part.path] = before + host.receive_payload(1 << 20, soon())
        host.send(Taken(), soon())


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


AS_PYTHON = """\
import atexit, os, pickle, random, sys, threading, time
import numpy, torch
class Own:
    pass
assert __name__ == "__main__" and sys.argv == ["a.py"] and __file__ == os.path.abspath("a.py")
assert pickle.loads(pickle.dumps(Own())).__class__ is Own and sys.path[0] == os.getcwd()
import beside
assert beside.NAME == "beside" and not torch.are_deterministic_algorithms_enabled()
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("drawn", numpy.random.random(), torch.rand(1).item(), random.random())
print("grüße", os.environ["RANK"])
sys.exit("an end")
"""


def test_a_script_runs_as_python_runs_it(agent: Agent) -> None:
    drawn = []
    for _ in range(2):
        host, thread = agent.serve(script(AS_PYTHON, **{"beside.py": b"NAME = __name__\n"}))
        with host:
            lines, code = said(host)
        thread.join(10)
        drawn.append(lines[0])
        assert (lines[1:], code) == (["grüße 0", "an end", "thread", "at exit"], 1)
    assert not set(drawn[0].split()[1:]) & set(drawn[1].split()[1:])


def test_an_exception_has_the_traceback_of_the_script_alone(agent: Agent) -> None:
    host, thread = agent.serve(script("def f():\n    raise ValueError('bad')\nf()\n"))
    with host:
        lines, code = said(host)
    thread.join(10)
    assert (lines[0], lines[-1], code) == ("Traceback (most recent call last):", "ValueError: bad", 1)
    assert sum("File" in line for line in lines) == 2 and all("millpond" not in line for line in lines)


SHARING = """
import torch
from multiprocessing import get_context
from torch.utils.data import DataLoader
def double(value):
    return 2 * value
if __name__ == "__main__":
    print([batch.tolist() for batch in DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)])
    with get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


def test_a_script_has_workers_of_its_own_that_share_memory(agent: Agent) -> None:
    host, _ = agent.serve(script(SHARING))
    with host:
        assert said(host) == (["[[0.0, 1.0], [2.0, 3.0]]", "[2, 4]"], 0)


ENVIRONMENT = """
import getpass, os, pwd, socket
from pathlib import Path
import torch, torch.distributed as dist
print(dist.is_torchelastic_launched(), getpass.getuser(), os.environ["LOGNAME"])
print(pwd.getpwuid(os.getuid()).pw_name, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
Path.home().joinpath(".cache", "huggingface").mkdir(parents=True)
print(os.environ["HF_HUB_OFFLINE"], os.environ["GIVEN"])
print([socket.gethostbyname(name) for name in ("csd1", "host", "here", "master", socket.gethostname())])
print(socket.gethostbyaddr("10.77.0.6")[0], socket.getnameinfo(("::ffff:10.77.0.6", 1), 0)[0])
"""


def test_a_script_has_what_libraries_ask_of_a_machine(agent: Agent) -> None:
    """Before: Lightning chose a launcher of its own, getpass.getuser failed, names of ranks were unknown."""
    names = (("10.77.0.6", "csd1"), ("10.77.0.1", "host here"))
    launch = replace(script(ENVIRONMENT), shared=True, names=names, variables=(("GIVEN", "a=b"),))
    host, _ = agent.serve(launch)
    with host:
        lines, code = said(host)
    user = "millpond"
    addresses = ["10.77.0.6", "10.77.0.1", "10.77.0.1", "127.0.0.1", "127.0.0.1"]
    assert (lines, code) == (
        [f"True {user} {user}", f"{user} 1 1", "1 a=b", f"{addresses}", "csd1 csd1"],
        0,
    )


PROCESSES = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
print(os.environ["RANK"], os.environ["LOCAL_RANK"], dist.get_world_size(), flush=True)
dist.barrier()
if len(sys.argv) > 1 and dist.get_rank() == 1:
    sys.exit(9)
time.sleep(600 if len(sys.argv) > 1 else 0)
"""


@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("fail",), 9)])
def test_a_worker_has_several_processes_that_end_together(
    agent: Agent, arguments: tuple[str, ...], code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = (("GLOO_SOCKET_IFNAME", "lo"),)
    launch = replace(
        script(PROCESSES), processes=3, arguments=arguments, master_port=port, variables=variables
    )
    host, _ = agent.serve(launch)
    with host:
        lines, found = said(host)
    assert found == code and {"0 0 3", "1 1 3", "2 2 3"} <= set(lines)


RELATIVE = {
    "pkg/__init__.py": b"",
    "pkg/near.py": b"NEAR = 'near'\n",
    "pkg/train.py": b"import sys\nfrom .near import NEAR\nprint(NEAR, __name__, __package__, sys.argv[1:])\n",
    "pkg/plain.py": b"import near, os\nprint(near.NEAR, os.path.exists('pkg/plain.py'), __file__[-12:])\n",
}


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [
        ("pkg/train.py", "pkg.train", "near __main__ pkg ['--x', 'y']"),
        ("pkg/plain.py", "", "near True pkg/plain.py"),
    ],
)
def test_a_script_in_a_folder_finds_what_lies_there(agent: Agent, name: str, module: str, line: str) -> None:
    launch = replace(script(""), script=name, files=RELATIVE, module=module, arguments=("--x", "y"))
    host, _ = agent.serve(launch)
    with host:
        assert said(host) == ([line], 0)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import helpers.deep", "'helpers' is not here: send a module of your own by --file helpers.py"),
        ("from . import helper", "relative imports are for modules: -m a"),
        ("import torch\ntorch.distributed.init_process_group('nccl')", "nccl needs a GPU on each worker"),
    ],
)
def test_what_a_script_needs_here_is_told_in_a_line(agent: Agent, code: str, hint: str) -> None:
    host, _ = agent.serve(script(code))
    with host:
        lines, found = said(host)
    assert found == 1 and lines[-1].startswith(f"millpond: {hint}"), lines


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
    host, _ = agent.serve(replace(script(USING, most_saved=1 << 20), inputs=True))
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


def test_a_script_with_a_network_and_private_files_is_bound_by_the_policy(
    tmp_path: Path, zygote: Zygote
) -> None:
    look = "import os\nprint(sorted(os.listdir(PRIVATE)))\n".replace(
        "PRIVATE", repr(str(tmp_path / "volume/private"))
    )
    allowed = script(look)
    policy = Policy(
        folders=("private/digits",), code="listed", listed=(script_digest("a.py", allowed.files),)
    )
    agent = Agent(tmp_path, zygote, lambda: 0, privacy=Privacy(launch="private"), policy=policy)
    for name in ("digits", "other"):
        (tmp_path / "volume/private" / name).mkdir(parents=True)
    host, thread = agent.serve(allowed)
    with host:
        assert said(host) == (["['digits']"], 0)
    thread.join(10)
    for other in (script(look + "#"), replace(allowed, module="base64"), replace(allowed, module="a")):
        host, thread = agent.serve(other)
        with host, pytest.raises(Refused, match=r"policy\.code: the script is not listed"):
            host.expect(Exited, soon())
        thread.join(10)
