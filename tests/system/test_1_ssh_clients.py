# SPDX-License-Identifier: Apache-2.0
"""The real clients of OpenSSH, and rsync, reach devices by the configuration that 'ssh-config' prints."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..ports import unused_port
from ..waiting import eventually
from .support import Emulation
from .test_1_commands import complaint

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh"),
]


@pytest.fixture
def config(fleet: Emulation, tmp_path: Path) -> Path:
    """The file that a user would write."""
    printed = fleet.millpond("ssh-config")
    assert (printed.code, printed.err) == (0, "")
    (tmp_path / "config").write_text(printed.out)
    return tmp_path / "config"


def run(*argv: str | Path, given: str = "", code: int = 0) -> str:
    done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("options", [(), ("--relay",), ("--prefix", "lab-")], ids=" ".join)
def test_ssh_runs_commands_on_devices(fleet: Emulation, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "config").write_text(fleet.millpond("ssh-config", *options, "csd[0-1]").out)
    prefix = "lab-" if "lab-" in options else ""
    ssh = ("ssh", "-F", tmp_path / "config")
    assert run(*ssh, f"{prefix}csd1", "cat; uname -n; id -un", given="given\n") == "given\ncsd1\npond\n"
    run(*ssh, f"{prefix}csd0", "exit 7", code=7)
    data = run(*ssh, f"{prefix}csd0", "head -c 3000000 /dev/zero | tr '\\0' x")
    assert data == "x" * 3_000_000


def test_scp_and_rsync_copy(fleet: Emulation, config: Path, tmp_path: Path) -> None:
    (tmp_path / "d" / "deep").mkdir(parents=True)
    (tmp_path / "d" / "deep" / "f").write_bytes(os.urandom(200_000))
    folder = fleet.fleet.device_directory("csd1") / "flash" / "public" / "of-clients"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    run("scp", "-q", "-F", config, "-r", tmp_path / "d", "csd1:public/of-clients/")
    assert (folder / "d/deep/f").read_bytes() == (tmp_path / "d/deep/f").read_bytes()
    run("scp", "-q", "-F", config, "csd1:public/of-clients/d/deep/f", "csd1:public/of-clients/g")
    if shutil.which("rsync"):
        way = f"ssh -F {shlex.quote(str(config))}"
        run("rsync", "-a", "-e", way, "csd1:public/of-clients/", f"{tmp_path}/back/")
        assert (tmp_path / "back/g").read_bytes() == (tmp_path / "d/deep/f").read_bytes()


@pytest.fixture
def forwarded(config: Path) -> Iterator[int]:
    """A port of this machine that ssh forwards to one of csd2's own."""
    here, there = unused_port(), 8123
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 8123)); print('listens', flush=True)\n"
        "while True: c = s.accept()[0]; c.sendall(b'from ' + socket.gethostname().encode()); c.close()"
    )
    argv = [
        "ssh",
        "-F",
        config,
        "-o",
        "ExitOnForwardFailure=yes",
        "-L",
        f"127.0.0.1:{here}:localhost:{there}",
    ]
    argv += ["csd2", f"millpond-python -c {shlex.quote(serve)}"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "listens\n"
        yield here
        client.terminate()


def test_ports_of_a_device_are_forwarded(config: Path, forwarded: int) -> None:
    """Before: the device's SSH server refused every forwarding."""

    def answer() -> bytes:
        with socket.create_connection(("127.0.0.1", forwarded), 10) as sock:
            return sock.recv(100)

    assert eventually(answer, "an answer") == b"from csd2"
    # To nothing beyond the device itself.
    told = run("ssh", "-F", config, "-W", "10.77.0.1:22", "csd0", code=255)
    assert "administratively prohibited" in told


def test_another_host_key_than_the_pinned_one_is_refused(fleet: Emulation, config: Path) -> None:
    known = fleet.directory / "host" / "known_hosts"
    keys = dict(line.split(" ", 1) for line in known.read_text().splitlines())
    (config.parent / "known").write_text(f"csd0 {keys['csd1']}\n")
    config.write_text(config.read_text().replace(str(known), str(config.parent / "known")))
    told = run("ssh", "-F", config, "csd0", "true", code=255)
    assert "Host key verification failed" in told


def test_roots_server_is_reached_by_its_key_alone(fleet: Emulation, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(fleet.millpond("ssh-config", "--admin", "csd0").out)
    assert run("ssh", "-F", tmp_path / "config", "csd0", "id -un; ls /flash") == "root\nprivate\npublic\n"
    missing = fleet.millpond("ssh-config", "--admin", "--authority", tmp_path)
    assert f"{tmp_path}/admin_key is missing" in complaint(missing, 2)
    assert "there is no device 'csd9'" in complaint(fleet.millpond("ssh-config", "csd9"), 2)


def test_the_inventory_is_what_ansible_expects(fleet: Emulation) -> None:
    found = json.loads(fleet.millpond("inventory", "--list").out)
    assert found["millpond"] == {"hosts": ["csd0", "csd1", "csd2"]} == found["board_emulated"]
    assert found["all"]["children"] == ["millpond", "board_emulated"]
    variables = found["_meta"]["hostvars"]["csd1"]
    assert json.loads(fleet.millpond("inventory", "--host", "csd1").out) == variables
    ssh = ["ssh", *shlex.split(variables["ansible_ssh_common_args"]), "-i"]
    ssh += [variables["ansible_ssh_private_key_file"], "-p", str(variables["ansible_port"])]
    ssh += ["-l", variables["ansible_user"], variables["ansible_host"], "uname -n"]
    assert run(*ssh) == "csd1\n"
