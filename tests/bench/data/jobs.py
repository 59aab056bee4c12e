# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): runs training jobs of two workers, ours and peers', and watches their memory and CPU."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.data.service import service_of
from bench.experiment import Unmeasured
from bench.installed import installed

Kind = Literal["stream", "memory", "ray"]
RAY = "ray[train,data]==2.60.0"
RANKS = 2
_JOB = Path(__file__).with_name("training_job.py")
_BETWEEN = 0.4


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is trained: ``folder`` has the sets ``train`` and ``test``, images uint8 [N, C, H, W] and labels;
    ``model`` is ``module.factory`` of the zoo. ``steps`` is the most of an epoch; ``batch`` is that of a
    worker, ``memory`` the stream's.
    """

    folder: Path
    model: str
    arguments: dict[str, int] = field(default_factory=dict)
    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    rate: float = 0.05
    seed: int = 0
    memory: str = "64 MiB"


@dataclass(frozen=True, slots=True)
class Moment:
    """What processes use: bytes of the job's, shared ones once, and of the service; the CPU seconds that the
    service has used so far.
    """

    at: float
    job: int
    service: int
    cpu: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's seconds, start included, and those of its loop; accuracy in per cent and loss of the test set;
    and moments of it, if it was watched, at seconds since its start, those of the loop marked by ``loop``.
    """

    seconds: float
    loop_seconds: float
    accuracy: float
    loss: float
    loop: tuple[float, float]
    moments: tuple[Moment, ...] = ()


def interpreter_of(kind: Kind) -> str:
    """Return the interpreter for a kind of job; "" for Ray's where that does not install."""
    if kind != "ray":
        return sys.executable
    with contextlib.suppress(Unmeasured):
        return installed_ray()
    return ""


def installed_ray(figures: Iterable[str] = ()) -> str:
    """Return Ray's interpreter. Raises Unmeasured, for all of ``figures``."""
    return installed("ray", "torch==2.13.0", RAY, figures=figures)


def run_job(kind: Kind, spec: JobSpec, python: str = sys.executable, *, watched: bool = False) -> JobResult:
    """Train. Raises RuntimeError if a worker has failed."""
    began = time.monotonic()
    with contextlib.ExitStack() as undo:
        address, service = undo.enter_context(service_of(spec.folder)) if kind == "stream" else ("", 0)
        given: dict[str, Any] = {name: getattr(spec, name) for name in spec.__slots__}
        text = json.dumps(given | {"kind": kind, "address": address, "folder": str(spec.folder)})
        workers = [undo.enter_context(each) for each in _started(kind, [python, str(_JOB), text])]
        watch = undo.enter_context(_Watch([each.pid for each in workers], service)) if watched else None
        outputs = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError(f"a worker of the job '{kind}' has failed")
    ended = time.monotonic()
    found = json.loads(outputs[0].splitlines()[-1])
    moments = tuple(watch.moments) if watch else ()
    since = [Moment(each.at - began, each.job, each.service, each.cpu) for each in moments]
    loop = (found["began"] - began, found["ended"] - began)
    accuracy, loss = found["accuracy"], found["loss"]
    return JobResult(ended - began, loop[1] - loop[0], accuracy, loss, loop, tuple(since))


def _started(kind: Kind, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    if kind == "ray":
        environment = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
        }  # 15: others go first
        yield subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for rank in range(RANKS):
        yield subprocess.Popen(argv, stdout=subprocess.PIPE, env=common | {"RANK": str(rank)})


class _Watch:
    """Notes what the processes below ``workers``, and the ``service``, use, until the end of the block."""

    def __init__(self, workers: list[int], service: int) -> None:
        self._workers, self._service = workers, service
        self.moments: list[Moment] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_BETWEEN):
            job = sum(_bytes(each) for pid in self._workers for each in _tree(pid))
            cpu = psutil.Process(self._service).cpu_times() if self._service else None
            service = _bytes(psutil.Process(self._service)) if self._service else 0
            self.moments.append(Moment(time.monotonic(), job, service, cpu.user + cpu.system if cpu else 0.0))


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def _bytes(process: psutil.Process) -> int:
    """Return a process's part of the memory that it has, shared pages divided among those that share them."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
