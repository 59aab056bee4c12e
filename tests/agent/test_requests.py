# SPDX-License-Identifier: Apache-2.0
"""Requests of a host to an agent: one is added in one place."""

from __future__ import annotations

import socket
import threading

from millpond.agent.control import AgentService, answers
from millpond.base.deadline import Deadline
from millpond.wire.channel import Channel
from millpond.wire.messages import Message, message


@message("test.greet")
class Greet(Message):
    """Greet somebody; answered by Greeting."""

    name: str


@message("test.greeting")
class Greeting(Message):
    """What is said."""

    text: str


def test_a_message_is_its_declaration_and_its_handler() -> None:
    @answers(Greet)
    def greet(_service: AgentService, request: Greet, _host: Channel) -> Message:
        return Greeting(f"hello {request.name}")

    near, far = socket.socketpair()
    with Channel(far, "an agent") as host, Channel(near, "the host") as agent:
        serving = threading.Thread(target=object.__new__(AgentService).serve, args=(agent,))
        serving.start()
        assert host.call(Greet("csd0"), Greeting, Deadline.after(20)).text == "hello csd0"
        host.shut_down()
        serving.join(20)
