# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.agent.trial.check --config FILE``: tests, beside the agent that runs, what a
job needs of this device: the volume, and a worker that trains. A new version of the software is kept only if
that works.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from millpond.agent.config import AgentConfig, read
from millpond.agent.job_worker import bare_sandbox
from millpond.base.errors import LocalError, MillpondError
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.linux.confinement.sandbox import Bind
from millpond.linux.zygote.client import Zygote
from millpond.train.worker.start import workers_zygote

STEP = "millpond.agent.trial.step"
_NAME = ".millpond-trial"
_SEEN = Path("/trial")
_BYTES = 1 << 20
_STEP_SECONDS = 300.0


@contextlib.contextmanager
def written(folder: Path, flash: Path) -> Iterator[Path]:
    """Write a file below the volume's ``folder``, see that it is whole there and on the ``flash``, and remove
    it in the end. Raises LocalError, OSError.
    """
    data = secrets.token_bytes(_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_NAME) as file:
        path = Path(file.name)
        path.chmod(0o644)  # for the worker's uid
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        if not path.read_bytes() == (flash / path.name).read_bytes() == data:
            raise LocalError(f"the volume: {folder} does not hold what was written to it")
        yield path


def train(config: AgentConfig, zygote: Zygote, sample: Path) -> None:
    """Have a worker in its sandbox read the file ``sample`` and train. Raises LocalError, OSError."""
    with tempfile.TemporaryFile() as output:
        sandbox = bare_sandbox(config, Bind(sample, _SEEN))
        worker = zygote.start(sandbox, [str(_SEEN)], (), output.fileno(), entry=STEP)
        try:
            code = worker.wait(_STEP_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait(_STEP_SECONDS)
            raise LocalError(f"the worker: no step of training in {_STEP_SECONDS:.0f} s") from None
        if code:
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
            raise LocalError(f"the worker: {said[-1] if said else f'exit code {code}'}")


def check_jobs_can_run(config: AgentConfig) -> None:
    """Test the volume, both parts, and a worker. Raises LocalError, OSError."""
    volume, flash = Path(config.volume), Path(config.flash)
    with written(volume / PRIVATE, flash / PRIVATE):
        pass
    with (
        written(volume / PUBLIC, flash / PUBLIC) as sample,
        contextlib.closing(workers_zygote(0.0)) as zygote,
    ):
        train(config, zygote, sample)


def main(argv: list[str] | None = None) -> int:
    """Run the test. Exit codes: 0 all works, 1 something does not, which the last line of the output says."""
    parser = argparse.ArgumentParser(prog="millpond.agent.trial.check", description="Test what jobs need.")
    parser.add_argument("--config", type=Path, default=Path("/etc/millpond/agent.toml"), metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        check_jobs_can_run(read(arguments.config))
    except OSError as error:
        print(f"{error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr, flush=True)
        return 1
    except MillpondError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
