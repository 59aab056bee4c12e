# SPDX-License-Identifier: Apache-2.0
"""The command line itself: options behind the device, the fleet's variable, help, completion, imports."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from millpond.fs.fuse import mounts
from millpond.host.cli import app, exits
from millpond.host.cli.ssh.run import options_first
from millpond.linux import sockets

from .commands import Command
from .daemon_rig import Rig


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("csd0 uname -a", "csd0 uname -a"),
        ("csd0 --fleet F -- uname -a", "--fleet F csd0 -- uname -a"),
        ("csd0 --fleet=F --admin -- --admin -x", "--fleet=F --admin csd0 -- --admin -x"),
        ("--fleet F csd0 uname -a --fleet G", "--fleet F csd0 uname -a --fleet G"),
        ("csd0 --fleet F uname --all", "--fleet F csd0 uname --all"),
        ("--all df -h", "--all df -h"),
        ("--timeout 3 --all df --fleet F", "--timeout 3 --all df --fleet F"),
        ("--all --fleet F -- df -h", "--all --fleet F -- df -h"),
        ("csd0 -- ls -- -x", "csd0 -- ls -- -x"),
        ("csd0 -x", "-x csd0"),
        ("csd0 --fleet", "--fleet csd0"),
        ("", ""),
    ],
)
def test_options_of_run_may_come_behind_the_device(given: str, parsed: str) -> None:
    valued = {"--fleet", "--timeout", "--format"}
    assert options_first(given.split(), valued) == parsed.split()


def test_the_fleet_of_an_argument_then_of_the_variable_then_the_default(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_FLEET", str(tmp_path / "variable"))
    argument = ("--fleet", str(tmp_path / "argument"))
    for words in (("devices",), ("jobs",), ("jobs", "compare", "1"), ("run", "csd0", "--", "true")):
        assert f"{tmp_path}/variable holds no fleet" in command(*words)[2]
    for words in (
        ("devices", *argument),
        ("jobs", *argument, "compare", "1"),
        ("jobs", "compare", *argument, "1"),
        ("run", "csd0", *argument, "--", "true"),
    ):
        assert f"{tmp_path}/argument holds no fleet" in command(*words)[2]
    assert "MILLPOND_FLEET" in command("--help")[1]


def test_each_command_has_a_whole_line_in_the_help() -> None:
    """Before: half of them ended with "..." on a terminal of 80 columns."""
    group: Any = typer.main.get_command(app.app)
    for each in (group, group.get_command(None, "data"), group.get_command(None, "jobs")):
        names = each.list_commands(None)
        room = 78 - 6 - max(map(len, names))
        told = {name: each.get_command(None, name).get_short_help_str(room) for name in names}
        assert not [name for name, text in told.items() if text.endswith("...") or not text]


@pytest.mark.parametrize("name", ["plot", "track", "compare"])
def test_the_commands_of_jobs_tell_the_fleet_s_variable(command: Command, name: str) -> None:
    assert "MILLPOND_FLEET" in command("jobs", name, "--help")[1]


def test_help_shows_brackets_as_they_are_written(command: Command) -> None:
    assert "[jobs]" in command("jobs", "prune", "--help")[1]
    assert "[tiers]" in command("simulate", "--help")[1]


@pytest.mark.parametrize(
    ("words", "packages", "told"),
    [
        ("devices", ("typer",), "the package 'typer' is not installed: pip install typer"),
        ("cp a csd0:public/", ("msgpack",), "the package 'msgpack' is not installed: pip install msgpack"),
        (
            "demo --in DIR",
            ("torch", "sklearn"),
            "the demo needs torch, scikit-learn: pip install torch scikit-learn",
        ),
    ],
)
def test_a_package_that_is_missing_is_one_line(
    words: str, packages: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    """Before: a demo without torch switched a fleet on, of which no worker started."""
    lacking = f"sys.modules.update(dict.fromkeys({packages!r}))"
    code = f"import sys; {lacking}; from millpond.host.main import main; main()"
    given = words.replace("DIR", str(tmp_path)).split()
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"millpond: {told}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_is_not_utf8_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        exits.run(lambda: os.fsdecode(b"caf\xe9").encode())
    assert capsys.readouterr().err == "millpond: 'caf\\xe9' cannot be written in utf-8\n"


def test_so_is_a_mount_point(command: Command, tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    told = f"millpond: '{tmp_path}/caf\\xe9' is not UTF-8: mount at a folder of another name\n"
    assert command("mount", "csd0", str(place)) == (2, "", told) and not place.exists()


def test_a_user_without_home_and_name_uses_the_installed_fleet() -> None:
    """As in a container that is started with any uid."""
    nobody = ["unshare", "-U", "--map-user=4242", "--map-group=4242"]
    nobody += ["env", "-u", "HOME", "-u", "MILLPOND_FLEET"]
    done = subprocess.run(
        [*nobody, sys.executable, "-m", "millpond.host.main", "devices"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("millpond: /var/lib/millpond")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("train",), "Missing argument 'JOB.toml' (see 'millpond train --help')"),
        (("train", "job.toml", "--rounds", "3"), "No such option: --rounds (see 'millpond train --help')"),
        (("run", "csd0", "-x", "--", "ls"), "No such option: -x (see 'millpond run --help')"),
        (("jobs", "compare"), "Missing argument 'JOB JOB...' (see 'millpond jobs compare --help')"),
        (("jbos",), "(see 'millpond --help')"),
        (("train", "none.toml"), "none.toml: No such file or directory"),
        (("train", "/"), "/: Is a directory"),
        (("profile", "none.toml"), "none.toml: No such file or directory"),
    ],
)
def test_a_wrong_usage_is_one_line_that_names_the_help(
    command: Command, words: tuple[str, ...], error: str
) -> None:
    code, out, err = command(*words)
    assert (code, out) == (2, "") and err.startswith("millpond: ") and err.endswith(f"{error}\n")
    assert err.count("\n") == 1


def test_devices_and_jobs_are_completed(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit("--set", "name=first")
    monkeypatch.setenv("_MILLPOND_COMPLETE", "complete_bash")

    def completed(line: str) -> list[str]:
        words = f"millpond {line}".split(" ")
        words[2:2] = ["--fleet", str(rig.directory)]
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return command()[1].split()

    assert completed("run csd") == ["csd0", "csd1", "csd2"]
    assert completed("shell csd1") == ["csd1"]
    assert completed("stop ") == ["1"]
    assert completed("logs ") == ["csd0", "csd1", "csd2", "1"]
    (rig.directory / "fleet.toml").write_text("name = 3")
    assert completed("run csd") == completed("stop ") == []


@pytest.mark.parametrize("words", [("jobs",), ("logs", "-f", "1"), ("stop", "1")])
def test_the_end_of_the_daemon_is_told_as_that(
    tmp_path: Path, command: Command, words: tuple[str, ...]
) -> None:
    (tmp_path / "fleet.toml").write_text('name = "ends"\n[[device]]\nname = "csd0"\n')
    with sockets.listen(tmp_path / "host.sock") as daemon:

        def end() -> None:
            connection, _ = daemon.accept()
            daemon.close()
            connection.close()

        thread = threading.Thread(target=end)
        thread.start()
        code, _, err = command(*words, "--fleet", str(tmp_path))
        thread.join(20)
    assert (code, err) == (1, "millpond: the host daemon has ended; jobs go on when it is back\n")


@pytest.mark.expected_log("was removed: there is a new one")
def test_a_socket_that_was_removed_is_made_anew(rig: Rig) -> None:
    socket = rig.directory / "host.sock"
    code, _, error = rig.command("jobs")
    assert code == 0, error
    socket.unlink()
    assert rig.command("jobs")[0] != 0
    rig.server.mend()
    code, _, error = rig.command("jobs")
    assert code == 0, error
    made = socket.stat().st_ino
    rig.server.mend()
    assert socket.stat().st_ino == made


@pytest.mark.expected_log("is not there, and cannot be made anew")
def test_a_daemon_lives_on_where_its_socket_cannot_be_looked_at(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    aside = rig.directory.rename(rig.directory.with_name("aside"))
    rig.directory.touch()
    try:
        for _ in range(3):
            rig.server.mend()
    finally:
        rig.directory.unlink()
        aside.rename(rig.directory)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["Not a directory"]
    rig.server.mend()
    assert rig.command("jobs")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("logs", "²"), "there is no device '²'"),
        (("logs", "99999999999999999999"), "there is no job 99999999999999999999"),
        (("logs", "9" * 5000), "there is no device '9"),
        (("logs", "--device", "csd0", "²"), "'²' is no job's number"),
        (("logs", "--device", "csd0", "99999999999999999999"), "a number has more than 64 bits"),
        (("stop", "99999999999999999999"), "a number has more than 64 bits"),
        (("resume", "9223372036854775808"), "there is no job 9223372036854775808"),
        (("resume", "0"), "there is no job 0"),
        (("jobs", "compare", "18446744073709551615"), "there is no job 18446744073709551615"),
        (("jobs", "model", "99999999999999999999", "file"), "a number has more than 64 bits"),
        (("jobs", "prune", "--keep", "99999999999999999999"), "a number has more than 64 bits"),
    ],
)
def test_odd_numbers_are_told_in_one_line(rig: Rig, arguments: tuple[str, ...], error: str) -> None:
    code, out, err = rig.command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and error in err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--version",), "standard output: No space left on device"),
        (("init", "--devices", "1", "--format", "json"), "standard output: No space left on device"),
        (("jobs", "--format", "json"), "no host daemon runs"),
    ],
)
def test_a_full_disk_below_the_output_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    (tmp_path / "fleet").mkdir()
    if arguments[0] == "jobs":
        (tmp_path / "fleet/fleet.toml").write_text('name = "f"\n')
    fleet = () if arguments[0].startswith("-") else ("--fleet", tmp_path / "fleet")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "millpond.host.main", *arguments, *fleet]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and error in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cp", "{file}", "csd0:"), "csd0:: a device takes files below csd0:public/ alone"),
        (("cp", "{file}", "csd0:data/x"), "csd0:data/x: a device takes files below csd0:public/ alone"),
        (
            ("emulate", "--", "no such; command"),
            "'no such; command' is no command: sh -c takes a line of them",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_is_begun(
    command: Command, rig: Rig, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "file").touch()
    found = [word.format(file=tmp_path / "file") for word in words]
    fleet = ("--fleet", str(tmp_path))
    assert command(found[0], *fleet, *found[1:]) == (2, "", f"millpond: {told}\n")


def test_a_folder_that_a_mount_has_made_does_not_outlive_its_failure(
    command: Command, rig: Rig, tmp_path: Path
) -> None:
    fleet = ("--fleet", str(tmp_path))
    places = tmp_path / "places"
    (places / "there").mkdir(parents=True)
    for name in ("new", "there"):
        code, _, told = command("mount", *fleet, "csd9", str(places / name))
        assert code == 2 and "'csd9'" in told
    assert [each.name for each in places.iterdir()] == ["there"]


RUNNING = """
import sys, millpond.host.main
sys.argv = ["millpond", *sys.argv[1:]]
try:
    millpond.host.main.main()
finally:
    print(*sys.modules)
"""


def loaded_by(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", RUNNING, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "holds no fleet" in done.stderr, done
    return set(done.stdout.split())


def test_ctrl_c_is_set_up_before_anything_that_takes_long_is_imported() -> None:
    before = "import sys, millpond.host.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("millpond")}
    assert found == {"millpond", "millpond.host", "millpond.host.main"}


def test_a_command_loads_no_module_of_another(tmp_path: Path) -> None:
    copying = loaded_by("cp", "--fleet", str(tmp_path), "a", "csd0:b")
    assert "millpond.fs.client.remote_fs" in copying
    assert not copying & {"rich", "millpond.host.api.daemon", "millpond.host.cli.jobs"}
    listing = loaded_by("devices", "--fleet", str(tmp_path))
    slow = {"cryptography", "numpy", "paramiko", "torch"}
    assert not listing & {*slow, "millpond.fs.client", "millpond.host.cli.jobs", "millpond.host.daemon"}


@pytest.mark.parametrize("room", [".", "ssh", "volumes"])
def test_a_command_is_added_by_one_file(room: str) -> None:
    file = Path(app.__file__).parent / room / "greet.py"
    text = [
        "from millpond.host.cli.options import new_app",
        "app = new_app()",
        "@app.command()",
        "def greet() -> None:",
        '    """Greet the user."""',
        "    print('hello')",
    ]
    try:
        file.write_text("\n".join(text))
        run = [sys.executable, "-m", "millpond.host.main"]
        assert subprocess.check_output([*run, "greet"], text=True) == "hello\n"
        assert "Greet the user." in subprocess.check_output([*run, "--help"], text=True)
    finally:
        file.unlink()


def test_names_of_mounts_control_no_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a mount of any user of the machine was listed by its name as it is."""
    monkeypatch.setattr(mounts, "volumes", lambda: [("\33[2J", Path("/nowhere/\33]0;x\7"))])
    done = command("mount")
    assert (done.code, done.out) == (0, " [2J at /nowhere/ ]0;x \n")


def test_the_name_of_a_fleet_adds_no_line_to_a_configuration(tmp_path: Path, command: Command) -> None:
    """Before: what followed a newline was read by ssh."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/ssh_key").touch()
    text = 'name = "a\\nHost *\\n  ProxyCommand touch x"\n[[device]]\nname = "csd0"\n'
    (tmp_path / "fleet.toml").write_text(text)
    done = command("ssh-config", "--fleet", tmp_path)
    assert done.code == 0 and done.out.splitlines()[1:3] == ["Host csd0", "    HostName csd0"]


def test_groups_of_the_fleet_replace_none_of_the_inventory(tmp_path: Path, command: Command) -> None:
    """Before: a group '_meta' was in place of all variables, and 'a_b' in place of 'a-b'."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/ssh_key").touch()
    groups = ("_meta", "millpond", "board-emulated", "ungrouped", "a-b", "a_b")
    lines = "".join(f'{name} = "csd0"\n' for name in groups)
    devices = "".join(f'[[device]]\nname = "csd{number}"\n' for number in range(2))
    (tmp_path / "fleet.toml").write_text(f'name = "f"\n{devices}[groups]\n{lines}')
    found = json.loads(command("inventory", "--fleet", tmp_path).out)
    assert found["_meta"]["hostvars"]["csd0"]["ansible_host"] == "csd0"
    assert found["millpond"] == found["board_emulated"] == {"hosts": ["csd0", "csd1"]}
    assert sum(value == {"hosts": ["csd0"]} for value in found.values()) == len(groups)
    assert set(found["all"]["children"]) == found.keys() - {"_meta", "all"} and "ungrouped" not in found


def test_a_demo_deletes_no_job_of_the_user(tmp_path: Path, command: Command) -> None:
    """Before: a job in the demo's directory was deleted with what an earlier demo had left."""
    (tmp_path / "demo.lock").touch()
    (tmp_path / "mine").symlink_to(tmp_path)
    job = tmp_path / "mine/job.toml"
    job.write_text("mine")
    done = command("demo", "--in", tmp_path, "--job", job)
    assert (done.code, job.read_text()) == (2, "mine")
    assert done.err == f"millpond: {job}: a demo empties {tmp_path}; copy the job to another folder\n"
    missing = command("demo", "--in", tmp_path, "--job", tmp_path.parent / "none.toml")
    assert missing.code == 2 and job.exists(), missing


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_ssh_reads_the_paths_of_any_directory(tmp_path: Path, command: Command) -> None:
    """Before: ssh refused a configuration with a quotation mark in a path."""
    fleet = tmp_path / 'a "b" %h $HOME `id` \\ c'
    (fleet / "host").mkdir(parents=True)
    (fleet / "host/ssh_key").touch()
    (fleet / "fleet.toml").write_text('name = "f"\n[[device]]\nname = "csd0"\n')
    (tmp_path / "config").write_text(command("ssh-config", "--fleet", fleet).out)
    told = subprocess.check_output(["ssh", "-G", "-F", tmp_path / "config", "csd0"], text=True)
    assert f"\nuserknownhostsfile {fleet}/host/known_hosts\n" in told
    (proxy,) = (line for line in told.splitlines() if line.startswith("proxycommand "))
    assert shlex.split(proxy.replace("%%", "%"))[-3:] == [str(fleet), "%h", "%p"]


def test_deletion_needs_a_directory_with_a_name(tmp_path: Path, command: Command) -> None:
    """Before: a whole volume that was copied to / would have emptied it: it has no name to go by there."""
    (tmp_path / "fleet.toml").write_text('name = "f"\n[[device]]\nname = "csd0"\n')
    options = ("--fleet", tmp_path, "-r", "--delete")
    for source, target in (("csd0:", tmp_path), ("csd0:/", tmp_path), ("/", "csd0:public/")):
        done = command("cp", *options, source, target)
        assert done.code == 2 and f"{source} has no name in a target, which --delete would empty" in done.err
