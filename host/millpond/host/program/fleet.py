# SPDX-License-Identifier: Apache-2.0
"""Edge: a fleet for programs and notebooks: ``from millpond import Fleet``.

>>> fleet = Fleet("~/fleet")
>>> job = fleet.train("job.toml", set={"train.learning_rate": 0.1})
>>> for round in job:
...     print(round.round, round.scores)
>>> job.plot().savefig("curve.png")
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millpond.base.errors import LocalError
from millpond.base.text import counted
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.api.questions import COUNT_SECONDS
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.program.job import RunningJob
from millpond.host.program.questions import AskedDevices
from millpond.host.program.task_source import source_of
from millpond.host.records.questions import AnsweredQuestion
from millpond.images.boards import EMULATED
from millpond.train.job import file
from millpond.train.questions.question import AskedKind, DataQuestion, Kind


class FleetProgram:
    """The fleet in a directory, whose daemon runs; without one that of MILLPOND_FLEET or the default, as for
    commands. Raises ConfigError if it holds no fleet.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        found = path or os.environ.get("MILLPOND_FLEET") or directory.default_directory()
        self.directory = directory.read(Path(found).expanduser().resolve()).directory

    def __repr__(self) -> str:
        return f"<fleet in {self.directory}>"

    def train(
        self,
        task: object,
        *,
        data: str = "",
        test: str | Path = "",
        public: str = "",
        rounds: int | None = None,
        synchronous: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        files: Sequence[str] = (),
        wheels: Sequence[str] = (),
        name: str = "",
        seed: int = 0,
        set: Mapping[str, Any] | None = None,  # noqa: A002 - the command line's word
        **training: Any,
    ) -> RunningJob:
        """Start a job and return it at once; ``RunningJob.wait`` waits for its end.

        ``task`` is a job file, or a task: a class of a module, an object that is a variable of its module, or
        the module. Its file is what workers get, so it cannot be defined in a notebook's cell. ``set``
        changes any key of the job: ``{"train.learning_rate": 0.1, "devices": ["csd0"]}``.

        The other arguments are for a task alone, and are keys of a job file: ``data`` and ``public`` are
        folders of each device ("private/text"), ``test`` one on this machine; ``files`` (below the folder of
        the task's module) and ``wheels`` are what the task reads and imports, ``arguments`` go to its class;
        the job has so many federated ``rounds``, or the table ``synchronous`` ({} for its defaults).
        ``training`` are the keys of ``[train]``, as for ``millpond.train.fit``: batch, learning_rate, ...

        Raises ConfigError for a job that makes no sense, LocalError for a task without a file, Refused.
        """
        code = {"arguments": arguments or {}, "files": files, "wheels": wheels}
        folders = {"private": data, "public": public, "test": test}
        tables = {"federated": {"rounds": rounds} if rounds else None, "synchronous": synchronous}
        given = {"name": name, "seed": seed, "train": training}
        if not isinstance(task, (str, Path)):
            document, place = _document(task, code, folders, given | tables)
            job, found = file.of_document(document, place, set or {})
        elif any((*code.values(), *folders.values(), *given.values(), rounds, synchronous is not None)):
            raise LocalError(f"{task} is a job file: its keys are changed by set={{...}} alone")
        else:
            job, found = file.read(Path(task).expanduser(), set or {})
        with DaemonClient(self.directory) as client:
            return RunningJob(self.directory, client.submit(job, found))

    def job(self, number: int) -> RunningJob:
        """Return a job by its number. Raises Refused for an unknown one."""
        with DaemonClient(self.directory) as client:
            client.job(number)
        return RunningJob(self.directory, number)

    def jobs(self) -> list[JobInfo]:
        """Return all jobs now, oldest first."""
        with DaemonClient(self.directory) as client:
            return list(client.jobs())

    def ask(
        self,
        kind: AskedKind,
        folders: str | Sequence[str],
        *,
        column: str = "",
        low: float = 0.0,
        high: float = 1.0,
        bins: int = 10,
        shares: Sequence[float] = (0.25, 0.5, 0.75),
        rounds: int = 4,
        classes: Sequence[str] = (),
        job: int = 0,
        best: bool = False,
        labels: int = 2,
        positive: int = 1,
        devices: str = "",
        secure: bool = True,
        epsilon: float = 0.0,
        delta: float = 1e-5,
        deadline: float = COUNT_SECONDS,
    ) -> AnsweredQuestion:
        """Ask the devices, or those of a text such as "csd[0-2]", a question about ``folders`` of each, such
        as "private/digits": their "count", the "mean" of a ``column`` within ``low`` and ``high``, its
        "histogram" of so many ``bins``, or the "quantiles" of ``shares`` of its values, by ``rounds`` of
        histograms. The model of a ``job``, or of its ``best`` score, has a "confusion" of so many ``labels``,
        and an "auc" of the ``positive`` one. Without ``secure`` each device tells its own sums. With an
        ``epsilon`` above 0 they have noise: the answer is (epsilon, delta)-private. A device that needs more
        than ``deadline`` seconds to count is left out. Raises ConfigError, RemoteError if too few answer.
        """
        names = (folders,) if isinstance(folders, str) else tuple(folders)
        device_kind: Kind = "histogram" if kind == "quantiles" else kind
        question = DataQuestion(
            device_kind, column, low, high, bins, tuple(classes), labels=labels, positive=positive
        )
        with DaemonClient(self.directory) as client:
            asked = AskedDevices(client, names, devices, secure, job, best, epsilon, delta, deadline)
            return (
                asked.ask_quantiles(question, shares, rounds) if kind == "quantiles" else asked.ask(question)
            )

    def devices(self) -> list[DeviceInfo]:
        """Return the devices now."""
        with DaemonClient(self.directory) as client:
            return list(client.devices())

    def flash_folders(self, least: int = 1) -> list[Path]:
        """Return the flash folders of the emulated devices, in the order of ``fleet.toml``, for scripts that
        write example data; the daemon need not run. Raises LocalError if they are fewer than ``least``.
        """
        fleet = directory.read(self.directory)
        folders = [fleet.flash(device.name) for device in fleet.config.device if device.board == EMULATED]
        if len(folders) < least:
            has = counted(len(folders), "emulated device")
            raise LocalError(f"{self.directory} has {has}; it needs {least}")
        return folders


def _document(
    task: object, code: Mapping[str, Any], folders: Mapping[str, Any], keys: Mapping[str, Any]
) -> tuple[dict[str, Any], Path]:
    """Return the document of the job file of a task, and where that file would lie. Raises LocalError."""
    source = source_of(task)
    document = {key: value for key, value in keys.items() if value is not None}
    document["name"] = document["name"] or source.factory.replace(":", ".").rpartition(".")[2]
    document["task"] = {**code, "factory": source.factory, "files": [*source.files, *code["files"]]}
    document["data"] = {key: value for key, value in folders.items() if value}
    if test := folders["test"]:
        document["data"]["test"] = str(Path(test).expanduser().absolute())
    else:
        document["evaluate"] = {"on": ["devices"]}
    return document, source.folder / "job"
