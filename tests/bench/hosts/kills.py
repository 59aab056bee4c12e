# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): each process of a federation is killed in the middle of an outer round, and comes back as
a service does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file
from tests.waiting import eventually

from bench.experiment import Run
from bench.hosts.federated_fleets import EMULATION, Federation, accuracy, federation, noted
from bench.rows import Row, summary
from millpond.base.errors import MillpondError
from millpond.host.cli.federation import project
from millpond.host.cli.federation.processes import LOOPBACK, wait_for_port
from millpond.linux.sockets import free_port
from system.support import Emulation

VICTIMS = ("client-app", "daemon", "node", "server-app", "superlink")
FIGURES = ("flower_kills", "flower_kills_accuracy")
TRIES = 4


def measure(run: Run) -> list[Row]:
    """Rows of FIGURES: the processes that were killed, each in an outer round of its own; and the accuracy,
    if both jobs have then ended with the server's model.
    """
    with federation(run) as hosts:
        killed, found = _killed(run, hosts)
    what = f"killed in the middle of an outer round, one after the other: {', '.join(killed)}"
    return [
        summary("flower_kills", what, [float(len(killed))], "processes", emulation=EMULATION),
        summary("flower_kills_accuracy", "accuracy after these kills", found, "", emulation=EMULATION),
    ]


class _Services:
    """The programs of a federation, which are started again when they have ended."""

    def __init__(self, hosts: Federation, stack: ExitStack) -> None:
        self._hosts, self._end = hosts, threading.Event()
        port = free_port(LOOPBACK)
        self.address = f"{LOOPBACK}:{port}"
        self.running: dict[str, psutil.Process] = {}
        self._keep(stack, "superlink", hosts.flower.superlink(port), port)
        for number, fleet in enumerate(hosts.fleets):
            job = str(hosts.flower.app / project.JOB)
            node = {"fleet": str(fleet.directory), "job": job}
            self._keep(stack, f"node-{number}", hosts.flower.node(self.address, node, None))
        stack.callback(self._end.set)

    def _keep(self, stack: ExitStack, name: str, argv: list[str], port: int = 0) -> None:
        begun = threading.Event()

        def keep() -> None:
            while not self._end.is_set():
                with self._hosts.flower.started(name, argv) as process:
                    self.running[name] = psutil.Process(process.pid)
                    if port:
                        wait_for_port(port, process)
                    begun.set()
                    while process.poll() is None and not self._end.wait(0.2):
                        pass

        thread = threading.Thread(target=keep)
        thread.start()
        stack.callback(thread.join, 60)
        begun.wait(120)


def _killed(run: Run, hosts: Federation) -> tuple[list[str], list[float]]:
    """Return the victims, and the accuracy, or nothing if a job has not ended with the server's model."""
    flower, killed, codes = hosts.flower, list[str](), list[int]()
    rounds = len(VICTIMS) + 2
    with ExitStack() as stack:
        services = _Services(hosts, stack)
        flower.connect(services.address, None)
        killer = threading.Thread(target=_kill, args=(run, hosts, services, killed))
        killer.start()
        stack.callback(killer.join, 60)
        config: dict[str, str | int | float] = {"hosts": 2, "rounds": rounds, "timeout": 180.0}
        config["state"], began = str(flower.folder), time.monotonic()
        while len(codes) < TRIES and (not codes or codes[-1]):
            codes.append(flower.run(config))
        run.say(f"runs ended with {codes} after {time.monotonic() - began:.0f} s")
    model = flower.folder / "model.safetensors"
    whole = codes[-1] == 0 and all(_is_right(each, model) for each in hosts.fleets)
    return killed, [accuracy(noted(flower))] if whole else []


def _is_right(fleet: Emulation, path: Path) -> bool:
    """Return whether all jobs of a fleet have ended, the last with the model of ``path``."""
    with fleet.client() as client:
        jobs = client.jobs()
    right, own = load_file(path), load_file(jobs[-1].model)
    same = all(np.array_equal(right[name].reshape(own[name].shape), own[name]) for name in own)
    return same and all(job.state == "done" for job in jobs)


def _kill(run: Run, hosts: Federation, services: _Services, killed: list[str]) -> None:
    """Kill a process in the middle of each outer round but the first, while the first fleet trains."""
    fleet = hosts.fleets[0]
    for number, victim in enumerate(VICTIMS, 1):
        eventually(lambda n=number: _done(hosts) >= n, f"outer round {number}", 600, 0.2)  # type: ignore[misc]
        before = _rounds(fleet)
        eventually(lambda n=before: _rounds(fleet) > n, "a round of the next one", 600, 0.05)  # type: ignore[misc]
        process = _process(fleet, services, victim)
        process.kill()
        killed.append(victim)
        run.say(f"killed in round {_rounds(fleet)}: {victim}")


def _done(hosts: Federation) -> int:
    """Return the number of outer rounds that are done."""
    return max((line["round"] for line in noted(hosts.flower) if "replies" in line), default=0)


def _rounds(fleet: Emulation) -> int:
    with contextlib.suppress(MillpondError), fleet.client() as client:
        jobs = client.jobs()
        return jobs[-1].round if jobs else 0
    return -1  # the daemon is just coming back


def _process(fleet: Emulation, services: _Services, victim: str) -> psutil.Process:
    """Return the process that is meant, as soon as there is one."""
    places: dict[str, Callable[[], psutil.Process | None]] = {
        "daemon": fleet.daemon,
        "node": lambda: services.running["node-0"],
        "superlink": lambda: services.running["superlink"],
        "client-app": lambda: _child(services.running["node-0"], "flwr-clientapp"),
        "server-app": lambda: _child(services.running["superlink"], "flwr-serverapp"),
    }
    return eventually(places[victim], victim, 120, 0.05)


def _child(parent: psutil.Process, program: str) -> psutil.Process | None:
    for each in parent.children(recursive=True):
        if any(program in word for word in each.cmdline()[:3]):
            return each
    return None
