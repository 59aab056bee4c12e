# SPDX-License-Identifier: Apache-2.0
"""The agent's relay to a real worker process: requests that are served, and those that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.base.errors import ConnectionLost, Refused
from millpond.train.protocol import Fetch, Ready, Update, Work
from millpond.wire.messages import Ok

from ..waiting import eventually
from .worker_rig import CANARY, GOOD, RAISE, SIZE, Agent, agent, module_agent, sent, soon

__all__ = ["agent", "module_agent"]


def test_a_state_goes_in_and_an_update_comes_out_counted(agent: Agent) -> None:
    assert agent.ready == Ready((50,), (0,), 2)
    before = sent(agent)
    with agent.host() as host:
        update, values = agent.step(host)
        assert agent.fetch(host, 200) == values[:800]  # again
    assert (update.exchange, update.samples) == (1, 10)
    loss = pytest.approx(10 * np.log(8), rel=1e-4)  # of weights that are all 0
    assert (update.metrics, update.weight) == ({"loss": (loss, 10)}, 10)
    assert np.abs(np.frombuffer(values, np.float32)).max() == update.largest > 0
    assert sent(agent) - before == 4 * SIZE + 800
    assert isinstance(agent.error, ConnectionLost)


def test_a_model_that_raises_tells_where_and_nothing_more(agent: Agent) -> None:
    before = sent(agent)
    with agent.host() as host:
        with pytest.raises(
            Refused, match=r"ValueError at net.py:\d+ in forward; its message stays"
        ) as caught:
            agent.step(host, RAISE)
        assert caught.value.code == "model"
        with pytest.raises(Refused, match="samples 49 to 59 are wanted; there are 50") as caught:
            host.send(agent.work(start=49), soon(), bytes(4 * SIZE))
            host.expect(Update, soon())
        assert caught.value.code == "data"
        assert sent(agent) == before
        agent.step(host)
    eventually(lambda: CANARY.decode() in agent.log.read_text(), "the output has been copied to the log")


def test_a_request_that_the_policy_forbids_is_refused_and_the_worker_lives_on(agent: Agent) -> None:
    with agent.host() as host:
        host.send(agent.work(count=1), soon(), bytes(4 * SIZE))
        with pytest.raises(Refused, match=r"policy\.least_samples: samples 0 to 1 of ") as caught:
            host.expect(Update, soon())
        assert caught.value.code == "policy"
        agent.step(host)


@pytest.mark.parametrize("stop", [-1, 0, SIZE + 1])
def test_values_that_there_are_not_end_the_connection(agent: Agent, stop: int) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(stop), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert f"wants {stop} values of an update" in str(agent.error)


def test_before_there_is_an_update_none_can_be_fetched(agent: Agent) -> None:
    with agent.host() as host:
        with pytest.raises(Refused):
            agent.step(host, RAISE)
        host.send(Fetch(SIZE), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())


@pytest.mark.parametrize("size", [0, 4, -4])
def test_a_state_of_another_size_ends_the_connection_alone(agent: Agent, size: int) -> None:
    whole = 4 * SIZE
    with agent.host() as host, pytest.raises(ConnectionLost):  # by either: the other closes at the head
        host.send(agent.work(), soon(), bytes(size and whole + size))
        host.receive(soon())
    assert str(agent.error) == f"the host sent {size and whole + size} bytes of state, not {whole}"
    with agent.host() as host:
        agent.step(host)


def test_a_message_that_has_no_place_there_ends_the_connection(agent: Agent) -> None:
    with agent.host() as host:
        host.send(Ok(), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert str(agent.error) == "'ok' has no place on a bulk connection"


def test_a_payload_behind_a_request_that_has_none_ends_the_connection(agent: Agent) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(8), soon(), bytes(4))
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert str(agent.error) == "'fetch' has no place on a bulk connection"


def test_samples_that_are_made_up_need_no_private_ones(agent: Agent) -> None:
    """Only their time and memory leave, so what the policy says of private samples is not asked."""
    with agent.host() as host:
        host.send(Work(0, GOOD, 0, (), synthetic=1), soon(), bytes(4 * SIZE))
        update = host.expect(Update, soon())
        assert (update.samples, update.metrics, update.norm) == (1, {"loss": (0.0, 1.0)}, 0.0)
        assert update.seconds > 0 and update.peak > 0
        host.send(Fetch(8), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert "was not answered" in str(agent.error)
