# SPDX-License-Identifier: Apache-2.0
"""`make install` on a Debian under systemd: both units start, answer, are watched, restart, and stop clean.

The tests are steps of one server's life, in their order; each leaves it with both services running, but the
last, which removes them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import safetensors.numpy

from .machine import why_no_wheels
from .server import AGENT, HOST, Server
from .torch_image import why_no_torch

pytestmark = pytest.mark.timeout(1800)

SCRIPT = """
import os
try:
    os.listdir("/volume/private")
except OSError as error:
    print("private:", error.strerror)
print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "has uid", os.getuid())
"""
JOB = """
name = "from-home"
data = { private = "private/halves", test = "data" }
model = { factory = "net:build", files = ["net.py"] }
train = { learning_rate = 0.1, batch = 8 }
federated = { rounds = 2, deadline = 600 }
limits = { wait = 900 }
"""
NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
"""
TORCH_SECONDS = 600.0
"""For the import of torch by both daemons beside each other, on an emulated processor under load."""
PROCESSES = "pgrep --full --list-full [/]opt/millpond"


def halves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8x8 pixels whose left (label 0) or right half is bright, and their labels."""
    labels = np.arange(count) % 2
    images = np.random.default_rng(7).integers(0, 100, (count, 8, 8), dtype=np.uint8)
    images[labels == 0, :, :4] += 150
    images[labels == 1, :, 4:] += 150
    return images, labels


def files_of(samples: tuple[np.ndarray, np.ndarray]) -> dict[str, bytes]:
    """Their files in a folder of a job."""
    found = {}
    for name, values in zip(("images.npy", "labels.npy"), samples, strict=True):
        file = io.BytesIO()
        np.save(file, values)
        found[name] = file.getvalue()
    return found


def right(model: Mapping[str, np.ndarray], samples: tuple[np.ndarray, np.ndarray]) -> float:
    """The share of samples that a model of NET, by its weights alone, has right."""
    images, labels = samples
    scores = images.reshape(len(images), -1) / 255 @ model["1.weight"].T + model["1.bias"]
    return float(np.mean(scores.argmax(1) == labels))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With millpond installed, and a fleet; nothing is started."""
    if reason := why_no_wheels():
        pytest.skip(reason)
    if os.geteuid():
        pytest.skip("only root may install into the guest's files")
    server = Server(tmp_path_factory.mktemp("server"))
    assert "systemctl enable --now millpond-host" in server.said
    try:
        server.boot()
        server.provision()
        yield server
    finally:
        server.close()


@pytest.fixture
def running(server: Server) -> Server:
    """With both services as they are once they are enabled."""
    server.sh(f"systemctl enable --quiet --now {AGENT} {HOST}")
    server.wait_ready()
    return server


def test_the_host_starts_answers_and_logs(server: Server) -> None:
    server.sh(f"systemctl enable --quiet --now {HOST}")
    assert server.sh(f"systemctl is-active {HOST}") == "active"
    assert server.device()["state"] == "absent"
    assert "INFO the host daemon serves fleet 'fleet' at /var/lib/millpond/host.sock" in server.journal(HOST)
    assert "Python" not in server.journal(HOST)  # no warning, no traceback


def test_the_agent_starts_and_its_device_is_ready(running: Server) -> None:
    device = running.device()
    assert (device["state"], device["welcome"]["at_rest"]["cipher"]) == ("ready", "AES-256-XTS")
    said = running.journal(AGENT)
    assert "INFO the volume is mounted at /volume" in said
    assert "volume: Landlock: on" in said
    assert "Traceback" not in said


def test_all_of_the_device_sees_the_volume_and_the_host_its_public_part(running: Server) -> None:
    assert running.sh("ls /volume").split() == ["private", "public"]
    running.sh("echo from the device >/volume/public/note")
    try:
        running.sh("millpond mount csd0 /mnt")
        assert running.sh("ls /mnt; cat /mnt/public/note") == "public\nfrom the device"
    finally:
        running.sh("millpond umount /mnt")


def test_a_script_runs_in_both_sandboxes(running: Server) -> None:
    running.guest.put("/tmp/who.py", SCRIPT.encode())
    said = running.sh("millpond launch -- /tmp/who.py", seconds=TORCH_SECONDS).splitlines()
    assert "[host] worker 0 of 2 has uid 64008" in said
    assert "[csd0] worker 1 of 2 has uid 64004" in said
    assert "[csd0] private: No such file or directory" in said


def test_hung_daemons_are_killed_by_the_watchdog_and_start_anew(running: Server) -> None:
    before = {unit: running.show(unit, "MainPID") for unit in (HOST, AGENT)}
    running.sh(f"kill -STOP {' '.join(before.values())}")
    for unit, pid in before.items():
        running.until(f"test $(systemctl show -P NRestarts {unit}) -ge 1 && systemctl is-active {unit}")
        assert running.show(unit, "MainPID") != pid
        assert f"{unit}.service: Watchdog timeout (limit 30s)!" in running.journal(unit)
    running.wait_ready()
    assert running.device()["state"] == "ready"
    assert running.sh("ls /volume").split() == ["private", "public"]


@pytest.mark.parametrize("whom", ["main", "all"])
def test_a_killed_agent_is_started_again(running: Server, whom: str) -> None:
    """Where all its processes are killed, nobody is left to unmount the volume."""
    restarts, seen = int(running.show(AGENT, "NRestarts")), running.wait_ready()
    running.sh(f"systemctl kill --kill-whom={whom} --signal=KILL {AGENT}")
    running.until(f"test $(systemctl show -P NRestarts {AGENT}) -gt {restarts}")
    running.until(f"systemctl is-active {AGENT}")
    running.wait_ready(more_than=seen)
    assert running.sh("grep -c ' /volume/public fuse.millpond ' /proc/mounts") == "1"


def test_both_come_back_after_a_reboot(running: Server) -> None:
    if not why_no_torch():  # not before: each daemon imports it for a minute
        running.add_torch()
    running.sh("echo kept >/volume/private/kept && sync")
    before = running.sh("cat /proc/sys/kernel/random/boot_id")
    running.reboot()
    assert running.sh("cat /proc/sys/kernel/random/boot_id") != before
    running.wait_ready()
    assert running.device()["state"] == "ready"
    assert running.sh("cat /volume/private/kept") == "kept"
    assert running.sh("systemctl is-system-running") == "running"


def test_a_user_of_the_group_trains_from_a_closed_home(running: Server) -> None:
    if reason := why_no_torch():
        pytest.skip(reason)
    running.add_user("alice", 1000, "millpond")
    running.add_user("bob", 1001)
    running.put_files("/home/alice", {"job.toml": JOB.encode(), "net.py": NET.encode()})
    running.put_files("/home/alice/data", files_of(halves(8)))
    running.put_files("/volume/private/halves", files_of(halves(32)))
    running.sh("chown -R alice:alice /home/alice && chmod 0600 /home/alice/*/*.npy")
    refused = running.as_user("bob", "millpond jobs --fleet /var/lib/millpond")
    assert refused.code != 0 and b"Permission denied" in refused.errors

    command = "umask 0077 && millpond train job.toml --model model.safetensors"
    trained = running.as_user("alice", command, TORCH_SECONDS)
    assert trained.code == 0, (trained, running.journal(HOST), running.journal(AGENT))
    assert b"job 1 is done: accuracy 1.0000 after 2 rounds" in trained.output
    (job,) = json.loads(running.sh("millpond jobs --format json"))["jobs"]
    assert (job["name"], job["owner"], job["state"]) == ("from-home", 1000, "done")
    assert b" alice " in running.as_user("alice", "millpond jobs").output

    assert running.sh("stat -c %U:%G:%a /home/alice/model.safetensors") == "alice:alice:600"
    model = safetensors.numpy.load(running.as_user("alice", "cat model.safetensors").output)
    assert right(model, halves(64)) == 1.0
    for closed in ("/home/alice/model.safetensors", "/var/lib/millpond/jobs/1/model.safetensors"):
        assert b"Permission denied" in running.as_user("bob", f"cat {closed}").errors
    assert running.as_user("alice", "ls /var/lib/millpond").code != 0
    assert running.as_user("alice", "cat /var/lib/millpond/host/admin_key").code != 0
    assert b"a launch is for" in running.as_user("alice", "millpond launch -- net.py").errors


def test_a_stop_is_clean(running: Server) -> None:
    for unit in (AGENT, HOST):
        running.sh(f"systemctl stop {unit}")
        assert (running.show(unit, "Result"), running.show(unit, "ExecMainStatus")) == ("success", "0")
        said = running.journal(unit)
        assert "Deactivated successfully" in said
        assert "SIGKILL" not in said
        assert "timed out" not in said
    assert running.sh(PROCESSES, check=False) == ""
    assert "mp" not in running.sh("ip -brief link; ip -netns csd0 -brief link")
    assert "fuse.millpond" not in running.sh("cat /proc/mounts")
    assert "prohibit" not in running.sh("ip rule")
    assert running.sh("ls -A /volume") == ""


def test_nothing_is_left_of_what_was_installed(running: Server) -> None:
    said = running.sh("make -C /millpond uninstall")
    assert "kept /etc/millpond, it was changed" in said
    assert "its fleet and data stay in /var/lib/millpond" in said
    assert running.sh(PROCESSES, check=False) == ""
    assert "fuse.millpond" not in running.sh("cat /proc/mounts")
    left = "ls -d /opt/millpond /usr/local/bin/* /etc/systemd/system/*.wants/millpond* 2>/dev/null"
    assert running.sh(left, check=False) == ""
    assert running.show(HOST, "LoadState") == "not-found"
    assert "fleet.toml" in running.sh("ls /var/lib/millpond")
