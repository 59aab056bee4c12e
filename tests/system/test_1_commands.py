# SPDX-License-Identifier: Apache-2.0
"""The command line, as a person and as a program use it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ..waiting import eventually
from .support import MILLPOND, Emulation, Result, create, millpond

pytestmark = pytest.mark.timeout(180)


def document(result: Result) -> Any:
    """The one JSON document on standard output."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def complaint(result: Result, code: int) -> str:
    """The one line on standard error."""
    lines = result.err.splitlines()
    assert result.code == code, result
    assert len(lines) == 1, result
    assert lines[0].startswith("millpond: ")
    return lines[0]


def test_init_makes_keys_that_only_their_owner_reads(tmp_path: Path) -> None:
    made = document(millpond("init", "--fleet", tmp_path / "new", "--devices", "2", "--format", "json"))
    assert made["devices"] == ["csd0", "csd1"]
    secret = ("ca.key", "key.pem", "ssh_key", "admin_key", "ssh_host_key")
    keys = [p for p in (tmp_path / "new").rglob("*") if p.name in secret]
    assert len(keys) == 8
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert "holds a fleet already" in complaint(millpond("init", "--fleet", tmp_path / "new"), 2)


def test_a_fleet_of_boards_begins_without_devices(tmp_path: Path) -> None:
    made = millpond("init", "--fleet", tmp_path, "--devices", "0")
    assert made.out.startswith("fleet 'fleet' with no device is in"), made
    added = millpond("add", "csd0", "--board", "generic-uefi", "--fleet", tmp_path)
    assert "csd0 (generic-uefi) is in the fleet" in added.out, added


def test_doctor_finds_nothing_wrong_with_a_fleet_that_works(fleet: Emulation, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    found = document(fleet.millpond("doctor", "--format", "json", "--report", report))
    by_check: dict[str, list[Any]] = {}
    for each in found["diagnoses"]:
        by_check.setdefault(each["name"], []).append(each)
    assert not found["wrong"]
    for check in ("state", "tunnel", "rate", "version", "clock", "flash"):
        of_devices = {each["device"]: each["verdict"] for each in by_check[check] if each["device"]}
        assert of_devices == dict.fromkeys(("csd0", "csd1", "csd2"), "ok"), by_check[check]
    assert "device 3: ready" in report.read_text()
    assert not [text for text in ("csd", "10.77", str(fleet.directory)) if text in report.read_text()]


def test_devices_for_a_program_and_for_a_person(fleet: Emulation) -> None:
    found = document(fleet.millpond("devices", "--format", "json"))["devices"]
    assert [device["name"] for device in found] == ["csd0", "csd1", "csd2"]
    assert {device["state"] for device in found} == {"ready"}
    assert all(device["tunnel"][0] > 0 and device["tunnel"][1] > 0 for device in found)
    assert not any(device["welcome"]["at_rest"]["cipher"] for device in found)  # the key is beside it
    text = fleet.millpond("devices")
    assert text.code == 0
    _, *rows, note = text.out.splitlines()
    assert [line.split()[0] for line in rows] == ["csd0", "csd1", "csd2"]
    assert note.startswith("csd0, csd1, csd2: private data are not encrypted on the flash: ")
    assert "\x1b" not in text.out
    ledgers = document(fleet.millpond("devices", "--ledger", "--format", "json"))
    assert all(ledger["sent"]["metrics"] > 0 for ledger in ledgers.values())
    heading, *rows = fleet.millpond("devices", "--ledger").out.splitlines()
    assert "parameters" in heading and [line.split()[0] for line in rows] == list(ledgers) == [
        "csd0",
        "csd1",
        "csd2",
    ]


def test_topologies_are_predicted_and_measured(fleet: Emulation) -> None:
    found = document(
        fleet.millpond("topology", "--explain", "--values", "2000", "--repeats", "1", "--format", "json")
    )
    rows = {row["name"]: row["measured"] for row in found["reductions"]}
    assert len(rows) > 2 and all(seconds > 0 for seconds in rows.values())


def test_the_tunnel_counts_what_crosses_it(fleet: Emulation) -> None:
    before = document(fleet.millpond("tunnel", "csd0", "--format", "json"))
    assert before["state"] == "up" and before["mtu"] == 65520 and before["engine"] in ("c", "python")
    fleet.millpond("run", "csd0", "head -c 1000000 /dev/zero")
    after = document(fleet.millpond("tunnel", "csd0", "--format", "json"))
    assert after["from_device"]["bytes"] - before["from_device"]["bytes"] > 1_000_000
    assert after["to_device"]["packets"] > before["to_device"]["packets"]
    drops = ("malformed", "foreign_source", "foreign_destination", "refused")
    assert [after[way][cause] for way in ("to_device", "from_device") for cause in drops] == [0] * 8
    shown = fleet.millpond("tunnel", "csd0").out
    assert ", confinement on" in shown
    assert "csd0: up, generation" in shown and "from device" in shown


def test_the_tunnel_is_watched_until_interrupted(fleet: Emulation) -> None:
    argv = [*MILLPOND, "tunnel", "csd0", "--watch", "--fleet", str(fleet.directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        try:
            assert "csd0: up" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "csd9", "true"), 2, "no device 'csd9'"),
        (("shell", "csd9"), 2, "no device 'csd9'"),
        (("shell", "csd0"), 2, "needs a terminal"),
        (("logs", "csd9"), 2, "no device 'csd9'"),
        (("logs", "99"), 2, "99"),
        (("stop", "99"), 2, "no job 99"),
        (("tunnel", "csd9"), 2, "no device 'csd9'"),
        (("volume", "csd9"), 2, "no device 'csd9'"),
        (("mount", "csd9", "EMPTY"), 2, "no device 'csd9'"),
        (("mount", "csd0", "/dev/null"), 2, "/dev/null"),
        (("umount", "EMPTY/none"), 2, "EMPTY/none"),
        (("umount", "/proc"), 2, "no volume is mounted at /proc"),
        (("train", "no-such.toml"), 2, "no-such.toml"),
        (("devices", "--nonsense"), 2, "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_gets_one_line_and_its_exit_code(
    shared_fleet: Emulation, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    command, *rest = [argument.replace("EMPTY", str(tmp_path)) for argument in arguments]
    result = millpond(command, *rest) if command == "umount" else shared_fleet.millpond(command, *rest)
    assert words.replace("EMPTY", str(tmp_path)) in complaint(result, code)


@pytest.mark.parametrize(
    "command", [("devices",), ("run", "csd0", "true"), ("mount", "csd0", "."), ("jobs",)]
)
def test_no_fleet_and_no_daemon_are_told_apart(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *rest = command
    assert "holds no fleet" in complaint(millpond(name, "--fleet", tmp_path / "none", *rest), 2)
    (tmp_path / "fleet.toml").write_text('name = "dark"\n')
    assert "no host daemon runs" in complaint(millpond(name, "--fleet", tmp_path, *rest), 2)


def test_a_mistake_in_a_job_file_names_the_nearest_key(fleet: Emulation) -> None:
    job = fleet.write_job("mistaken")
    job.write_text(job.read_text().replace("rounds =", "rouds ="))
    line = complaint(fleet.millpond("train", job), 2)
    assert "rouds" in line
    assert "rounds" in line


def test_an_error_is_one_document_for_a_program_too(fleet: Emulation) -> None:
    result = fleet.millpond("run", "--format", "json", "csd9", "true")
    assert "csd9" in complaint(result, 2)
    assert "csd9" in json.loads(result.out)["error"]


def test_run_passes_on_input_output_and_exit_code(fleet: Emulation) -> None:
    result = fleet.millpond("run", "csd0", "--", "cat; echo told >&2; exit 7", stdin="both\nlines\n")
    assert result == Result(7, "both\nlines\n", "told\n")
    captured = fleet.millpond("run", "--format", "json", "csd0", "--", "echo out; echo err >&2; exit 3")
    assert captured.code == 3
    assert json.loads(captured.out) == {
        "device": "csd0",
        "exit_code": 3,
        "stdout": "out\n",
        "stderr": "err\n",
    }


def test_programs_on_a_device_find_utf_8_and_a_home_that_they_may_write(fleet: Emulation) -> None:
    script = r"printf '\303\251' | wc -m; touch ~/x && echo written; pwd"
    assert fleet.millpond("run", "csd0", "--", script) == Result(0, "1\nwritten\n/volume\n", "")


def test_a_command_that_is_killed_tells_its_signal(fleet: Emulation) -> None:
    killed = fleet.millpond("run", "csd0", "--", "kill -s KILL $$")
    assert killed.code == 137 and "Killed" in killed.err
    with_all = fleet.millpond("run", "csd0", "--", "kill -s KILL 0")
    assert with_all == Result(137, "", "millpond: csd0: it was killed with all of its process group\n")


def test_run_passes_on_a_megabyte_both_ways(fleet: Emulation) -> None:
    text = "0123456789abcdef" * 65536
    result = fleet.millpond("run", "csd2", "cat", stdin=text)
    assert result.code == 0
    assert result.out == text


def test_a_user_on_a_device_sees_the_public_part_and_nothing_else(fleet: Emulation) -> None:
    others = [fleet.directory, fleet.fleet.device_directory("csd1"), Path("/etc/millpond"), Path("/flash")]
    script = "; ".join(
        [
            "uname -n; id -u; ls /volume",
            *(f"test -e {path} && echo SEEN {path}" for path in (*others, "/volume/private", "/run/slot")),
            "grep -rl canary-of-the-system-tests /volume /etc /run /var /tmp 2>/dev/null",
            "cat /proc/1/root/etc/hostname /proc/*/root/flash/private/*/* 2>/dev/null",
            "true",
        ]
    )
    result = fleet.millpond("run", "csd0", "--", script)
    assert result.code == 0, result
    name, uid, *rest = result.out.splitlines()
    assert name == "csd0"
    assert int(uid) != 0
    assert rest == ["public"]


def test_another_host_key_than_the_pinned_one_is_refused(fleet: Emulation, tmp_path: Path) -> None:
    for name in ("fleet.toml", "host.sock"):
        (tmp_path / name).symlink_to(fleet.directory / name)
    shutil.copytree(fleet.directory / "host", tmp_path / "host")
    known = tmp_path / "host" / "known_hosts"
    lines = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    known.write_text(f"csd0 {lines['csd1']}\n")
    result = millpond("run", "--fleet", tmp_path, "csd0", "echo", "ran")
    assert "another SSH host key" in complaint(result, 255)
    assert result.out == ""
    assert "no key of csd1" in complaint(millpond("run", "--fleet", tmp_path, "csd1", "true"), 2)


def test_a_follower_of_a_job_may_leave_at_any_time(fleet: Emulation) -> None:
    daemon = fleet.daemon()
    with fleet.begin("train", fleet.write_job("left-alone", rounds=500)) as follower:
        eventually(lambda: " 1 " in follower.stdout.readline(), "a finished round", 120)
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=60)
        assert follower.returncode == 130
        assert re.fullmatch(
            r"millpond: interrupted; job (\d+) goes on: .* -f \1' .* stop \1' ends it\n", errors
        )
    with fleet.client() as client:
        number = client.jobs()[-1].id
    finished = len(fleet.wait_for_rounds(number, 1))
    fleet.wait_for_rounds(number, finished + 2)
    assert fleet.daemon() == daemon
    with fleet.client() as client:
        client.stop(number)


def test_output_that_nobody_reads_ends_a_command_silently(fleet: Emulation) -> None:
    script = f"{' '.join(MILLPOND)} run --fleet {fleet.directory} csd0 yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "y\n141\n", "")


def jobs_of(fleet: Emulation, device: str) -> tuple[str, ...]:
    """Of which jobs a device has told last; that is half a second old, or more."""
    load = fleet.devices()[device].load
    assert load, fleet.logs()
    return tuple(load.jobs)


def test_jobs_logs_and_stop(fleet: Emulation) -> None:
    job = fleet.write_job("endless", rounds=500)
    started = document(fleet.millpond("train", "--detach", "--format", "json", job))
    number = started["id"]
    assert started["state"] == "running"
    fleet.wait_for_rounds(number, 1)
    eventually(lambda: "endless" in jobs_of(fleet, "csd1"), "the device's load tells of the job", every=0.1)
    assert document(fleet.millpond("stop", str(number), "--format", "json")) == {
        "id": number,
        "state": "stopped",
    }
    info = next(j for j in document(fleet.millpond("jobs", "--format", "json"))["jobs"] if j["id"] == number)
    assert info["state"] == "stopped"
    assert info["round"] >= 1
    assert "not running" in complaint(fleet.millpond("stop", str(number)), 2)
    text = fleet.millpond("jobs")
    assert re.search(rf"^{number} +endless +stopped", text.out, re.MULTILINE)
    log = document(fleet.millpond("logs", str(number), "--format", "json"))
    assert any("round 1: accuracy" in line for line in log["lines"])
    assert document(fleet.millpond("logs", "csd0", "-n", "3", "--format", "json"))["lines"][-1]
    ended = "job endless: worker ended"
    eventually(lambda: ended in fleet.millpond("logs", "csd0").out, "the end in the device's log", every=0.1)
    eventually(lambda: not jobs_of(fleet, "csd1"), "the end of the worker", every=0.1)


def test_a_failed_job_is_a_document_a_line_and_exit_code_3(fleet: Emulation) -> None:
    job = fleet.write_job("nodata", private="private/nothing")
    result = fleet.millpond("train", job, "--format", "json")
    assert "private/nothing" in complaint(result, 3)
    assert json.loads(result.out)["job"]["state"] == "failed"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "vt100"},
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, words: str, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"no '{words}' in {self.text!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert words in self.text, self.text
                    return

    def close(self) -> None:
        os.close(self._master)
        self.process.kill()
        self.process.wait()


def test_a_shell_on_a_terminal(fleet: Emulation) -> None:
    terminal = Terminal([*MILLPOND, "shell", "--fleet", str(fleet.directory), "csd1"])
    try:
        terminal.wait_for("$ ")
        terminal.type("echo $((6 * 7)) on $(uname -n); tty\r")
        terminal.wait_for("42 on csd1")
        terminal.wait_for("/dev/pts/")
        terminal.type("exit 5\r")
        assert terminal.process.wait(60) == 5
    finally:
        terminal.close()


def test_a_second_daemon_is_refused_and_the_first_goes_on(fleet: Emulation) -> None:
    lock = (fleet.directory / "host.lock").read_text().strip()
    result = millpond("host", "--fleet", fleet.directory)
    assert f"(pid {lock})" in complaint(result, 2)
    assert (fleet.directory / "host.lock").read_text().strip() == lock
    fleet.wait_ready()


def test_a_second_emulation_is_refused_and_the_first_goes_on(fleet: Emulation) -> None:
    before = {name: info.welcome.boot for name, info in fleet.devices().items() if info.welcome}
    result = millpond("emulate", "--fleet", fleet.directory)
    assert "pid" in complaint(result, 2) and result.out == ""
    fleet.wait_ready()
    assert {name: info.welcome.boot for name, info in fleet.devices().items() if info.welcome} == before


def test_a_command_inside_starts_when_the_devices_are_ready(tmp_path: Path) -> None:
    fleet = create(tmp_path, ("csd0",)).directory
    run = (*MILLPOND, "run", "--fleet", fleet, "csd0", "--", "hostname")
    result = millpond("emulate", "--fleet", fleet, "--", *run)
    assert (result.code, result.out, result.err) == (0, "csd0\n", "")
