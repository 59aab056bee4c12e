# SPDX-License-Identifier: Apache-2.0
"""Launches over two hosts: ranks, variables, the way between them and nothing else, losses and failures."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.wire.control_messages import CONTROL_PORT

from ..waiting import eventually
from .joined import ADDRESSES, JoinedHosts, joined, ssh_server
from .launching import scripts
from .processes import descendants
from .support import MILLPOND

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("fleet-hosts"),
    pytest.mark.skipif(not shutil.which("nsenter") or not shutil.which("ip"), reason="no 'nsenter', no 'ip'"),
]

REPORT = f"""\
import os, socket
import torch, torch.distributed as dist

def answers(address, port):
    try:
        socket.create_connection((address, port), 3).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True

worker = os.environ["MILLPOND_WORKER"]
dist.init_process_group("gloo")
total = torch.ones(100_000) * 2 ** dist.get_rank()
dist.all_reduce(total)
names = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE GROUP_WORLD_SIZE LOCAL_WORLD_SIZE".split()
print(int(total[0]), *(os.environ[name] for name in names), os.environ["TORCHELASTIC_RUN_ID"], flush=True)
if worker == "csd0.b":
    seen = [("csd0.a", 50000), ("host.a", int(os.environ["MASTER_PORT"])), ("10.77.0.6", 50000),
            ("csd0.a", {CONTROL_PORT}), ("csd0.a", 22)]
    print("reaches", *(answers(*place) for place in seen), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
FAILING = """\
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["MILLPOND_WORKER"] == "csd0.b":
    sys.exit(5)
time.sleep(600)
"""
CHECKPOINTED = """\
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
first, size = dist.get_rank() == 0, dist.get_world_size()
state = torch.zeros(2)
if first and os.path.exists("state.pt"):
    state = torch.load("state.pt")
dist.broadcast(state, 0)
for step in range(int(state[0]), 6):
    if first and step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("kill", flush=True)
        time.sleep(600)
    part = torch.tensor([0.0, float(step + dist.get_rank())])
    dist.all_reduce(part)
    state = torch.tensor([step + 1.0, state[1] + part[1]])
    if first:
        torch.save(state, "state.new")
        os.replace("state.new", "state.pt")
        print(f"step {step} of {size}: {state[1].item():.0f}", flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


WORKERS, SAMPLES, EPOCHS = ("host.a", "csd0.a", "host.b", "csd0.b"), 960, 3
GROUPED = f"""\
import hashlib, os, time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
import millpond.train

torch.set_num_threads(1)
torch.manual_seed(1)
numbers = torch.arange({SAMPLES})
data = TensorDataset(torch.randn({SAMPLES}, 8), numbers % 4, numbers)
model, taken = nn.Linear(8, 4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seconds = 0.01 if os.environ["MILLPOND_WORKER"] == "csd0.b" else 0.001
with millpond.train.group(model) as group:
    for _ in range({EPOCHS}):
        for images, labels, samples in group.loader(data, batch=48):
            time.sleep(seconds * len(labels))
            optimizer.zero_grad()
            step = group.step(cross_entropy(model(images), labels, reduction="sum"))
            optimizer.step()
            taken += samples.tolist() if step.batches[group.rank] else []
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("trained", len(taken), sum(taken), hashlib.sha256(weights).hexdigest())
"""
WAITING = """\
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
time.sleep(600)
"""


def has_wireguard() -> bool:
    return Path("/sys/module/wireguard").exists()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedHosts]:
    with joined(tmp_path_factory.mktemp("hosts"), (("csd0", "csd1"), ("csd0",))) as both:
        yield both


def write(hosts: JoinedHosts, name: str, text: str) -> Path:
    path = hosts.rsh.with_name(name)
    path.write_text(text)
    return path


def network(hosts: JoinedHosts) -> list[tuple[str, str]]:
    """The routing rules and the link's flag of each host."""
    found = []
    for fleet in hosts.fleets:
        inside = ["nsenter", "-t", str(fleet.daemon().pid), "-n", "sh", "-c"]
        rules, flag = (
            subprocess.run([*inside, command], check=True, capture_output=True, text=True).stdout
            for command in ("ip rule", "cat /proc/sys/net/ipv4/conf/wire/forwarding")
        )
        found.append((rules, flag.strip()))
    return found


def test_ranks_of_two_hosts_meet_and_reach_nothing_else(hosts: JoinedHosts) -> None:
    before = network(hosts)
    devices = ("--devices", "csd0.a,csd0.b")
    result = hosts.launch(*devices, "--", write(hosts, "report.py", REPORT))
    assert result.code == 0, (result.out, result.err)
    told = dict(re.findall(r"^\[(\S+)\] (15 .*)$", result.out, re.MULTILINE))
    numbers = {worker: line.split()[1:8] for worker, line in told.items()}
    expected = ("host.a", "csd0.a", "host.b", "csd0.b")
    assert numbers == {
        worker: [str(rank), "0", str(rank), str(rank), "4", "4", "1"] for rank, worker in enumerate(expected)
    }
    assert len({line.split()[-1] for line in told.values()}) == 1
    assert "[csd0.b] reaches True True False False False" in result.out
    assert network(hosts) == before


def test_a_balanced_group_has_a_device_of_the_other_host_as_one_more_worker(hosts: JoinedHosts) -> None:
    devices = ("--devices", "csd0.a,csd0.b")
    result = hosts.launch(*devices, "--", write(hosts, "grouped.py", GROUPED))
    told = re.findall(r"^\[(\S+)\] trained (\d+) (\d+) (\w+)$", result.out, re.MULTILINE)
    assert result.code == 0 and {worker for worker, *_ in told} == set(WORKERS), result
    assert sum(int(count) for _, count, *_ in told) == EPOCHS * SAMPLES
    assert sum(int(total) for *_, total, _ in told) == EPOCHS * sum(range(SAMPLES))
    assert len({weights for *_, weights in told}) == 1
    counts = {worker: int(count) for worker, count, *_ in told}
    assert 2 * counts["csd0.b"] < min(counts[worker] for worker in WORKERS[:3]), counts


def test_another_host_is_reached_by_ssh(hosts: JoinedHosts) -> None:
    """From the first host, in whose network the command runs; the connection's end is the launch's."""
    inside = ["nsenter", "-t", str(hosts.fleets[0].daemon().pid), "-n", *MILLPOND, "launch"]
    where = [
        f"localhost={ADDRESSES[0]},b={ADDRESSES[1]}",
        "--plain-hosts",
        "--devices",
        "csd0.localhost,csd0.b",
    ]
    script = write(hosts, "waits.py", WAITING)
    with ssh_server(hosts) as config:
        argv = [*inside, "--fleet", str(hosts.fleets[0].directory), "--hosts", *where]
        argv += ["--rsh", f"ssh -F {config}", "--", str(script)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stderr
            told = sorted(process.stdout.readline().strip() for _ in range(4))
            (shell,) = (each for each in descendants(process.pid) if each.name() == "ssh")
            shell.kill()
            errors = process.communicate(timeout=60)[1]
    workers = ("host.localhost", "csd0.localhost", "host.b", "csd0.b")
    assert told == sorted(f"[{worker}] rank {rank} of 4" for rank, worker in enumerate(workers)), errors
    lost = "millpond: b: the connection to its daemon has ended: exit code -9 of the remote shell"
    assert (process.returncode, errors.splitlines()[-1]) == (1, lost), errors
    for fleet in hosts.fleets:
        eventually(lambda f=fleet: not scripts(f), "the end of all scripts", 30)  # type: ignore[misc]


@pytest.mark.skipif(has_wireguard(), reason="this kernel has WireGuard")
def test_links_are_not_plain_unless_that_is_wanted(hosts: JoinedHosts) -> None:
    result = hosts.launch("--", write(hosts, "a.py", "pass\n"), plain=False)
    line = result.err.splitlines()[-1]  # on a busy machine its progress is before it
    assert (result.code, "a, b: the kernel has no WireGuard" in line) == (2, True), result


def test_a_failure_on_one_host_ends_the_others(hosts: JoinedHosts) -> None:
    result = hosts.launch("--", write(hosts, "failing.py", FAILING))
    words = "millpond: csd0.b (rank 4): it ended with exit code 5; the others were ended"
    assert (result.code, result.err.splitlines()[-1]) == (3, words), result


def test_a_script_goes_on_when_a_device_of_the_other_host_dies_and_comes(hosts: JoinedHosts) -> None:
    options = ["--devices", "csd0.a,csd0.b", "--nnodes", "4", "--max-restarts", "3"]
    lines = []
    with hosts.begin(*options, "--", write(hosts, "checkpointed.py", CHECKPOINTED)) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            if line == "[host.a] kill\n":
                hosts.fleets[1].agent("csd0").kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (lines, errors)
    steps = [line for line in lines if " step " in line]
    sums = [6 + 4 * step for step in range(6)]
    assert steps == [f"[host.a] step {step} of 4: {sum(sums[: step + 1])}" for step in range(6)], lines
    assert any(line.startswith("[all.b] csd0 is lost: ") for line in lines), lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--private",), "--private scripts meet in one host's daemon"),
        (("--shared", "kept"), "--shared is a folder of one host"),
        (("--devices", "csd0"), "name devices as csd0.a"),
        (("--devices", "csd7.b"), "b: there is no device 'csd7'"),
        (("--nnodes", "2"), "--nnodes 2:2: the launch has 5 workers"),
        (("--rsh", "false"), ": the connection to its daemon has ended: exit code 1 of the remote shell"),
        (("--hosts", "a,a"), "a is named twice"),
        (("--hosts", "a=192.0.2.1,b=198.51.100.7"), "198.51.100.7 is on no network of this host"),
    ],
)
def test_a_mistake_gets_one_line(hosts: JoinedHosts, arguments: tuple[str, ...], words: str) -> None:
    result = hosts.launch(*arguments, "--", write(hosts, "a.py", "pass\n"))
    line = result.err.splitlines()[-1]  # on a busy machine its progress is before it
    assert (result.code in (1, 2), words in line) == (True, True), result
