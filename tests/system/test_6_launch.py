# SPDX-License-Identifier: Apache-2.0
"""Launched scripts: they rendezvous as under torchrun, end together, and reach nothing of other jobs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millpond.train.distributed.launch_messages import MOST_CODE

from ..forking import Command
from ..waiting import eventually
from .launching import closed, forwarding, interfaces, on_host, scripts, shared_mounts, write
from .processes import command
from .support import EXAMPLES, Emulation, Result

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no 'ip' to ask what is forwarded"),
]


ENDS_SECONDS = 30.0


WAITING = """\
import os, socket, sys, time
rank, name = int(os.environ["RANK"]), os.environ["GLOO_SOCKET_IFNAME"]
print("begun", flush=True)
"""


FOR_EVER = """\
import os, time
open(os.path.join(os.environ["MILLPOND_SHARED"], os.environ["RANK"]), "wb").write(bytes(100_000))
print("begun", flush=True)
time.sleep(600)
"""


FAILING = WAITING + "if rank == 2:\n    sys.exit(7)\ntime.sleep(600)\n"


KILLED = WAITING + "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n"


CHILDREN = WAITING + "import subprocess\nsubprocess.Popen(['sleep', '600'])\nif rank == 1:\n    sys.exit(0)\n"


REACHING = """\
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(address, port):
    try:
        socket.create_connection((address, int(port)), 10).close()
        return "reached"
    except OSError as error:
        return "not reached"
if os.environ["RANK"] == "0":
    with ThreadPoolExecutor(len(sys.argv)) as pool:
        for target, said in zip(sys.argv[1:], pool.map(lambda t: reach(*t.split(":")), sys.argv[1:])):
            print(target, said, flush=True)
sys.stdout.flush()
"""


LISTEN = """\
import socket, sys, time
with socket.create_server(("", 40000)) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""


@contextlib.contextmanager
def begun(fleet: Emulation, script: Path) -> Iterator[Command]:
    """A launch of which all three workers have begun, and have used the folder that they share."""
    shared = fleet.base / "shared-by-waiting"
    with fleet.begin("launch", "--devices", "csd0,csd1", "--shared", shared, "--", script) as process:
        said = sorted(process.stdout.readline() for _ in range(3))
        assert said == ["[csd0] begun\n", "[csd1] begun\n", "[host] begun\n"], process.communicate(timeout=60)
        assert {"0", "1", "2"} <= {path.name for path in shared.iterdir()} and shared_mounts(fleet)
        yield process


def failure(result: Result) -> str:
    """The one line about the first failure."""
    assert result.code == 3, result
    (line,) = result.err.splitlines()
    return line


def digests(text: str) -> set[tuple[str, ...]]:
    # Not by lines: torchrun's workers write unbuffered to one pipe, a line's end apart from its text.
    return set(re.findall(r"worker (\d) of (\d): parameters ([0-9a-f]{16})", text))


def test_all_ranks_end_as_under_torchrun(ready: Emulation) -> None:
    data = ready.base / "test"
    script, options = str(EXAMPLES / "plain_ddp.py"), ["--epochs", "2", "--data"]
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        script,
        *options,
        str(data),
    ]
    for _ in range(3):
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=180)
        if "terminate called without an active exception" not in done.stderr:  # gloo's, at its end
            break
    assert done.returncode == 0, done.stderr
    files = ["--file", str(data / "images.npy"), "--file", str(data / "labels.npy")]
    with ready.client() as client:
        before = client.ledgers()["csd1"].sent
    result = ready.millpond(
        "launch", "--devices", "csd0,csd1", *files, "--", script, *options, ".", timeout=180
    )
    assert result.code == 0, f"{result}\n{ready.logs()}"
    assert len(digests(result.out)) == 3
    assert digests(result.out) == digests(done.stdout)
    lines = result.out.splitlines()
    assert all(re.match(r"\[(host|csd0|csd1)\] ", line) for line in lines)
    assert next(line for line in lines if "epoch 2: loss" in line).startswith("[host] ")
    with ready.client() as client:
        after = client.ledgers()["csd1"].sent
    gradients = 4 * (64 * 128 + 128 + 128 * 10 + 10)  # a step's, which go to the host and the other device
    assert after["launched"] - before["launched"] > 10 * gradients
    assert after["control"] - before["control"] < gradients


def test_devices_alone_and_one_alone(ready: Emulation) -> None:
    script = write(ready, "ranks.py", "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    result = ready.millpond("launch", "--no-host", "--devices", "csd2,csd0", "--", script)
    assert (result.code, sorted(result.out.splitlines())) == (0, ["[csd0] 1 2", "[csd2] 0 2"]), result
    result = ready.millpond("launch", "--no-host", "--devices", "csd1", "--format", "json", script)
    found = json.loads(result.out)
    saved = {"files": 0, "size": 0, "left_out": 0, "named": []}
    assert found["workers"] == [{"name": "csd1", "rank": 0, "exit_code": 0} | saved]
    assert found["lines"] == [{"worker": "csd1", "line": "0 1"}] and found["error"] == ""
    result = ready.millpond(
        "launch", "--no-host", "--", EXAMPLES / "plain_ddp.py", "--epochs", "1", timeout=180
    )
    assert result.code == 0, result
    assert len({digest for _, _, digest in digests(result.out)}) == 1 and len(digests(result.out)) == 3


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (FAILING, "csd1 (rank 2): it ended with exit code 7; the others were ended"),
        (KILLED, "csd0 (rank 1): it ended with exit code 137; the others were ended"),
    ],
)
def test_the_first_failure_ends_the_others(ready: Emulation, code: str, told: str) -> None:
    began = time.monotonic()
    result = ready.millpond("launch", "--devices", "csd0,csd1", "--", write(ready, "failing.py", code))
    assert failure(result) == f"millpond: {told}"
    assert time.monotonic() - began < 3 * ENDS_SECONDS
    assert not scripts(ready)


def test_what_a_script_started_ends_with_it(ready: Emulation) -> None:
    result = ready.millpond("launch", "--devices", "csd0,csd1", "--", write(ready, "children.py", CHILDREN))
    assert result.code == 0, result
    assert not [p for p in ready.processes() if command(p)[:1] == ["sleep"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_all_workers_end_with_the_command(ready: Emulation, number: int, code: int) -> None:
    with begun(ready, write(ready, "waiting.py", FOR_EVER)) as process:
        assert forwarding(ready) == ["1", "1", "0"]
        busy = ready.millpond("launch", "--devices", "csd1", "--", write(ready, "other.py", FOR_EVER))
        assert (busy.code, "csd1: in another launch already" in busy.err) == (2, True)
        assert len(scripts(ready)) >= 6
        process.send_signal(number)
        assert process.wait(ENDS_SECONDS) == code
    eventually(lambda: not scripts(ready), "no process of a script is left", ENDS_SECONDS, 0.1)
    eventually(lambda: closed(ready), "nothing is forwarded any more", ENDS_SECONDS, 0.1)


@pytest.mark.parametrize(
    "victim", [pytest.param("its board", marks=pytest.mark.full), "its agent", "all tunnels"]
)
def test_a_device_that_is_lost_ends_the_launch(ready: Emulation, victim: str) -> None:
    before = interfaces(ready)
    with begun(ready, write(ready, "waiting.py", FOR_EVER)) as process:
        if victim == "all tunnels":
            for end in [p for p in ready.processes() if "millpond.tunnel.endpoint.zygote" in command(p)]:
                with contextlib.suppress(psutil.NoSuchProcess):  # it died with the one before
                    end.kill()
        else:
            (ready.pid_one if victim == "its board" else ready.agent)("csd1").kill()
        _, errors = process.communicate(timeout=3 * ENDS_SECONDS)
    assert process.returncode == 3
    lost = r"millpond: csd[01] \(rank [12]\): .*; the others were ended\n"
    last = errors.splitlines(keepends=True)[-1]  # on a busy machine its progress is before it
    assert re.fullmatch(lost if victim == "all tunnels" else lost.replace("[01]", "1"), last)
    if victim == "all tunnels":  # until they are new, some devices still pass for ready
        eventually(lambda: len(interfaces(ready) - before) == 3, "all tunnels are new", every=0.1)
    ready.wait_ready()


def test_a_killed_daemon_leaves_nothing_running_or_open(ready: Emulation) -> None:
    with begun(ready, write(ready, "waiting.py", FOR_EVER)) as process:
        ready.daemon().kill()
        _, errors = process.communicate(timeout=ENDS_SECONDS)
    assert process.returncode == 1
    assert errors == "millpond: the host daemon has ended, and the script's workers with it\n"
    eventually(lambda: not scripts(ready), "no process of a script is left", 90, 0.1)
    ready.wait_ready()
    eventually(lambda: closed(ready), "nothing is forwarded any more", ENDS_SECONDS, 0.1)


AS_TORCHRUN = """\
import os, socket, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from .names import NAMES
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
peers = [socket.gethostbyname(name) != "" for name in ("host", "csd0", "csd1")]
print(dist.get_rank(), os.environ["LOCAL_RANK"], total.item(), os.environ["MASTER_PORT"], NAMES, *peers)
paths = [None] * dist.get_world_size()
dist.all_gather_object(paths, os.getcwd())
print(sys.argv[1:], Path("each").read_text(), Path("own").exists(), len(set(paths)))
if dist.get_rank() == 0:
    server = socket.create_server(("", 8123))
dist.barrier()
if dist.get_rank() == 2:
    socket.create_connection(("host", 8123), 10).close()
dist.barrier()
dist.destroy_process_group()
"""


def test_modules_processes_and_fixed_ports_are_as_under_torchrun(
    ready: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: devices reached the host's rank at ephemeral ports alone, and waited for ever for others."""
    for folder in ("pkg", "given/all", "given/csd0"):
        (ready.base / folder).mkdir(parents=True)
    write(ready, "pkg/names.py", "NAMES = 'names'\n")
    write(ready, "pkg/train.py", AS_TORCHRUN)
    write(ready, "given/all/each", "text")
    write(ready, "given/csd0/own", "")
    monkeypatch.chdir(ready.base)
    options = ["--devices", "csd0,csd1", "--file", "pkg", "--nproc-per-node", "2", "--input", "given"]
    options += ["--env", "MASTER_PORT=29500"]
    result = ready.millpond("launch", *options, "--", "-m", "pkg.train", "--lr", "1")
    assert result.code == 0, result
    lines = sorted(result.out.splitlines())
    for number, name in enumerate(("host", "csd0", "csd1")):
        for local in (0, 1):
            said = f"[{name}] {2 * number + local} {local} 6.0 29500 names True True True"
            assert said in lines
        assert lines.count(f"[{name}] ['--lr', '1'] text {name == 'csd0'} 1") == 2


RPC = """\
import os, socket
import torch
import torch.distributed.rpc as rpc
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def where(value):
    return socket.gethostname(), value + 1
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0:
    for other in range(1, size):
        print(rpc.rpc_sync(f"worker{other}", where, args=(torch.tensor([other]),)))
if rank == 2:
    print(rpc.rpc_sync("worker1", where, args=(10,)), rpc.rpc_sync("worker0", where, args=(0,))[1])
rpc.shutdown()
"""


def test_remote_calls_go_between_all_ranks(ready: Emulation) -> None:
    result = ready.millpond("launch", "--devices", "csd0,csd1", "--", write(ready, "rpc.py", RPC))
    assert result.code == 0, result
    said = [line for line in result.out.splitlines() if "] ('csd" in line]  # torch has warnings to say, too
    assert sorted(said) == [
        "[csd1] ('csd0', 11) 1",
        "[host] ('csd0', tensor([2]))",
        "[host] ('csd1', tensor([3]))",
    ]


def test_a_login_has_the_python_of_workers_and_what_it_asks_of_a_machine(ready: Emulation) -> None:
    code = "import torch; print(torch.ones(2).sum().item())"
    result = ready.millpond("run", "csd0", "--", f"millpond-python -c '{code}'")
    assert (result.code, result.out) == (0, "2.0\n"), result
    code = 'import multiprocessing, socket; multiprocessing.Lock(); print(socket.gethostbyname("csd0"))'
    result = ready.millpond("run", "csd0", "--", f"millpond-python -c '{code}'")
    assert (result.code, result.out) == (0, "127.0.1.1\n"), result


def test_devices_reach_those_of_their_launch_and_no_agent(ready: Emulation) -> None:
    addresses = {name: ready.fleet.addresses(name).device_ip for name in ("csd0", "csd1", "csd2")}
    ports = (22, 7700, 40000)
    targets = [f"{addresses[name]}:{port}" for name in ("csd1", "csd2") for port in ports]
    script = write(ready, "reaching.py", REACHING)
    with listening(ready, "csd1"), listening(ready, "csd2"):
        for name in ("csd1", "csd2"):  # what shall not be reached is there
            with ready.client() as client:
                client.dial(name, 40000).close()
        result = ready.millpond("launch", "--no-host", "--devices", "csd0,csd1", "--", script, *targets)
        assert result.code == 0, result
        reached = [line for line in result.out.splitlines() if not line.endswith("not reached")]
        assert reached == [f"[csd0] {addresses['csd1']}:40000 reached"]
        assert len(result.out.splitlines()) == len(targets)
        # Nor do those outside of a launch reach anybody, even where something else lets all be forwarded.
        with begun(ready, write(ready, "waiting.py", FOR_EVER)) as process, forwarding_all(ready):
            assert [goes(ready, *way) for way in WAYS] == [True] + [False] * (len(WAYS) - 1)
            told = ready.millpond("run", "csd2", "--", reach_from_shell(addresses["csd1"]))
            assert told.out == "not reached\n", told
            process.send_signal(signal.SIGINT)
            process.wait(ENDS_SECONDS)
    eventually(lambda: closed(ready), "nothing is forwarded any more", ENDS_SECONDS, 0.1)


@contextlib.contextmanager
def forwarding_all(fleet: Emulation) -> Iterator[None]:
    """Something else than a launch has csd2's interface forward."""
    setting = "/proc/sys/net/ipv4/conf/mp-csd2/forwarding"
    on_host(fleet, "sh", "-c", f"echo 1 > {setting}")
    try:
        yield
    finally:
        on_host(fleet, "sh", "-c", f"echo 0 > {setting}")


WAYS = [
    ("csd0", "csd1", "tcp", "40000"),
    ("csd0", "csd1", "tcp", "7700"),
    ("csd0", "csd1", "udp", "40000"),
    ("csd0", "csd1", "icmp"),
    ("csd0", "csd2", "tcp", "40000"),
    ("csd2", "csd1", "tcp", "40000"),
]


def goes(fleet: Emulation, source: str, target: str, protocol: str, port: str = "") -> bool:
    """Whether the host's kernel would pass such a packet on to another device."""
    ends = [fleet.fleet.addresses(name).device_ip for name in (source, target)]
    question = f"ip route get {ends[1]} from {ends[0]} iif mp-{source} ipproto {protocol}"
    question += f" dport {port}" if port else ""
    return f"dev mp-{target}" in on_host(fleet, "sh", "-c", f"{question} || true")


@contextlib.contextmanager
def listening(fleet: Emulation, device: str) -> Iterator[None]:
    """A program on a device that accepts connections to port 40000."""
    with fleet.begin("run", device, "--", f"python3 -c '{LISTEN}'") as process:
        assert process.stdout.readline() == "listening\n"
        yield


def reach_from_shell(address: str) -> str:
    """A command that tells whether it connects; a packet that the host drops has no answer."""
    connect = f"timeout 10 bash -c 'exec 3<>/dev/tcp/{address}/40000'"
    return f"{connect} 2>/dev/null && echo reached || echo not reached"


def test_lines_are_bounded_and_printable(ready: Emulation) -> None:
    code = "print('x' * 10000)\nprint('a\\x1b[2J\\tb')\nprint('last', end='')\n"
    result = ready.millpond("launch", "--no-host", "--devices", "csd0", "--", write(ready, "long.py", code))
    assert result.code == 0
    lines = [line.removeprefix("[csd0] ") for line in result.out.splitlines()]
    assert [len(line) for line in lines] == [4096, 4096, 10000 - 2 * 4096, 7, 4]
    assert lines[3:] == ["a [2J\tb", "last"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "csd9", "--", "SCRIPT"), "no device 'csd9'"),
        (("--devices", "csd0,@none", "--", "SCRIPT"), "there is no group '@none'; there are @all"),
        (("--", "no-such.py"), "no-such.py"),
        (("--file", "OTHER", "--", "SCRIPT"), "two files are named"),
        (("--private", "--no-host", "--", "SCRIPT"), "--private needs the host as rank 0"),
        (("--data", "private/digits", "--", "SCRIPT"), "is for --private"),
        (("--file", "BIG", "--", "SCRIPT"), "3 MiB are possible"),
        (("--nonsense", "--", "SCRIPT"), "No such option: --nonsense"),
        (("--env", "A", "--", "SCRIPT"), "this is not NAME=VALUE"),
        (("--nproc-per-node", "0", "--", "SCRIPT"), "a worker has 1 to 256 processes"),
        (("--private", "-m", "no.such"), "no/such.py is not here; a private launch has no installed modules"),
        (("--private", "--env", "A=b", "--", "SCRIPT"), "--private is for a script and its files alone"),
        (("--private", "--shared", "OTHER", "--", "SCRIPT"), "leave --shared out"),
        (("--shared", "BIG", "--", "SCRIPT"), "big"),
    ],
)
def test_a_mistake_gets_one_line(shared_fleet: Emulation, arguments: tuple[str, ...], words: str) -> None:
    (shared_fleet.base / "other").mkdir(exist_ok=True)
    names: dict[str, Any] = {"SCRIPT": write(shared_fleet, "a.py", ""), "BIG": shared_fleet.base / "big"}
    names["OTHER"] = write(shared_fleet, "other/a.py", "")
    names["BIG"].write_bytes(bytes(MOST_CODE))
    names["SCRIPT"].write_text("pass\n")
    result = shared_fleet.millpond("launch", *(names.get(argument, argument) for argument in arguments))
    (line,) = result.err.splitlines()
    assert (result.code, words in line) == (2, True), result
