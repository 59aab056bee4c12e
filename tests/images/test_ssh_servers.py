# SPDX-License-Identifier: Apache-2.0
"""The two SSH servers of a device, on emulated boards with a shell script as agent that connects to both."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpond.agent.config import Users
from millpond.host.fleet import worker_user
from millpond.images.ondevice import sshd, sshd_config
from millpond.images.ondevice.sshd_config import ADMIN, HOST_KEY, SERVERS, USER, SshServer
from millpond.images.runtime import qemu

# What a board's agent does here: make the volume, say that it is ready, and enter as told, by ssh itself.
AGENT = """
exec > /flash/agent.log 2>&1
mkdir -p /volume/public /flash/private
echo told > /flash/private/secret
{python} -c "from millpond.linux.notify import notify; notify('READY=1')"
enter() {{ # key, port, user, command, option
  ssh $5 -i /etc/millpond/$1 -p $2 -o BatchMode=yes -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes \\
    -o UserKnownHostsFile=/etc/millpond/known -o ConnectionAttempts=60 $3@127.0.0.1 "$4" 2>&1 < /dev/null
  echo "exit code $?"
}}
enter user 22 pond "{show}" > /flash/user &
enter admin 2222 root "{show}" > /flash/admin &
enter user 22 pond "tty; exit 7" -tt > /flash/user-at-a-terminal &
enter admin 2222 root "tty; exit 7" -tt > /flash/admin-at-a-terminal &
enter admin 22 pond id > /flash/admin-at-user &
enter admin 22 root id > /flash/root-at-user &
enter user 2222 root id > /flash/user-at-admin &
enter admin 2222 pond id > /flash/pond-at-admin &
wait
touch /flash/done
sleep 1000
"""
SHOW = "exec 2>&1; whoami; cat /flash/private/secret; cat /etc/ssh/ssh_host_key | head -1; pwd"

# One board until its agent is done; run as root, and as a user that has but one uid.
BOARD = """
import sys, time
from pathlib import Path
from millpond.images.runtime.emulated import BoardSpec, EmulatedBoard

board = EmulatedBoard(BoardSpec("csd0", Path(sys.argv[1]), ("/bin/sh", "-c", sys.argv[2])))
board.power_on()
end = time.monotonic() + 80
while not Path(sys.argv[1], "flash", "done").exists() and time.monotonic() < end and not board.died():
    time.sleep(0.02)
board.power_off(0)
"""
REFUSED = ["Permission denied (publickey).", "exit code 255"]


def _why_not() -> str | None:
    for program in (sshd_config.SSHD, "/usr/bin/ssh", "/usr/bin/ssh-keygen"):
        if not os.access(program, os.X_OK):
            return f"there is no {program}"
    for device in ("/dev/fuse", "/dev/net/tun"):
        if not os.access(device, os.R_OK | os.W_OK):
            return f"{device} is not usable"
    if subprocess.run([*ONE_UID, "true"], capture_output=True, check=False).returncode:
        return "this user can make no namespaces"
    return None


ONE_UID = ("unshare", "--user", "--map-root-user")
needs_boards = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


@pytest.fixture(scope="module", params=["many uids", "one uid"])
def entered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each visitor of a board saw, and whether the board tells one uid from another."""
    many_uids = request.param == "many uids"
    if many_uids and os.geteuid() != 0:
        pytest.skip("needs root")
    directory = tmp_path_factory.mktemp("board")
    for part in ("etc", "flash", "state", "slot"):
        (directory / part).mkdir()
    for key, name in (("user", USER.authorized), ("admin", ADMIN.authorized), (HOST_KEY, "known")):
        line = make_key(directory / "etc" / key)
        text = f"[127.0.0.1]:2222,127.0.0.1 {line}" if name == "known" else line
        (directory / "etc" / name).write_text(f"{text}\n")
    script = AGENT.format(python=shlex.quote(sys.executable), show=SHOW)
    argv = [*(() if many_uids else ONE_UID), sys.executable, "-c", BOARD, str(directory), script]
    subprocess.run(argv, check=True, timeout=110)
    console = (directory / "console.log").read_text()
    assert (directory / "flash" / "done").exists(), console + (directory / "flash" / "agent.log").read_text()
    found = {
        path.name: path.read_text().splitlines() for path in (directory / "flash").glob("*") if path.is_file()
    }
    return found | {"console": console.splitlines(), "many uids": ["yes"] if many_uids else []}


def make_key(path: Path) -> str:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


@needs_boards
def test_the_user_sees_no_private_part(entered: dict[str, list[str]]) -> None:
    name, secret, key, *rest = entered["user"]
    assert name == "pond"
    assert "No such file" in secret
    # Only where there are many uids can sshd be somebody else than who enters.
    assert ("Permission denied" in key) == bool(entered["many uids"]), key
    assert rest[0] == "/volume"
    assert rest[-1] == "exit code 0"


@needs_boards
def test_the_admin_sees_the_whole_board(entered: dict[str, list[str]]) -> None:
    name, secret, key, home, code = entered["admin"]
    assert (name, secret, home, code) == ("root", "told", "/root", "exit code 0")
    assert "No such file" in key  # the board keeps it elsewhere


@needs_boards
@pytest.mark.parametrize("who", ["user", "admin"])
def test_both_may_have_a_terminal(entered: dict[str, list[str]], who: str) -> None:
    first, *_, code = entered[f"{who}-at-a-terminal"]
    assert first.startswith("/dev/pts/")
    assert code == "exit code 7"


@needs_boards
@pytest.mark.parametrize("visit", ["admin-at-user", "root-at-user", "user-at-admin", "pond-at-admin"])
def test_each_key_opens_its_own_server_for_its_own_user(entered: dict[str, list[str]], visit: str) -> None:
    assert entered[visit][-1] == REFUSED[-1]
    assert REFUSED[0] in entered[visit][-2]


def lines(server: SshServer) -> list[str]:
    return sshd_config.settings(server, Path("/key"), Path("/authorized"))


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_nobody_enters_without_a_key(server: SshServer) -> None:
    found = lines(server)
    for line in ("PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitTunnel no"):
        assert line in found
    assert [line for line in found if line.startswith("AllowUsers")] == [f"AllowUsers {server.user}"]


def test_the_servers_differ_in_who_enters_and_where_alone() -> None:
    differing = {line.split()[0] for line in set(lines(USER)) ^ set(lines(ADMIN))}
    forwarding = {"AllowTcpForwarding", "PermitOpen"}
    assert differing == {"Port", "AllowUsers", "PermitRootLogin", "SetEnv", *forwarding}
    assert "AllowTcpForwarding no" in lines(ADMIN)
    # A user's forwarding reaches what the user's own programs on the device reach, and the device alone.
    assert {"AllowTcpForwarding local", "PermitOpen localhost:* 127.0.0.1:*"} <= set(lines(USER))
    assert (USER.port, ADMIN.port) == (22, 2222)
    assert USER.authorized != ADMIN.authorized


def test_all_that_sshd_is_told_is_what_sshd_knows(tmp_path: Path) -> None:
    if not os.access(sshd_config.SSHD, os.X_OK):
        pytest.skip("there is no sshd")
    make_key(tmp_path / HOST_KEY)
    for server in SERVERS.values():
        told = sshd_config.command(sshd_config.settings(server, tmp_path / HOST_KEY, tmp_path / "keys"))
        done = subprocess.run([*told, "-t"], capture_output=True, text=True, check=False)
        assert "/run/sshd" in done.stderr or (done.returncode, done.stderr) == (0, "")


def test_a_device_has_its_own_users_alone() -> None:
    passwd = [line.split(":") for line in sshd_config.accounts()["/etc/passwd"].splitlines()]
    assert [line[0] for line in passwd] == ["root", "pond", "sshd"]
    assert len({line[2] for line in passwd}) == 3
    renamed = sshd_config.accounts(sshd_config.RENAMED_ROOT)["/etc/passwd"].splitlines()
    assert renamed[0].split(":")[:3] == ["root", "x", str(sshd_config.RENAMED_ROOT)]
    assert renamed[1:] == [":".join(line) for line in passwd[1:]]


@pytest.mark.parametrize("many_uids", [True, False])
def test_the_users_server_has_the_public_part_and_its_keys_only(many_uids: bool) -> None:
    public = Path("/volume/public")
    sandbox = sshd_config.sandbox(Path("/etc/millpond"), public, "keys", many_uids=many_uids)
    assert sandbox.binds
    assert [
        str(bind.target) for bind in sandbox.binds if not bind.read_only and bind.target.parts[1] != "dev"
    ] == [str(public)]
    shown = {str(bind.source) for bind in sandbox.binds}
    assert not shown & {"/volume", "/flash", "/etc", "/etc/millpond", "/", "/run", "/var"}
    assert sandbox.restricted and sandbox.own_pids
    assert set(sandbox.secrets.values()) == {"/etc/millpond/ssh_host_key"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody", "--identity", "/x", "--public", "/y"], "invalid choice"),
        (["user"], "--identity"),
    ],
)
def test_wrong_arguments_are_told(arguments: Sequence[str], words: str) -> None:
    done = run_server(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_server_without_keys_is_one_line(tmp_path: Path) -> None:
    done = run_server("user", "--identity", str(tmp_path), "--public", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "authorized_keys" in done.stderr


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "millpond.images.ondevice.sshd", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_what_a_boards_init_runs_is_the_same_command() -> None:
    assert sshd.command("admin", Path("/etc/millpond"), Path("/volume/public"))[1:] == [
        *("-m", "millpond.images.ondevice.sshd", "admin"),
        *("--identity", "/etc/millpond", "--public", "/volume/public"),
    ]


def test_no_file_of_the_users_server_lies_in_what_is_shown_read_only() -> None:
    """An image has its code in /opt/millpond: its server could not make the Python there, nor start."""
    made = sshd_config.sandbox(Path("/identity"), Path("/volume/public"), "", many_uids=True)
    shown = {bind.target for bind in made.binds or ()} | {Path("/opt/millpond"), Path("/usr")}
    for name in (*made.files, *made.secrets):
        assert not any(Path(name).is_relative_to(target) for target in shown if target != Path(name)), name


def test_no_two_kinds_of_processes_have_one_user() -> None:
    """A process of one could signal to those of the other, and read their memory."""
    users = dataclasses.asdict(Users()).values()
    accounts = [line.split(":")[2] for line in sshd_config.accounts()["/etc/passwd"].splitlines()]
    found = [*users, *map(int, accounts), qemu.USER, worker_user.UID]
    assert len(set(found)) == len(found)
