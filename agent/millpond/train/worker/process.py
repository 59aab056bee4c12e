# SPDX-License-Identifier: Apache-2.0
"""Entry: a process that trains: ``python -m millpond.train.worker.process FD``.

FD is an inherited, connected Unix socket on which PrepareWorker (or PrepareServer) and the requests of its
role are served until its end. A failure of the user's model or data is answered by Failure, and the worker
lives on. The prints of the user's code go to this process's own output, as does the whole traceback of every
failure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.base.deadline import NEVER
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.linux.syscalls import die_with_parent
from millpond.train import protocol
from millpond.train.questions.messages import AskDevice
from millpond.train.worker.error_reports import failure
from millpond.wire.channel import Channel
from millpond.wire.framing import Head
from millpond.wire.messages import Failure, Message

if TYPE_CHECKING:
    from millpond.train.worker.roles import Answer, OpenStream, WorkerRole


class WorkerProcess:
    """Serves one channel. Failures contain messages of exceptions only if ``full``. ``open_stream`` opens
    streamed samples, where a worker has such.
    """

    def __init__(
        self,
        channel: Channel,
        root: Path,
        code_dir: Path,
        *,
        full: bool,
        shared: Sequence[int],
        state: Path | None = None,
        open_stream: OpenStream | None = None,
    ) -> None:
        self._channel, self._root, self._code_dir, self._state = channel, root, code_dir, state
        self._full, self._shared, self._open_stream = full, shared, open_stream
        self._session: WorkerRole | None = None
        self._factory = ""

    def serve(self) -> int:
        """Answer until the channel ends. Returns the exit code: 1 if the coordinator broke the protocol."""
        while True:
            try:
                head = self._channel.receive(NEVER)
                self._receive_payload(head)
                reply, payload = self._reply(head.message)
                self._channel.send(reply, NEVER, payload)
            except ConnectionLost:
                return 0 if self._channel.closed_cleanly else 1
            except ProtocolError as error:
                # what the coordinator sends next cannot be told from the bytes that do not belong
                print(f"worker: {error}", file=sys.stderr)
                with contextlib.suppress(ConnectionLost):
                    self._channel.send(Failure("protocol", str(error)), NEVER)
                return 1

    def _receive_payload(self, head: Head) -> None:
        """Receive a payload into its place. Raises ProtocolError if the sizes differ."""
        inlet = self._session.inlet(head.message) if self._session else None
        expected = 0 if inlet is None else inlet.nbytes
        if head.payload_size != expected:
            name = type(head.message).NAME
            raise ProtocolError(f"'{name}' came with {head.payload_size} bytes where {expected} belong")
        if inlet is not None:
            self._channel.receive_into(inlet.data, NEVER)

    def _reply(self, message: Message) -> Answer:
        try:
            return self._answer(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            traceback.print_exception(error)
            return failure(error, self._code_dir, self._factory, full=self._full), b""

    def _answer(self, message: Message) -> Answer:
        if isinstance(message, (protocol.PrepareWorker, protocol.PrepareServer)):
            return self._prepare(message), b""
        if isinstance(message, AskDevice):
            from millpond.train.worker.counting import counted  # numpy takes long to load

            self._factory = message.work.model.factory if message.work else ""
            return counted(message, self._root, self._code_dir)
        if self._session is None:
            return Failure("protocol", f"'{type(message).NAME}' came before 'prepare'"), b""
        answer = self._session.answer(message)
        return answer or (Failure("protocol", f"this worker does not serve '{type(message).NAME}'"), b"")

    def _prepare(self, prepare: protocol.PrepareWorker | protocol.PrepareServer) -> Message:
        # torch takes seconds; the process must already be tied to its parent
        from millpond.train.worker import roles, user_code

        self._session, self._factory = None, prepare.work.model.factory
        user_code.forget(self._code_dir)
        shared = roles.Descriptors(*self._shared)
        place = (self._root, self._code_dir, shared, self._state)
        self._session = roles.make(prepare, *place, self._open_stream, self._tell)
        return self._session.ready()

    def _tell(self, percent: int) -> None:
        self._channel.send(protocol.WorkProgress(percent), NEVER)


def main(arguments: Sequence[str] | None = None, opener: Callable[[int], OpenStream] | None = None) -> int:
    """Run the worker; return the exit code. ``opener`` returns what opens streamed samples, from the
    descriptor of the socket for streams.
    """
    options = _parser().parse_args(arguments)
    die_with_parent(signal.SIGKILL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what the user's code printed outlives a kill
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the coordinator, which then closes the channel
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    root, code_dir, full = options.root.absolute(), options.code.resolve(), options.errors == "full"
    os.chdir(code_dir)
    os.environ["HF_HUB_OFFLINE"] = "1"  # there is no network: Hugging Face's libraries need not try
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile returns the module itself: there is no compiler
    if options.wheels:
        sys.path.insert(0, str(options.wheels))
    with Channel(sock, "the coordinator") as channel:
        worker = WorkerProcess(
            channel,
            root,
            code_dir,
            full=full,
            shared=options.shared,
            state=options.state,
            open_stream=opener(options.streams) if opener else None,
        )
        return worker.serve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millpond.train.worker.process", description="Train as a coordinator says."
    )
    parser.add_argument("fd", type=int, help="descriptor of a connected Unix socket")
    parser.add_argument(
        "--shared",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("STATES", "VALUES"),
        help="descriptors of memory for the states, and for the values of updates (or means)",
    )
    parser.add_argument("--root", type=Path, default=Path(), help="where relative data folders lie")
    parser.add_argument(
        "--code", type=Path, default=Path(), help="the job's files; also the working directory"
    )
    parser.add_argument("--state", type=Path, help="where the task's own state is kept")
    parser.add_argument("--streams", type=int, help="descriptor of the socket that gives connections")
    parser.add_argument("--wheels", type=Path, help="the job's unpacked wheels, which are imported from")
    parser.add_argument(
        "--errors",
        choices=("full", "location"),
        default="location",
        help="whether a failure tells the messages of exceptions, which may hold samples",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
