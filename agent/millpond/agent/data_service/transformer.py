# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the processes that apply a launch's transforms for a data service, confined as workers.

They see the files of the launch and nothing of the volume, and have no network. The data service, which alone
sends, counts and searches, asks for each, and asks again when it has ended or hangs.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from pathlib import Path

from millpond.agent.config import AgentConfig
from millpond.data.streaming.transforms.messages import GOES_ON, PROCESSES
from millpond.launch.inputs import lay_out
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.limits.process_limits import REFUSED
from millpond.linux.logs import BoundedLog
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.distributed.launch_messages import Launch

LONGEST_REASON = 1000
_DEATH_SECONDS = 2.0
_LAST_LINES = 3
_CODE = Path("/code")


class TransformerProcesses:
    """The processes of the transforms of ``code``, forks of ``zygote``. Each message at the other end of
    ``asked``, which the caller passes on and closes, is the number of a process, one byte: it ends that, if
    there is one, and starts another. The answer is "D", the reason for the end of the former, and the
    connection to the latter; without a connection the reason why none has started. Raises OSError.
    """

    def __init__(self, config: AgentConfig, code: Launch, zygote: Zygote) -> None:
        self._code, self._zygote = code, zygote
        self._folder = tempfile.TemporaryDirectory(prefix="transforms-", dir=config.state)
        shown = Path(self._folder.name, "code")
        lay_out(code.files, shown)
        for path in (shown, *shown.rglob("*")):
            path.chmod(0o755)  # whatever the umask is, another user reads them
        self._sandbox = Sandbox(
            binds=(*system_binds(), *python_binds(), Bind(shown, _CODE)),
            own_network=True,
            own_pids=True,
            uid=config.users.launch,  # not that of workers, which may read private data
        )
        self._logs, self._name = config.job_logs, f"transforms-{Path(code.transforms).name}"
        self._processes = dict[int, tuple[Child, BoundedLog]]()
        self._ours, self.asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._answer, name="transforms", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the processes."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self.asked.close()
        self._thread.join()
        self._ours.close()
        self._folder.cleanup()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while number := self._ours.recv(1):
                self._replace(number[0] % PROCESSES)
        for process, _ in self._processes.values():
            end(process)

    def _replace(self, number: int) -> None:
        before = self._processes.pop(number, None)
        reason = self._ended(*before) if before else ""
        near, far = socket.socketpair()
        with near, far:
            try:
                self._processes[number], passed = self._started(far, number), [near.fileno()]
            except OSError as error:
                reason, passed = f"its process cannot be started: {error.strerror or error}", []
            text = reason.encode()[:LONGEST_REASON]
            socket.send_fds(self._ours, [b"D" + text], passed)

    def _started(self, connection: socket.socket, number: int) -> tuple[Child, BoundedLog]:
        log = BoundedLog(self._logs / f"{self._name}{f'-{number + 1}' if number else ''}.log")
        arguments = ["3", str(_CODE / self._code.transforms)]
        entry = "millpond.data.streaming.transforms.process"
        try:
            descriptors = [connection.fileno()]
            return self._zygote.start(self._sandbox, arguments, descriptors, log.writer, entry=entry), log
        finally:
            log.close_writer()

    @staticmethod
    def _ended(process: Child, log: BoundedLog) -> str:
        """End the process. Returns what it had run out of, and the last lines of its log, without those of
        requests that failed before: they may be another stream's.
        """
        shortage = process.shortage(_DEATH_SECONDS).text or (REFUSED if process.refusals else "")
        end(process)
        lines = log.last_lines(_LAST_LINES, _DEATH_SECONDS)
        while GOES_ON in lines:
            del lines[: lines.index(GOES_ON) + 1]
        return "; ".join(filter(None, (shortage, *lines)))
