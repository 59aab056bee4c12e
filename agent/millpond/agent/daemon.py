# SPDX-License-Identifier: Apache-2.0
"""Entry: the agent, the daemon on a device. ``millpond-agent --config FILE``."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from millpond.agent.audit.recorder import AuditRecorder
from millpond.agent.audit.signer import DeviceSigner
from millpond.agent.config import AgentConfig, read
from millpond.agent.control import AgentService
from millpond.agent.encryption import encrypt
from millpond.agent.gate import Gate, LedgerCounters, ledger, open_ledger, patterns
from millpond.agent.job_worker import bare_sandbox
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.listener import Listener
from millpond.agent.log_lines import LogLines
from millpond.agent.supervision import SelfCheck, SupervisedPart, disk_of, watch, worker_fault
from millpond.agent.volume import DeviceMount, VolumeServer
from millpond.base.errors import MillpondError
from millpond.base.version import VERSION
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.linux.confinement.userns import has_many_uids
from millpond.linux.limits.process_limits import ProcessLimits, spare_from_oom
from millpond.linux.logs import UnblockedHandler
from millpond.linux.malloc import trim_heap
from millpond.linux.notify import notify
from millpond.linux.signals import stop_event
from millpond.linux.zygote.forked import load
from millpond.linux.zygote.prepared import PreparedFork
from millpond.train.worker.start import workers_zygote
from millpond.tunnel.endpoint.handle import spawn_endpoint
from millpond.wire.control_messages import CONTROL_PORT, AtRest
from millpond.wire.tls import CurrentContext, Identity

log = logging.getLogger("millpond.agent")


def _start_logging() -> LogLines:
    lines = LogLines()
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[UnblockedHandler(), lines])
    return lines


def _prepare_flash(config: AgentConfig) -> AtRest:
    """Make the volume's parts, the private one encrypted, and give them to their users."""
    prepare(Path(config.flash))
    private = Path(config.flash, PRIVATE)
    at_rest = encrypt(private, Path(config.state, "private.key"), config.privacy.at_rest)
    shutil.rmtree(Path(config.state, "jobs"), ignore_errors=True)  # logs of jobs lay there, not encrypted
    if has_many_uids() and os.geteuid() == 0:
        os.chown(private, config.users.worker, config.users.worker)
        os.chown(Path(config.flash, PUBLIC), config.users.volume, config.users.volume)
    return at_rest


class PreparedForks:
    """The agent's lasting processes, forked before it has threads, keys and data; they share its modules."""

    def __init__(self) -> None:
        load(["millpond.fs.mount.device", "millpond.agent.volume_server", "millpond.tunnel.__main__"])
        self.tunnel, self.mount = PreparedFork(), PreparedFork()
        self.volume = PreparedFork(sandboxed=True)
        self._trial: PreparedFork | None = PreparedFork()

    def take_trial(self) -> PreparedFork | None:
        """Return the one for the zygote of the first self-check; None for those after it."""
        trial, self._trial = self._trial, None
        return trial


@contextlib.contextmanager
def running(
    config: AgentConfig, config_path: Path, lines: LogLines, forks: PreparedForks
) -> Iterator[list[SupervisedPart]]:
    """Start the agent's parts, lowest first, and stop them in reverse. Yields those that must live."""
    with contextlib.ExitStack() as stack:
        at_rest = _prepare_flash(config)
        limits = ProcessLimits.here(config.limits.memory_bytes, config.limits.processes)
        link = config.link
        end = spawn_endpoint(
            "device",
            link.socket or link.ivshmem,
            link.interface,
            link.address,
            transport=link.transport,
            mtu=link.mtu,
            name=config.name,
            peers=link.peers,
            prepared=forks.tunnel,
            confinement=link.confinement,
        )
        stack.callback(end.stop)
        ledgers, sought = Path(config.state, "ledger"), patterns(config.privacy)
        volume = VolumeServer(config, config_path, open_ledger(ledgers, "volume", sought), forks.volume)
        stack.callback(volume.stop)
        mount = DeviceMount(config, forks.mount)
        stack.callback(mount.stop)
        identity = Identity.in_directory(Path(config.identity))
        audit = AuditRecorder(config, DeviceSigner(identity))
        stack.callback(audit.stop)
        control = audit.standing("control", LedgerCounters.in_memory(shared=False))
        gate = Gate(sought, open_ledger(ledgers, "agent", sought), control.counters)
        zygote = workers_zygote(config.zygote_idle, limits)
        stack.callback(zygote.close)
        software, streams = VERSION, open_ledger(ledgers, "data", sought)
        others = [volume.tally, streams]
        launches = LaunchedScripts(config, gate, others, lambda: end.counts[0].bytes, zygote, audit.session)
        nodes = open_ledger(ledgers, "nodes", sought)
        audit.standing("volume", volume.tally)
        audit.start(VERSION, ledger(gate, [volume.tally, nodes, streams])[0])
        check = SelfCheck(
            lambda: "" if volume.alive else "the volume's server is down",
            lambda: worker_fault(zygote, bare_sandbox(config), limits, forks.take_trial()),
        )
        stack.callback(check.stop)
        service = AgentService(
            config, software, gate, volume, launches, lines, at_rest, zygote, nodes, streams, check, audit
        )
        context = CurrentContext(identity, server=True)
        listener = Listener(service, context, ipaddress.IPv4Interface(link.address), CONTROL_PORT)
        stack.callback(listener.stop)
        check.looks += (lambda: listener.fault, lambda: audit.fault)
        yield [
            SupervisedPart("the tunnel's end", lambda: end.alive),
            SupervisedPart("the disk of the flash", disk_of(Path(config.flash))),
            SupervisedPart("the listener", lambda: listener.alive),
            SupervisedPart("the volume's server", volume.is_well, volume.restart),
            SupervisedPart("the volume's mount", lambda: mount.alive),  # SSH servers and scripts have it, too
        ]


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. Exit codes: 0 stopped, 1 a part died, 2 cannot start."""
    parser = argparse.ArgumentParser(prog="millpond-agent", description="The daemon on a millpond device.")
    parser.add_argument("--config", type=Path, default=Path("/etc/millpond/agent.toml"), metavar="FILE")
    arguments = parser.parse_args(argv)
    spare_from_oom()
    forks = PreparedForks()
    lines = _start_logging()
    stop = stop_event()
    started = False
    try:
        config = read(arguments.config)
        with running(config, arguments.config, lines, forks) as parts:
            started = True
            trim_heap()
            notify("READY=1")
            log.info("%s is ready at %s", config.name, config.link.address)
            watch(parts, stop)
            notify("STOPPING=1")
    except (MillpondError, OSError) as error:
        log.error("%s", error)
        return 1 if started else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
