# SPDX-License-Identifier: Apache-2.0
"""Entry: a data service whose transforms run in its own process, or in another as on a device.

``python -m bench.data.transform_service FOLDER FILE.py own|other`` prints its address, and serves until it is
terminated.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.data_service.process import restart_at
from millpond.agent.data_service.transformer import TransformerProcesses
from millpond.data.streaming.server import DataServer, ServiceSettings, Transforms
from millpond.data.streaming.transforms.functions import functions_of, in_process
from millpond.data.streaming.transforms.remote import RemoteTransforms
from millpond.train.distributed.launch_messages import Launch
from millpond.train.worker.start import workers_zygote


@contextlib.contextmanager
def in_another(file: Path) -> Iterator[Transforms]:
    """Yield the transforms of a file in the confined process that a device has for them."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as state, contextlib.ExitStack() as stack:
        Path(state).chmod(0o755)
        link = LinkConfig("127.0.0.1/8", "unused")
        config = AgentConfig("csd0", link, flash=state, volume=state, state=state)
        code = Launch(
            "a.py", (), {"a.py": b"", file.name: file.read_bytes()}, 0, 1, "", 0, transforms=file.name
        )
        zygote = stack.enter_context(contextlib.closing(workers_zygote(idle=600.0)))
        process = stack.enter_context(contextlib.closing(TransformerProcesses(config, code, zygote)))
        yield stack.enter_context(contextlib.closing(RemoteTransforms(restart_at(process.asked.detach()))))


def main() -> None:
    """Serve until SIGTERM."""
    torch.set_num_threads(1)  # as the service's command
    root, file, where = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    own = contextlib.nullcontext(in_process(functions_of(file)))
    with own if where == "own" else in_another(file) as transforms:
        sock = socket.create_server(("127.0.0.1", 0))
        with DataServer(sock, ServiceSettings(root, transforms=transforms)):
            print("{}:{}".format(*sock.getsockname()), flush=True)
            signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
