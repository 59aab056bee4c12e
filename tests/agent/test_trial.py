# SPDX-License-Identifier: Apache-2.0
"""A new version is kept only if a job could run: the volume holds what is written, and a worker trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.trial import check
from millpond.base.errors import LocalError


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    """A device whose volume shows its flash, as it should."""
    for part in ("public", "private"):
        (tmp_path / "flash" / part).mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "volume").symlink_to("flash")
    places = {"flash": str(tmp_path / "flash"), "volume": str(tmp_path / "volume"), "state": str(tmp_path)}
    return AgentConfig("csd0", LinkConfig("10.77.0.2/30", socket="none"), **places)


def left(config: AgentConfig) -> list[str]:
    return [path.name for path in Path(config.flash).rglob("*") if path.is_file()]


def test_a_device_on_which_a_worker_trains_passes(config: AgentConfig) -> None:
    check.check_jobs_can_run(config)
    assert left(config) == []


def test_a_worker_that_cannot_import_what_it_needs_is_a_fault(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "STEP", "millpond.agent.trial.there_is_none")
    with pytest.raises(LocalError, match=r"the worker: ModuleNotFoundError: .*there_is_none"):
        check.check_jobs_can_run(config)
    assert left(config) == []


def test_a_volume_that_is_not_the_flash_is_a_fault(config: AgentConfig, tmp_path: Path) -> None:
    (tmp_path / "volume").unlink()
    for part in ("public", "private"):
        (tmp_path / "volume" / part).mkdir(parents=True)
    with pytest.raises(OSError, match="No such file"):
        check.check_jobs_can_run(config)


def test_the_last_line_says_what_does_not_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--config", str(tmp_path / "none.toml")]) == 1
    assert "none.toml" in capsys.readouterr().err.splitlines()[-1]
