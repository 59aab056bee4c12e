# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): our server of rounds beside Flower's and the paper's, and with large vectors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.aggregate import rounds
from bench.aggregate.rounds import VALUES, Server, serve
from bench.compiled import shared_library
from bench.experiment import Run
from bench.installed import installed
from bench.rows import Row, summary

FLOWER_TITLE = "beside Flower's server"
SPLIT_TITLE = "ranges beside threads that share one vector"
STAGED_TITLE = "ranges of all vectors, or one whole vector after the other"
GIGABYTE_TITLE = "a vector of a gigabyte"
_FOLDER = Path(__file__).parent
_FLOWER = "flwr==1.41.0"
_GIGABYTE = 268_435_456
_THREADS = (1, 2, 3, 4)
_LATE = 0.3  # seconds


def measure_flower(run: Run) -> list[Row]:
    """Rows ``flower_wall``, ``flower_cpu`` and ``flower_memory``: Flower's figure over ours."""
    names = {
        "flower_wall": "seconds",
        "flower_cpu": "server's processor time",
        "flower_memory": "server's memory",
    }
    python = installed("flower", _FLOWER, figures=names)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(run.repeats):
        ours, theirs = serve("millpond", 10, VALUES), _flower_rounds(python)
        ratios["flower_wall"].append(median(theirs.seconds) / median(ours.seconds))
        ratios["flower_cpu"].append(median(theirs.cpu) / median(ours.cpu))
        ratios["flower_memory"].append((theirs.peak - theirs.alone) / (ours.peak - ours.alone))
        run.say(f"Flower: {median(theirs.seconds):.2f} s, {median(theirs.cpu):.2f} s CPU a round")
    return [
        summary(
            name,
            f"{what} of a round of 10 clients x {VALUES}, Flower's over ours",
            ratios[name],
            "x",
            peer=f"{_FLOWER}, gRPC server",
            emulation=rounds.EMULATION,
        )
        for name, what in names.items()
    ]


def _flower_rounds(python: str, count: int = 10, size: int = VALUES) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0"}
    command = [python, str(_FOLDER / "flower_server.py"), *map(str, (port, size, count, 4))]
    with contextlib.ExitStack() as undo:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        undo.callback(server.wait)
        undo.callback(server.kill)
        assert server.stdout
        first = json.loads(server.stdout.readline())
        clients = subprocess.Popen(
            [python, str(_FOLDER / "flower_clients.py"), *map(str, (port, size, count))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        undo.callback(clients.wait)
        undo.callback(clients.kill)
        told = [json.loads(line) for line in server.stdout]
    if [each["clients"] for each in told] != 4 * [count]:
        raise RuntimeError("Flower has not heard all clients")
    return Server(
        first["alone"],
        first["alone"],
        tuple(b["at"] - a["at"] for a, b in pairwise(told)),
        tuple(b["cpu"] - a["cpu"] for a, b in pairwise(told)),
        max(each["peak"] for each in told),
    )


def measure_split(run: Run) -> list[Row]:
    """Rows ``range_split_over_locked`` and ``range_split_over_unlocked``, with the best number of threads."""
    found: dict[str, list[float]] = {"millpond": [], "locked": [], "racing": []}
    with _shared_vector_library() as library:
        os.environ["SHARED_VECTOR"] = str(library)
        for _ in range(run.repeats):
            for kind, best in found.items():
                by_threads = {n: median(serve(kind, 10, VALUES, n).seconds) for n in _THREADS}
                best.append(min(by_threads.values()))
                run.say(f"{kind}: " + ", ".join(f"{n} threads {s:.3f} s" for n, s in by_threads.items()))
    about = f"seconds of a round of 10 clients x {VALUES}, best of 1 to 4 threads"
    return [
        _over(
            found,
            "locked",
            "range_split_over_locked",
            f"{about}: atomic additions over ours",
        ),
        _over(found, "racing", "range_split_over_unlocked", f"{about}: racing ones over ours"),
    ]


def _over(found: dict[str, list[float]], kind: str, figure: str, what: str) -> Row:
    ratios = [peer / ours for peer, ours in zip(found[kind], found["millpond"], strict=True)]
    return summary(figure, what, ratios, "x", peer="shared_vector.c", emulation=rounds.EMULATION)


@contextlib.contextmanager
def _shared_vector_library() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        yield shared_library(_FOLDER / "shared_vector.c", Path(folder))


def measure_staged(run: Run) -> list[Row]:
    """Rows ``staged_wall``, ``staged_late`` and ``staged_models``: the other design over ours."""
    ratios: dict[str, list[float]] = {"staged_wall": [], "staged_late": [], "staged_models": []}
    for _ in range(run.repeats):
        for figure, late in (("staged_wall", 0.0), ("staged_late", _LATE)):
            ours, other = (serve(kind, 10, VALUES, late=late) for kind in ("millpond", "staged"))
            ratios[figure].append(median(other.seconds) / median(ours.seconds))
            seconds = f"{median(ours.seconds):.3f} s, staged {median(other.seconds):.3f} s"
            run.say(f"one answer {late:g} s late: {seconds}")
        ratios["staged_models"].append((other.peak - other.alone) / (ours.peak - ours.alone))
    about = f"a round of 10 clients x {VALUES}: whole vectors, staged, over ranges of all"
    what = {
        "staged_wall": f"seconds of {about}",
        "staged_late": f"seconds of {about}, one answer {_LATE:g} s late",
        "staged_models": f"server's memory of {about}",
    }
    return [
        summary(name, text, ratios[name], "x", peer="StagedServer", emulation=rounds.EMULATION)
        for name, text in what.items()
    ]


def measure_gigabyte(run: Run) -> list[Row]:
    """Rows ``gigabyte_models`` and ``gigabyte_over_link``."""
    size = _GIGABYTE >> 4 if run.quick else _GIGABYTE
    models, ratios = [], []
    for _ in range(min(run.repeats, 3)):
        ours, bare = (serve(kind, 4, size, 0, 3) for kind in ("millpond", "bare"))
        models.append((ours.peak - ours.alone) / (4 * size))
        ratios.append(median(ours.seconds) / median(bare.seconds))
        seconds = f"{median(ours.seconds):.2f} s, bare sockets {median(bare.seconds):.2f} s"
        run.say(f"{4 * size / 1e9:.2f} GB: {seconds}")
    about = f"4 clients x {4 * size / 1e9:.2f} GB, both ways"
    peer = "a select server that adds nothing, over the same sockets"
    return [
        summary(
            "gigabyte_models",
            f"server's peak memory above alone, {about}",
            models,
            "models",
            emulation=rounds.EMULATION,
        ),
        summary(
            "gigabyte_over_link",
            f"seconds of a round, {about}",
            ratios,
            "x",
            peer=peer,
            emulation=rounds.EMULATION,
        ),
    ]
