# SPDX-License-Identifier: Apache-2.0
"""Edge: a data service on the device, as the agent sees it: streams public data sets to a launch's scripts.

Its process sees the public part of the volume, read-only, and nothing else of the device's data. It has a
user and a network namespace of its own; others reach it by a listening socket that the agent has made.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from millpond.agent.audit.sessions import AuditSession
from millpond.agent.config import AgentConfig
from millpond.agent.data_service.transformer import TransformerProcesses
from millpond.agent.gate import LedgerCounters, Pattern
from millpond.agent.policy.launch_rules import check_transforms, code_digest
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.fs.store.layout import PUBLIC
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.data_service_messages import SHORTEST_SECRET, DataServiceReady
from millpond.train.distributed.launch_messages import Launch
from millpond.wire.audit_log import Answered
from millpond.wire.channel import Channel

REPLY_SECONDS = 10.0
_BACKLOG = 128


class DataServiceProcess:
    """The process of a data service, a fork of ``zygote``, which listens at the tunnel's address. Its bytes
    are counted in ``tally`` and searched for ``patterns``; the audit log says first that the service
    ``begins``, and whose key has signed its code. If the launch has transforms, their ``code`` runs in
    another process. Raises Refused, OSError.
    """

    def __init__(
        self,
        config: AgentConfig,
        secret: str,
        patterns: Sequence[Pattern],
        tally: LedgerCounters,
        zygote: Zygote,
        begins: Callable[[str], contextlib.AbstractContextManager[AuditSession]],
        code: Launch | None = None,
    ) -> None:
        if config.privacy.encrypt == "always":
            raise Refused("", "policy", 'privacy.encrypt is "always", and streams are not encrypted yet')
        if len(secret) < SHORTEST_SECRET:
            raise Refused("", "protocol", f"a secret of {len(secret)} characters is too short")
        signer = check_transforms(config.policy, code) if code else ""
        settings = {
            "root": str(Path(config.volume, PUBLIC)),
            "secret": secret,
            "patterns": [(each.name, each.data.hex(), each.forbidden) for each in patterns],
        }
        address = config.link.address.partition("/")[0]
        with (
            contextlib.ExitStack() as failed,
            socket.create_server((address, 0), backlog=_BACKLOG) as listener,
        ):
            self.port: int = listener.getsockname()[1]
            account = failed.enter_context(begins(signer)).elsewhere()
            passed = [listener.fileno(), tally.descriptor, account.descriptor]
            self._transformer = TransformerProcesses(config, code, zygote) if code else None
            if self._transformer:
                failed.callback(self._transformer.close)
                passed.append(self._transformer.asked.fileno())
            self.process = zygote.start(
                _sandbox(config),
                [*map(str, range(3, 3 + len(passed))), json.dumps(settings)],
                passed,
                2,
                entry="millpond.agent.data_service.process",
            )
            self._ending = failed.pop_all()
        if self._transformer:
            self._transformer.asked.close()

    def serve(self, host: Channel) -> None:
        """Tell the host where the service is, and wait until the host leaves or the process ends, by which
        the host learns that it needs another. Raises RemoteError.
        """
        host.send(DataServiceReady(self.port), Deadline.after(REPLY_SECONDS))
        threading.Thread(target=self._watch, args=(host,), name="data service", daemon=True).start()
        try:
            request = host.receive(NEVER).message
        except ConnectionLost:
            return
        raise ProtocolError(f"the host sent '{request.NAME}' on a connection that holds a data service")

    def _watch(self, host: Channel) -> None:
        self.process.wait()
        host.shut_down()

    def close(self) -> None:
        """End the process and all its connections."""
        end(self.process)
        self._ending.close()


def about_service(code: Launch | None, peer: str, signer: str) -> Answered:
    """Return what the audit log tells of a data service: the code of its transforms, if it has some."""
    if code is None:
        return Answered("data service", peer=peer)
    digest = code_digest(code)
    return Answered("data service", code.script, run=code.run, peer=peer, code=digest, signer=signer)


def _sandbox(config: AgentConfig) -> Sandbox:
    public = Path(config.volume, PUBLIC)  # read on the flash itself
    return Sandbox(
        binds=(*system_binds(), *python_binds(), Bind(Path(config.flash, PUBLIC), public)),
        own_network=True,
        own_pids=True,
        uid=config.users.data,
    )
