# SPDX-License-Identifier: Apache-2.0
"""The end of a job's worker, by hanging or dying, and the folder of states that stays after it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millpond.agent import job_worker
from millpond.agent.job_worker import HostLeft
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import Update

from .worker_rig import DIE, HANG, SIZE, Agent, agent, agent_in, module_agent, soon

__all__ = ["agent", "module_agent"]


@pytest.mark.expected_log("job steps: the worker process hangs")
def test_a_worker_that_hangs_is_told_and_a_host_that_leaves_is_not_waited_for(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with monkeypatch.context() as patient, agent.host() as host:
            patient.setattr(job_worker, "HANG_SECONDS", 60.0)  # the host leaves before
            host.send(agent.work(HANG), soon(), bytes(4 * SIZE))
            time.sleep(0.2)
        assert isinstance(agent.error, HostLeft)
        with agent.host() as host:
            with pytest.raises(Refused, match="hangs: it neither computes nor reads") as caught:
                agent.step(host)
            assert caught.value.code == "worker"
        assert isinstance(agent.error, ConnectionLost)


def test_a_worker_that_dies_in_a_step_is_told(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent, agent.host() as host:
        with pytest.raises(Refused, match="the worker process died") as caught:
            agent.step(host, DIE)
        assert caught.value.code == "worker"


def test_a_task_keeps_no_more_than_the_policy_allows(agent: Agent) -> None:
    large = agent.kept / "large"
    with agent.host() as host:
        try:
            with large.open("wb") as file:
                file.truncate((1 << 30) + 1)  # a hole
            host.send(agent.work(), soon(), bytes(4 * SIZE))
            with pytest.raises(Refused) as refused:
                host.expect(Update, soon())
        finally:
            large.unlink()
        text = (
            f"policy.largest_state: the task keeps {(1 << 30) + 1} bytes"
            f" on the device; at most {1 << 30} are allowed"
        )
        assert (refused.value.code, refused.value.text) == ("policy", text)
        assert agent.step(host)[0].samples == 10


def test_the_folder_of_states_stays_while_another_worker_of_the_job_has_it(
    tmp_path: Path, zygote: Zygote
) -> None:
    """A new worker may come before the agent has ended the last one: its state would have no place."""
    agent = Agent(tmp_path, zygote)
    newer = agent.another()
    agent.worker.stop()
    assert agent.kept.is_dir()
    newer.stop()
    assert not agent.kept.exists()
    last = agent.another()
    (agent.kept / "state.safetensors").touch()
    last.stop()
    assert agent.kept.is_dir()
