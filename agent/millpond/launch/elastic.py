# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): runs a launched script under torch's elastic agent, as each node of torchrun has one.

The agents of all workers meet at the master's port (c10d). They set the script's variables, start it again,
and meet again when a worker comes or is lost. The script is a fork of its agent, which has loaded torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from millpond.launch.script import script_code
from millpond.train.distributed.launch_messages import ElasticAgents, Launch

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Has rank 0 make a store for each round. Torch 2.13 tells the address of a shared one in the first round
alone: an agent that comes later would wait for it in vain, as it does under torchrun.
"""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_elastic(
    launch: Launch, elastic: ElasticAgents, folder: Path, interface: str, requests: int
) -> NoReturn:
    """Run the agent in this process, and exit with the script's exit code; ``requests`` is the channel of its
    requests.
    """
    code = 1
    try:
        code = _run(launch, elastic, folder, interface, requests)
    except Exception as error:  # noqa: BLE001 - the agent's own, as of a rendezvous that was never complete
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001 - nothing may go on in a copy of the first process
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(launch: Launch, elastic: ElasticAgents, folder: Path, interface: str, requests: int) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault(_OWN_STORE, "1")
    config = LaunchConfig(
        min_nodes=elastic.least,
        max_nodes=elastic.most,
        nproc_per_node=launch.processes,
        run_id=launch.run,
        role="default",
        rdzv_endpoint=f"{launch.master_address}:{launch.master_port}",
        rdzv_backend="c10d",
        rdzv_configs={"is_host": launch.rank == 0} | dict(elastic.conf),
        max_restarts=elastic.restarts,
        start_method="fork",
        local_addr=launch.address,
    )

    def script() -> None:
        _take_signals()
        if code := script_code(launch, folder, interface, requests):
            os._exit(code)

    try:
        elastic_launch(config, script)()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    return 0


def _take_signals() -> None:
    """Take signals as a new program does: those that the agent has heeded do not interrupt an exchange."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def workers_of(agents: Iterable[int]) -> Iterator[int]:
    """Yield the processes that agents have started."""
    for agent in agents:
        for task in Path(f"/proc/{agent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # that thread has ended
                yield from map(int, task.read_text().split())
