# SPDX-License-Identifier: Apache-2.0
"""Workers as forks of a process that has loaded torch."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import PrepareWorker, Ready
from millpond.train.state.layout import Tensor
from millpond.wire.channel import Channel

from ..job_files import written

WORK = WorkSpec("draws", ModelSpec("draws:build", ("draws.py",)))
DRAWS = """
import os
import random
import numpy as np
import torch
from torch import nn

print("drawn", random.random(), np.random.random(), flush=True)
print("seen", hash("word"), os.environ.get("HF_HUB_OFFLINE"), flush=True)

def build():
    made = torch.compile(nn.Linear(4, 2))
    print("compiled", *made.state_dict(), flush=True)
    return made
"""


@contextlib.contextmanager
def worker(zygote: Zygote, log: Path) -> Iterator[tuple[Child, Channel]]:
    ours, theirs = socket.socketpair()
    with Channel(ours, "the worker") as channel:
        with theirs, log.open("wb") as output:
            shared = memory.make("memory")
            descriptors = [theirs.fileno(), shared, shared]
            code = written({"draws.py": DRAWS}, log.with_suffix(".code"))
            options = ["3", "--shared", "4", "5", "--code", str(code)]
            child = zygote.start(Sandbox(), options, descriptors, output.fileno())
            os.close(shared)
        try:
            yield child, channel
        finally:
            end(child)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_workers_have_torch_before_they_prepare(zygote: Zygote, tmp_path: Path) -> None:
    loader = zygote.pid
    assert loader and [int(path.name) for path in Path(f"/proc/{loader}/task").iterdir()] == [loader]
    for number in range(2):
        with worker(zygote, tmp_path / f"{number}.log") as (child, _):
            assert (zygote.pid, parent(child.pid)) == (loader, loader)
            lines = [line.split() for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()]
            assert any(line[-1].endswith("/libtorch_cpu.so") for line in lines)
            assert [line for line in lines if line[1][1] == "w" and line[1][3] == "s"] == []


def printed(zygote: Zygote, log: Path, what: str) -> list[str]:
    """Return what a job's code prints in a worker of its own."""
    with worker(zygote, log) as (child, channel):
        with contextlib.suppress(Refused):  # its memory has no size; the code was run before
            request = PrepareWorker(WORK, "csd0", (), {}, (Tensor("w", (2,), "int8"),))
            channel.call(request, Ready, Deadline.after(60))
        channel.close()
        assert child.wait(30) == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    return next(line[1:] for line in lines if line[:1] == [what])


def test_workers_draw_other_numbers_until_they_are_seeded(zygote: Zygote, tmp_path: Path) -> None:
    numbers = [value for number in range(2) for value in printed(zygote, tmp_path / f"{number}.log", "drawn")]
    assert len(set(numbers)) == 4


def test_hashes_are_those_of_all_workers_and_no_library_looks_for_a_hub(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A feature by ``hash(word)`` is the same one on the host and on every device, after a restart, too."""
    command = [sys.executable, "-c", "print(hash('word'))"]
    plain = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert printed(zygote, tmp_path / "log", "seen") == [plain.stdout.strip(), "1"]


def test_a_compiled_model_is_the_model_itself(zygote: Zygote, tmp_path: Path) -> None:
    """Workers have no compiler, and the names of its tensors would be others than those of its file."""
    assert printed(zygote, tmp_path / "log", "compiled") == ["weight", "bias"]


PREPARES = """
    import os
    import sys
    from pathlib import Path
    import millpond.train.worker.preloaded
    from millpond.linux import memory
    from millpond.train.worker import roles, user_code
    from millpond.train.job.spec import ModelSpec, WorkSpec
    from millpond.train.protocol import Folder, PrepareWorker
    from millpond.train.state import flat, layout
    before = set(sys.modules)
    work = WorkSpec("digits", ModelSpec("millpond.train.zoo.models:digits_cnn"))
    folder, shared = Path(sys.argv[1]), [memory.make(name) for name in ("states", "values")]
    tensors = flat.describe(user_code.build(work, folder)[1])
    for descriptor in shared:
        os.truncate(descriptor, 4 * layout.size(tensors))
    prepare = PrepareWorker(work, "csd0", (Folder("private", "csd0"),), {}, tensors)
    roles.make(prepare, folder, folder, roles.Descriptors(*shared)).ready()
    new = {name for name in set(sys.modules) - before if not name.startswith("millpond.train.zoo")}
    print(*{name.partition(".")[0] for name in new})
"""


def test_what_is_loaded_ahead_is_all_that_a_worker_loads(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    np.save(tmp_path / "private" / "images.npy", np.zeros((4, 8, 8), np.uint8))
    np.save(tmp_path / "private" / "labels.npy", np.arange(4))
    command = [sys.executable, "-c", textwrap.dedent(PREPARES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
