# SPDX-License-Identifier: Apache-2.0
"""A launched script on a device: bounded, counted, searched, and ended with the host's connection."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.agent import launched_script as launches
from millpond.agent.config import Privacy
from millpond.agent.gate import CanaryError, ledger
from millpond.agent.policy.settings import Policy
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import (
    SAVED_PART,
    Exited,
    Launch,
    Output,
    SavedPart,
    Taken,
    script_digest,
)

from .launched_rig import (
    CANARY,
    WAITING,
    Agent,
    agent,
    collected,
    output,
    said,
    script,
    soon,
)

__all__ = ["agent"]


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


def test_a_script_whose_shared_folder_is_not_mounted_is_refused(agent: Agent) -> None:
    host, thread = agent.serve(replace(script("print('run')"), shares=True, run="0" * 32))
    with host, pytest.raises(Refused, match="shared folder is not mounted"):
        host.expect(Output, soon())
    thread.join(10)


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


READ_AT_THE_START = """
import logging, os, subprocess, sys, tempfile, time, warnings
import sibling
print(os.path.relpath(tempfile.gettempdir()), time.tzname[0], sibling.__name__)
warnings.warn("unseen")
code = "import sibling; print(sibling.__name__)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
import torch
print(logging.getLogger("torch._dynamo").level)
"""


def test_variables_that_python_reads_when_it_starts_have_their_effect(agent: Agent) -> None:
    variables = (
        ("TMPDIR", "own"),
        ("TZ", "JST-9"),
        ("PYTHONPATH", "own"),
        ("PYTHONWARNINGS", "ignore"),
        ("TORCH_LOGS", "+dynamo"),
    )
    launch = replace(script(READ_AT_THE_START), variables=variables)
    host, _ = agent.serve(replace(launch, files=dict(launch.files) | {"own/sibling.py": b""}))
    with host:
        lines, found = said(host)
    assert (lines[:3], found) == (["own JST sibling", "b'sibling\\n'", "10"], 0)


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
    ("module", "line", "code"),
    [
        ("json.tool", '{"a": 1}', 0),
        ("absent", "millpond: 'absent' is not here: send a module of your own by --file absent.py", 1),
        ("json.absent", "millpond: 'json.absent' is not here:", 1),
    ],
)
def test_a_module_that_is_installed_is_run(agent: Agent, module: str, line: str, code: int) -> None:
    name, files = f"{module.replace('.', '/')}.py", {"in.json": b'{"a":1}'}
    arguments = ("in.json", "--no-indent")
    host, _ = agent.serve(Launch(name, arguments, files, 0, 1, "127.0.0.1", 2950, "127.0.0.1", module=module))
    with host:
        lines, found = said(host)
    assert found == code and any(one.startswith(line) for one in lines), lines


def test_the_traceback_of_a_module_begins_in_it_or_in_its_package(agent: Agent) -> None:
    broken = {"pkg/__init__.py": b"", "pkg/__main__.py": b"1 / 0\n", "bad/__init__.py": b"[][1]\n"}
    cases = (("pkg", "pkg/__main__.py", "ZeroDivision"), ("bad.x", "bad/x.py", "IndexError"))
    for module, name, last in cases:
        host, _ = agent.serve(replace(script(""), script=name, files=broken, module=module))
        with host:
            lines, found = said(host)
        file = next(file for file, code in broken.items() if code and file.startswith(module[:3]))
        assert found == 1 and any(f'{file}", line 1' in line for line in lines), lines
        assert any(line.startswith(last) for line in lines) and not any("runpy" in line for line in lines)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import helpers.deep", "'helpers' is not here: send a module of your own by --file helpers.py"),
        (
            "import os; os.mkdir('pkg'); from pkg import near",
            "'pkg' is here in part: send all of it by --file pkg",
        ),
        ("from . import helper", "relative imports are for modules: -m a"),
        ("import torch\ntorch.distributed.init_process_group('nccl')", "nccl needs a GPU on each worker"),
        ("import torch\ntorch.cuda.set_device(0)", "there is no CUDA here: ask the script for the CPU"),
        ("import torch\ntorch.zeros(1).to('cuda:0')", "there is no CUDA here: ask the script for the CPU"),
    ],
)
def test_what_a_script_needs_here_is_told_in_a_line(agent: Agent, code: str, hint: str) -> None:
    host, _ = agent.serve(script(code))
    with host:
        lines, found = said(host)
    assert found == 1 and lines[-1].startswith(f"millpond: {hint}"), lines


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
