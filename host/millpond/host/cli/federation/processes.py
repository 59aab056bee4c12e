# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): Flower's programs, which lie in an environment of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.base.errors import LocalError
from millpond.linux.sockets import free_port
from millpond.linux.syscalls import killed_with_parent

START_SECONDS, END_SECONDS, QUERY_SECONDS = 120.0, 10.0, 120.0
LOOPBACK, RUN = "127.0.0.1", ".federation"
_MADE_OF = ("pyproject.toml", "job.toml")
_CONFIG = """[superlink]
default = "millpond"

[superlink.millpond]
address = "{address}"
{trust}
"""


@dataclass(frozen=True, slots=True)
class Flower:
    """Flower's programs in the ``environment``, for the app in ``app``, whose folder RUN has logs and
    what the server saves. Raises LocalError where the environment has none, and for a folder without an app.
    """

    environment: Path
    app: Path

    def __post_init__(self) -> None:
        if not (self.environment / "bin" / "flwr").exists():
            needed = f"install {self.app}/requirements.txt there, and millpond with --no-deps"
            raise LocalError(f"there is no Flower in {self.environment}: {needed}")
        if not all((self.app / name).exists() for name in _MADE_OF):
            how = f"'millpond federate new {self.app} --from JOB' writes one; copy it to each host"
            raise LocalError(f"{self.app} is no folder of a Flower app: {how}")

    @property
    def folder(self) -> Path:
        """The folder of what a run writes."""
        found = self.app.absolute() / RUN
        found.mkdir(exist_ok=True)
        return found

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the programs: nothing leaves this machine but what is meant to."""
        own = {
            "PATH": f"{self.environment.absolute()}/bin:{os.environ.get('PATH', os.defpath)}",
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",  # it starts a process for each message
        }
        return dict(os.environ) | own

    def connect(self, address: str, certificate: Path | None) -> None:
        """Have ``flwr`` use the SuperLink at an address, without TLS if there is no certificate."""
        path = json.dumps(str(certificate.absolute())) if certificate else ""
        trust = f"root-certificates = {path}" if path else "insecure = true"
        (self.folder / "home").mkdir(exist_ok=True)
        (self.folder / "home" / "config.toml").write_text(_CONFIG.format(address=address, trust=trust))

    def argv(self, program: str, *arguments: str) -> list[str]:
        """Return the command line of a program."""
        return [str(self.environment.absolute() / "bin" / program), *arguments]

    def node(self, superlink: str, node: Mapping[str, str], certificate: Path | None) -> list[str]:
        """Return the command line of a SuperNode whose configuration is ``node``."""
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in node.items())
        trust = ("--root-certificates", str(certificate)) if certificate else ("--insecure",)
        port = ("--port", str(free_port(LOOPBACK)))
        return self.argv("flower-supernode", *trust, "--superlink", superlink, *port, "--node-config", config)

    def superlink(self, port: int) -> list[str]:
        """Return the command line of a SuperLink on loopback, for a try."""
        database = ("--database", str(self.folder / "superlink.db"))
        place = ("--host", LOOPBACK, "--port", str(port))
        install = "--disable-runtime-dependency-installation"
        return self.argv("flower-superlink", "--insecure", *place, *database, install)

    def run(self, config: Mapping[str, str | int | float]) -> int:
        """Run the app until its run has ended, and print its log. The run does not outlast this call; one
        that has outlasted a killed process ends before it, as both would write what the server saves. Returns
        0 if the run has ended well, else 1.
        """
        note = self.folder / "run"
        if note.exists():
            self._stop(note.read_text())
        options = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        begun = self._asked("run", str(self.app.absolute()), "millpond", "-c", options)
        if not (number := str(begun.get("run-id") or "")):
            raise LocalError(f"the run cannot begin: {begun.get('error-message', 'no SuperLink answers')}")
        note.write_text(number)
        try:
            argv = self.argv("flwr", "log", number, "millpond", "--stream")
            subprocess.run(argv, env=self.variables, check=False, preexec_fn=killed_with_parent())
        finally:
            status = self._stop(number)
        return int(status != "finished:completed")

    def _stop(self, number: str) -> str:
        """End a run unless it has ended. Returns its status before that, "" if no SuperLink tells it."""
        runs = self._asked("list", "millpond", "--run-id", number).get("runs", [])
        status = str(runs[0].get("status", "")) if runs else ""
        if status and not status.startswith("finished"):
            self._asked("stop", number, "millpond")
        return status

    def _asked(self, *words: str) -> dict[str, Any]:
        """Return what a command of ``flwr`` answers, nothing if it does not in time."""
        argv = self.argv("flwr", *words, "--format", "json")
        try:
            found = subprocess.run(
                argv, env=self.variables, capture_output=True, timeout=QUERY_SECONDS, check=False
            )
            answer = json.loads(found.stdout)
        except (ValueError, subprocess.TimeoutExpired):
            return {}
        return answer if isinstance(answer, dict) else {}

    @contextlib.contextmanager
    def started(self, name: str, argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program inside the context; its output is in ``NAME.log`` of the folder."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=killed_with_parent(),
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_SECONDS)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program listens on loopback. Raises LocalError if it ends, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
            return
        time.sleep(0.1)
    raise LocalError(f"{Path(str(process.args[0])).name} does not listen: see its log in {RUN}")  # type: ignore[index]
