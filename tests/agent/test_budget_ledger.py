# SPDX-License-Identifier: Apache-2.0
"""The budget of private folders: what is spent stays spent."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.job_budget import JobBudget
from millpond.agent.policy.settings import Policy
from millpond.base.errors import Refused
from millpond.linux import files
from millpond.privacy.spec import PrivacySpec
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import PrepareWorker

FOLDER = "private/digits"


def test_costs_last(tmp_path: Path) -> None:
    BudgetLedger(tmp_path / "b").spend([FOLDER], 0.25, 1.0)
    ledger = BudgetLedger(tmp_path / "b")
    ledger.spend([FOLDER], 0.5, 1.0)
    assert 0.75 <= ledger.spent(FOLDER) < 0.7500001
    with pytest.raises(Refused, match=r"25\.0% of its privacy budget left"):
        ledger.spend([FOLDER], 0.3, 1.0)
    assert 0.75 <= BudgetLedger(tmp_path / "b").spent(FOLDER) < 0.7500001
    with pytest.raises(Refused, match="is spent"):
        ledger.check([FOLDER], 0.0, 0.5)  # its owner has made it smaller


def test_a_run_costs_no_more_than_its_whole(tmp_path: Path) -> None:
    ledger = BudgetLedger(tmp_path / "b")
    ledger.spend([FOLDER], 0.25, 1.0, "run", whole=0.4)
    with pytest.raises(Refused, match="has spent its epsilon"):
        ledger.spend([FOLDER], 0.25, 1.0, "run", whole=0.4)
    assert ledger.spent_by("run") == 0.25 and ledger.spent(FOLDER) < 0.2500001


def test_a_job_without_a_run_has_no_rounds_with_noise(tmp_path: Path) -> None:
    work = WorkSpec("job", ModelSpec("net:Net"), privacy=PrivacySpec(1.0), total=4)
    budget = JobBudget(Policy(), BudgetLedger(tmp_path / "b"), PrepareWorker(work, "csd0", (), {}, ()))
    with pytest.raises(Refused, match="names no run"):
        budget.check([FOLDER])


def test_a_folder_in_a_folder_is_the_same_samples(tmp_path: Path) -> None:
    ledger = BudgetLedger(tmp_path / "b")
    ledger.spend(["private/a/b"], 0.5, 1.0)
    ledger.spend(["private/a"], 0.25, 1.0)
    assert ledger.spent("private/a/b/c") >= 0.75
    assert ledger.spent("private") >= 0.75
    assert 0.25 <= ledger.spent("private/a/c") < 0.3
    assert ledger.spent("private/ab") == 0


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"version": 2}', b'{"version": 1, "spent": {"a": -1.0}, "runs": {}}']
)
def test_a_ledger_that_is_broken_is_all_spent(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "b").write_bytes(data)
    ledger = BudgetLedger(tmp_path / "b")
    with pytest.raises(Refused, match="cannot be read"):
        ledger.spend([FOLDER], 0.1, 1.0)
    assert (tmp_path / "b").read_bytes() == data


def test_nothing_is_told_if_it_cannot_be_written(tmp_path: Path) -> None:
    ledger = BudgetLedger(tmp_path / "none" / "b")
    with pytest.raises(Refused, match="cannot be written: No such file"):
        ledger.spend([FOLDER], 0.1, 1.0)


class _Killed(BaseException):
    """The end of the process at one of its calls to the system."""


@pytest.mark.parametrize("moment", range(8))
def test_a_kill_at_each_call_gives_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """After a kill before each call to the system, what was paid before is there, and what has left was
    paid.
    """
    file = tmp_path / "b"
    BudgetLedger(file).spend([FOLDER], 0.25, 1.0)
    left = moment

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def done(*values: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Killed
            return call(*values, **named)

        return done

    for module, name in ((os, "fsync"), (os, "open"), (Path, "replace"), (Path, "unlink"), (os, "fdopen")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    answered = False
    try:
        BudgetLedger(file).spend([FOLDER], 0.5, 1.0)
        answered = True
    except _Killed:
        pass
    monkeypatch.undo()
    spent = BudgetLedger(file).spent(FOLDER)
    assert spent >= (0.75 if answered else 0.25)
    assert set(json.loads(file.read_bytes())) == {"version", "spent", "runs"}
    assert answered == (moment >= 7)


def test_a_failed_write_counts_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file of a failed write has reached the flash is not known."""
    ledger = BudgetLedger(tmp_path / "b")

    def full(_folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync_folder", full)
    with pytest.raises(Refused, match="No space left"):
        ledger.spend([FOLDER], 0.6, 1.0)
    monkeypatch.undo()
    with pytest.raises(Refused, match="left, less than this costs"):
        ledger.spend([FOLDER], 0.6, 1.0)


SPENDING = """
import sys
from pathlib import Path
from millpond.agent.policy.budget_ledger import BudgetLedger
ledger = BudgetLedger(Path(sys.argv[1]))
while True:
    ledger.spend(["private/digits"], 0.5, 1e9)
    print(end=".", flush=True)
"""


def test_a_killed_process_has_paid_for_all_that_left(tmp_path: Path) -> None:
    left = 0
    for _ in range(3):
        command = [sys.executable, "-c", SPENDING, str(tmp_path / "b")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            left += len(process.stdout.read(20))
            process.kill()
            left += len(process.stdout.read())
        assert 0.5 * left <= BudgetLedger(tmp_path / "b").spent(FOLDER) <= 0.5 * (left + 3) + 1e-6
