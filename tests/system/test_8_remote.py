# SPDX-License-Identifier: Apache-2.0
"""Commands on many devices at once, as an ordinary user and as root, and logs that are followed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ..waiting import eventually
from .support import CANARY, MILLPOND, Emulation, Result, millpond, without_progress
from .test_1_commands import Terminal, complaint, document

pytestmark = pytest.mark.timeout(240)
NAMES = ("csd0", "csd1", "csd2")
GO = "/volume/public/go"


@pytest.fixture
def go(fleet: Emulation) -> Iterator[list[Path]]:
    """The file that commands of a test wait for, on each device."""
    files = [fleet.fleet.device_directory(name) / "flash" / "public" / "go" for name in NAMES]
    yield files
    for file in files:
        file.unlink(missing_ok=True)


class Running:
    """A command that is still running: its lines of output so far, in the order in which they came."""

    def __init__(self, emulation: Emulation, command: str, *arguments: str) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.process = emulation.begin(command, *arguments)
        self.process.stdin.close()
        streams = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self._readers = [threading.Thread(target=_read, args=pair) for pair in streams]
        for reader in self._readers:
            reader.start()

    def wait_for(self, *texts: str, seconds: float = 120) -> None:
        """Until all of ``texts`` are in the output."""
        found = self.out, self.err
        eventually(
            lambda: all(text in "".join(map("".join, found)) for text in texts), f"{texts}", seconds, 0.05
        )

    def end(self, seconds: float = 120) -> Result:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return Result(code, "".join(self.out), without_progress("".join(self.err)))


def _read(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


@contextlib.contextmanager
def running(emulation: Emulation, command: str, *arguments: str) -> Iterator[Running]:
    started = Running(emulation, command, *arguments)
    try:
        yield started
    finally:
        started.process.kill()
        started.end()


def test_a_command_runs_on_all_devices_at_once(fleet: Emulation, go: list[Path]) -> None:
    script = f"echo begins; while ! [ -e {GO} ]; do sleep 0.1; done; echo complains >&2; echo ends"
    with running(fleet, "run", "--stream", "--all", "--", script) as command:
        command.wait_for(*(f"[{name}] begins\n" for name in NAMES))  # none ends before all have begun
        assert command.process.poll() is None
        go[1].touch()
        command.wait_for("[csd1] ends\n")  # nor do the lines of one wait for the others'
        for file in go:
            file.touch()
        result = command.end()
    assert result.code == 0
    assert sorted(result.out.splitlines()) == sorted(
        f"[{name}] {word}" for name in NAMES for word in ("begins", "ends")
    )
    assert sorted(result.err.splitlines()) == [f"[{name}] complains" for name in NAMES]


def test_lines_stay_whole_and_none_is_lost(fleet: Emulation) -> None:
    script = (
        "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; printf 'half '; echo of $i; done; printf last"
    )
    result = fleet.millpond("run", "--stream", "--all", "--", script)
    assert (result.code, result.err) == (0, "")
    expected = [line for number in range(1, 3001) for line in (f"{number}", f"half of {number}")] + ["last"]
    for name in NAMES:
        own = [line for line in result.out.splitlines() if line.startswith(f"[{name}] ")]
        assert [line.removeprefix(f"[{name}] ") for line in own] == expected
    assert len(result.out.splitlines()) == 3 * len(expected)
    result = fleet.millpond("run", "--all", "--", script)
    assert result.out.splitlines() == ["csd[0-2]:", *(f"  {line}" for line in expected)]


def test_control_characters_are_not_for_the_terminal(fleet: Emulation) -> None:
    result = fleet.millpond("run", "--stream", "csd0,csd1", "--", r"printf 'a\tb\033[2J\r[csd9] faked\r\n'")
    expected = [f"[{name}] a       b [2J [csd9] faked" for name in ("csd0", "csd1")]
    assert sorted(result.out.splitlines()) == expected


def test_the_greatest_exit_code_counts_and_each_failure_is_a_line(fleet: Emulation) -> None:
    script = "case $(uname -n) in csd0) exit 3;; csd1) exit 9;; esac"
    result = fleet.millpond("run", "--all", "--", script)
    assert result == Result(9, "", "millpond: csd0: exit code 3\nmillpond: csd1: exit code 9\n")
    assert fleet.millpond("run", "csd2,csd0", "--", script).code == 3
    assert fleet.millpond("run", "csd2,", "--", script) == Result(0, "", "")


def test_a_program_gets_a_list(fleet: Emulation) -> None:
    script = "cat; echo from $(uname -n); echo told >&2; [ $(uname -n) != csd1 ] || kill -9 $$"
    result = fleet.millpond("run", "--format", "json", "csd[1,0]", "--", script, stdin="for all\n")
    assert result.code == 137
    first, second = json.loads(result.out)
    assert second == {"device": "csd0", "exit_code": 0, "stdout": "for all\nfrom csd0\n", "stderr": "told\n"}
    assert (first["device"], first["exit_code"], first["stdout"]) == ("csd1", 137, "for all\nfrom csd1\n")
    assert first["stderr"].startswith("told\n")


def test_equal_output_is_folded_and_input_goes_to_all(fleet: Emulation) -> None:
    script = "cat; case $(uname -n) in csd1) echo other;; esac; echo told >&2"
    result = fleet.millpond("run", "@all", "--", script, stdin="given\n")
    assert (result.code, result.err) == (0, "csd[0-2]: told\n")
    assert result.out == "csd[0,2]: given\ncsd1:\n  given\n  other\n"
    for where in ("csd0", "csd[0-1]"):
        assert fleet.millpond("run", "-n", where, "--", "cat", stdin="not for it") == Result(0, "", "")
    one = fleet.millpond("run", "--format", "json", "csd2", "--", "cat", stdin="given")
    assert document(one) == {"device": "csd2", "exit_code": 0, "stdout": "given", "stderr": ""}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("csd0,csd9", "true"), "no device 'csd9'; the fleet has csd0, csd1, csd2"),
        ((",", "true"), "names no device"),
        (("--all",), "such as: millpond run csd0"),
        (("csd0",), "such as: millpond run csd0"),
        (("csd0", "--"), "such as: millpond run csd0"),
        ((), "such as: millpond run csd0"),
        (("--timeout", "0", "csd0", "true"), "--timeout"),
    ],
    ids=str,
)
def test_a_mistake_runs_nothing(shared_fleet: Emulation, arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(shared_fleet.millpond("run", *arguments), 2)


def test_a_device_that_cannot_be_reached_stops_no_other(odd: Emulation) -> None:
    ready = dict.fromkeys(("csd0", "turning", "raving"), "ready")
    odd.wait(ready | {"newer": "incompatible", "stranger": "refused", "flood": "refused"})
    result = odd.millpond("run", "--all", "--", "uname -n")
    assert result.code == 255
    assert sorted(result.out.splitlines()) == sorted(f"{name}: {name}" for name in ready)
    newer, stranger, flood, dead = result.err.splitlines()
    assert newer.startswith("millpond: newer: not ready but incompatible: ")
    assert stranger.startswith("millpond: stranger: not ready but refused: ")
    assert flood.startswith("millpond: flood: not ready but ")
    assert dead.startswith("millpond: dead: not ready but ")
    # By their names, they are tried; SSH does not mind another version of the agent.
    result = odd.millpond("run", "--format", "json", "dead,newer,csd0", "--", "uname -n")
    assert result.code == 255
    found = {item.pop("device"): item for item in json.loads(result.out)}
    assert list(found) == ["dead", "newer", "csd0"]
    assert (found["dead"]["exit_code"], found["dead"]["stdout"]) == (255, "") and found["dead"]["error"]
    assert found["newer"] == {"exit_code": 0, "stdout": "newer\n", "stderr": ""}


def test_a_device_that_dies_in_a_command_stops_no_other(fleet: Emulation, go: list[Path]) -> None:
    script = f"echo begins; while ! [ -e {GO} ]; do sleep 0.1; done; echo ends"
    with running(fleet, "run", "--stream", "csd0,csd1", "--", script) as command:
        command.wait_for("[csd0] begins\n", "[csd1] begins\n")
        first = fleet.pid_one("csd1")
        first.kill()
        first.wait(30)  # and all others of the device with it
        go[0].touch()
        result = command.end()
    assert result.code == 255
    assert "[csd0] ends\n" in result.out and "[csd1] ends" not in result.out
    assert result.err == "millpond: csd1: the connection was lost\n"


def remote_processes(emulation: Emulation, mark: str) -> list[int]:
    """Those on devices that have ``mark`` as an argument; not who has sent them there."""
    found = []
    for process in emulation.processes():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"):
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("number", "where", "admin"),
    [  # each signal for one device and for all, and for either user
        (signal.SIGINT, "--all", ()),
        (signal.SIGINT, "csd1", ("--admin",)),
        (signal.SIGTERM, "--all", ("--admin",)),
        (signal.SIGTERM, "csd1", ()),
        (signal.SIGHUP, "--all", ()),
        (signal.SIGHUP, "csd1", ("--admin",)),
        (signal.SIGKILL, "--all", ("--admin",)),
        (signal.SIGKILL, "csd1", ()),
    ],
)
def test_interrupted_commands_end_on_their_devices(
    fleet: Emulation, where: str, admin: tuple[str, ...], number: signal.Signals
) -> None:
    """Before: SIGTERM, SIGHUP and a lost connection left them running."""
    prefixes = [f"[{name}] " for name in NAMES] if where == "--all" else [""]
    with running(
        fleet, "run", "--stream", *admin, where, "--", "echo begins; sleep 47110 | sleep 47110"
    ) as command:
        command.wait_for(*(f"{prefix}begins\n" for prefix in prefixes))
        eventually(
            lambda: len(remote_processes(fleet, "47110")) == 2 * len(prefixes), "the commands", every=0.1
        )
        command.process.send_signal(number)
        assert command.end().code == (-number if number is signal.SIGKILL else 128 + number)
    eventually(lambda: not remote_processes(fleet, "47110"), "the end of the commands", every=0.1)


def test_a_time_limit_ends_also_what_does_not_want_to(fleet: Emulation) -> None:
    script = "trap '' HUP; echo begins; sleep 47111; echo goes on"
    hows = (("csd0",), ("csd0,csd1",), ("--admin", "csd0"))
    with contextlib.ExitStack() as stack:
        ways = [("run", "--timeout", "8", *how, "--", script) for how in hows]
        for command in [stack.enter_context(running(fleet, *way)) for way in ways]:
            result = command.end()
            assert result.code == 124
            assert "begins" in result.out and "goes on" not in result.out
            assert "millpond: csd0: it was ended at its time limit\n" in result.err
    eventually(lambda: not remote_processes(fleet, "47111"), "the end of the commands", every=0.1)
    found = fleet.millpond("run", "--timeout", "60", "--format", "json", "csd0", "true")
    assert document(found) == {"device": "csd0", "exit_code": 0, "stdout": "", "stderr": ""}


def test_a_client_that_does_not_read_ends_the_commands(fleet: Emulation) -> None:
    script = f"{' '.join(MILLPOND)} run --stream --fleet {fleet.directory} --all -- 'yes 47112' | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("] 47112\n")
    eventually(lambda: not remote_processes(fleet, "47112"), "the end of the commands", every=0.1)


SEE = (
    "id -un; grep -hrao canary-of-the-system-tests /flash /volume | sort -u; head -n 1 /etc/millpond/key.pem"
)


def test_the_admin_sees_what_no_user_does(fleet: Emulation) -> None:
    user = fleet.millpond("run", "csd0", "--", SEE)
    assert user.out == "pond\n"
    admin = fleet.millpond("run", "--admin", "csd0", "--", SEE)
    assert admin.out.splitlines() == ["root", CANARY, "-----BEGIN PRIVATE KEY-----"]
    on_all = fleet.millpond("run", "--admin", "--all", "--", "ls /flash; ip -br link show mp0 | wc -l")
    assert on_all.code == 0, on_all
    assert on_all.out == "csd[0-2]:\n  private\n  public\n  1\n"
    if os.geteuid() == 0:  # a board that an ordinary user emulates has one uid for all of its users
        found = fleet.millpond("run", "csd0", "--", "cat /etc/ssh/ssh_host_key")
        assert found.out == ""  # no user impersonates a board


@pytest.fixture
def keys(fleet: Emulation, tmp_path: Path) -> Path:
    """A fleet that is the shared one, but for the host's keys, which a test may change."""
    for name in ("fleet.toml", "host.sock"):
        (tmp_path / name).symlink_to(fleet.directory / name)
    shutil.copytree(fleet.directory / "host", tmp_path / "host")
    return tmp_path


def test_neither_key_opens_the_others_server(keys: Path) -> None:
    user, admin = keys / "host" / "ssh_key", keys / "host" / "admin_key"
    before = user.read_bytes(), admin.read_bytes()
    user.write_bytes(before[1])
    admin.write_bytes(before[0])
    result = millpond("run", "--fleet", keys, "csd0", "echo", "ran")
    assert "does not accept the fleet's key" in complaint(result, 255) and result.out == ""
    result = millpond("run", "--fleet", keys, "--admin", "csd0", "echo", "ran")
    assert "authorized_keys_admin" in complaint(result, 255) and result.out == ""
    result = millpond("run", "--fleet", keys, "--admin", "csd0,csd1", "echo", "ran")
    assert (result.code, result.out, result.err.count("\n")) == (255, "", 2)


def test_a_fleet_without_an_admin_key_is_told_how_to_make_one(keys: Path) -> None:
    (keys / "host" / "admin_key").unlink()
    for where in (("csd0",), ("--all",)):
        text = complaint(millpond("run", "--fleet", keys, "--admin", *where, "true"), 2)
        assert "ssh-keygen" in text and "authorized_keys_admin" in text
    assert millpond("run", "--fleet", keys, "csd0", "true").code == 0


def test_another_host_key_is_refused_for_the_admin_too(keys: Path) -> None:
    known = keys / "host" / "known_hosts"
    lines = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    known.write_text(f"csd0 {lines['csd1']}\n")
    result = millpond("run", "--fleet", keys, "--admin", "csd0", "echo", "ran")
    assert "another SSH host key" in complaint(result, 255) and result.out == ""
    result = millpond("run", "--fleet", keys, "--admin", "csd0,csd1", "echo", "ran")
    assert (result.code, result.out) == (255, "")
    assert "csd0: csd0" not in result.err and "has no key of csd1" in result.err


def test_a_shell_of_root(fleet: Emulation) -> None:
    terminal = Terminal([*MILLPOND, "shell", "--admin", "--fleet", str(fleet.directory), "csd1"])
    try:
        terminal.wait_for("# " if os.geteuid() == 0 else "$ ")
        terminal.type("echo $(id -un) $((6 * 7)) on $(uname -n); ls /flash; exit 6\r")
        terminal.wait_for("root 42 on csd1")
        terminal.wait_for("private")
        assert terminal.process.wait(60) == 6
    finally:
        terminal.close()


def test_the_log_of_a_device_is_followed_over_a_restart_of_its_agent(fleet: Emulation) -> None:
    with running(fleet, "logs", "-f", "-n", "2", "csd2") as log:
        eventually(lambda: len(log.out) >= 2, "its last lines", 120)
        number = fleet.submit(fleet.write_job("followed", rounds=500))
        log.wait_for("job followed: worker started")
        with fleet.client() as client:
            client.stop(number)
        log.wait_for("job followed: worker ended")
        shown = len(log.out)
        fleet.agent("csd2").kill()
        log.wait_for("millpond: csd2 is gone", "millpond: csd2 is back: its agent was started again")
        eventually(lambda: any("is ready at" in line for line in log.out[shown:]), "the new agent's log", 120)
        log.process.send_signal(signal.SIGINT)
        result = log.end()
    assert result.code == 130
    notes = [line for line in result.err.splitlines() if "interrupted" not in line]
    assert len(notes) == 2
    assert result.out.count("job followed: worker ended") == 1
    assert len(set(result.out.splitlines())) == len(result.out.splitlines())  # none is told twice


def test_the_log_of_a_job_is_followed_to_its_end(fleet: Emulation) -> None:
    number = fleet.submit(fleet.write_job("to-the-end", rounds=3))
    with running(fleet, "logs", "--follow", "--format", "json", str(number)) as log:
        result = log.end()
    assert (result.code, result.err) == (0, "")
    followed = [json.loads(line) for line in result.out.splitlines()]
    assert {entry["target"] for entry in followed} == {str(number)}
    whole = (fleet.fleet.job_directory(number) / "job.log").read_text().splitlines()
    assert [entry["line"] for entry in followed] == whole
    assert any("round 3: accuracy" in line for line in whole)
    again = fleet.millpond("logs", "-f", "-n", "2", str(number))
    assert (again.code, again.out.splitlines()) == (0, whole[-2:])
    assert "no job 99" in complaint(fleet.millpond("logs", "-f", "99"), 2)
    assert "no device 'csd9'" in complaint(fleet.millpond("logs", "-f", "csd9"), 2)
