# SPDX-License-Identifier: Apache-2.0
"""Updates that an agent encodes: their heads, bytes and feedback, and the search of what they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millpond.agent.gate import CanaryError, Pattern, ledger
from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import Encoding
from millpond.aggregate.encoding.update_encoder import UpdateEncoder
from millpond.base.errors import ConnectionLost
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import Fetch, Part, Update, Work
from millpond.wire.channel import Channel

from .worker_rig import CANARY, GOOD, LEAK, SIZE, Agent, agent_in, sent, soon

INT8 = Encoding("int8")
NAMES = (INT8, Encoding("bfloat16"), Encoding("top-k", 0.1))


@pytest.fixture(scope="module", params=NAMES, ids=lambda encoding: encoding.name)
def agent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote
) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("agent")
    with agent_in(folder, zygote, Pattern("c", CANARY, True), encoding=request.param) as made:
        yield made


def train(agent: Agent, host: Channel, mode: int = GOOD, count: int = 20) -> Update:
    host.send(agent.work(mode, count=count), soon(), bytes(4 * SIZE))
    return host.expect(Update, soon())


def fetched(host: Channel, encoding: Encoding) -> bytes:
    host.send(Fetch(SIZE), soon())
    assert host.expect(Part, soon(), payload=encoding.size(SIZE)).start == 0
    return bytes(host.receive_payload(encoding.size(SIZE), soon()))


def encoding_of(agent: Agent) -> Encoding:
    return agent.worker._request.work.encoding


def test_what_leaves_is_the_encoding_with_feedback_of_what_was_sent_before(agent: Agent) -> None:
    encoding, values = encoding_of(agent), agent.worker._values.data
    expected, before = UpdateEncoder(encoding, SIZE), sent(agent)
    with agent.host() as host:
        for number in range(4):
            update = train(agent, host, count=10 + 2 * number)
            if number == 2:  # the host drops it: an update that is late
                continue
            bounds = expected.encode(values, memoryview)
            assert (update.encoding, update.largest, update.norm) == (encoding.name, *bounds)
            data = fetched(host, encoding)
            assert data == fetched(host, encoding) == expected.data(0, SIZE)
            expected.sent(SIZE)
            found = np.empty(SIZE, np.float32)
            assert codec(encoding).decode(encoding, bytearray(data), found.data.cast("B"))
            assert np.abs(found).max() == update.largest > 0
    assert sent(agent) - before == 6 * encoding.size(SIZE) < 6 * 4 * SIZE / 1.9


def test_made_up_samples_have_no_part_in_it(agent: Agent) -> None:
    with agent.host() as host:
        train(agent, host)
        host.send(Work(0, GOOD, 0, (), synthetic=1), soon(), bytes(4 * SIZE))
        update = host.expect(Update, soon())
        assert (update.encoding, update.largest, update.norm) == ("float32", 0.0, 0.0)


def test_only_whole_blocks_can_be_fetched(agent: Agent) -> None:
    with agent.host() as host:
        train(agent, host)
        host.send(Fetch(200), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert "wants 200 values of an update" in str(agent.error)


def test_forbidden_bytes_among_the_float32_values_are_found(agent: Agent) -> None:
    """They are not among the bytes that would leave; the head does not leave either."""
    before, seen = sent(agent), ledger(agent.gate, [])[1]["c"]
    with agent.host() as host, pytest.raises(ConnectionLost):
        train(agent, host, LEAK)
    assert isinstance(agent.error, CanaryError)
    assert sent(agent) == before
    assert ledger(agent.gate, [])[1]["c"] == seen + 1


def test_where_nothing_is_searched_the_same_bytes_leave(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote, encoding=INT8) as agent, agent.host() as host:
        assert not agent.outlet.searches
        train(agent, host)
        expected = UpdateEncoder(INT8, SIZE)
        expected.encode(agent.worker._values.data, memoryview)
        assert fetched(host, INT8) == expected.data(0, SIZE)
