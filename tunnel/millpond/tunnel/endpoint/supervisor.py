# SPDX-License-Identifier: Apache-2.0
"""Edge: supervise one endpoint: keep its interface, and a link for as long as there is a peer."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, VersionMismatch
from millpond.tunnel.addresses import Address, Network
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.confinement import check_confinement
from millpond.tunnel.datapath.context import DatapathContext
from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.datapath.stats_shm import map_stats
from millpond.tunnel.endpoint.pumps import LinkPumps
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.errors import InterfaceGone, LinkViolation, Orphaned
from millpond.tunnel.netdev.tun import Tun
from millpond.tunnel.ring.link_params import LinkParameters, generation_after
from millpond.tunnel.transports.base import Connection, Transport

log = logging.getLogger(__name__)

_INTERFACE_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE, _MISMATCH_PAUSE = 0.02, 0.2, 1.0
_LASTED_SECONDS = 1.0


class EndpointStopped(Exception):
    """SIGTERM or SIGINT asked this endpoint to stop."""


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Configuration of one endpoint.

    ``stop`` is a descriptor that is readable once it shall stop; ``counters`` is a memory file of
    ``stats_shm.make_stats``; ``peers``: see PacketFilter; ``engine`` is one of ``native.ENGINES``,
    ``confinement`` of ``confinement.CONFINEMENTS``.
    """

    role: str
    interface: str
    address: Address
    peers: Network | None
    offer: LinkParameters
    engine: str
    stop: int
    counters: int
    confinement: str = "required"


class Endpoint:
    """An endpoint: makes its interface at once; ``run`` supervises the link. Raises LocalError."""

    def __init__(self, config: EndpointConfig, transport: Transport, status: StatusWriter) -> None:
        self._config, self._transport, self._status = config, transport, status
        self._generation, self._resets = 0, 0
        self._confinement = check_confinement(config.confinement)
        self._pause = _FIRST_PAUSE
        self._counters = map_stats(config.counters)
        self._tun = Tun(config.interface, config.offer.vnet_header, Deadline.after(_INTERFACE_SECONDS))
        self._tun.set_blocking()
        self._tun.set_offloads(config.offer.offloads)
        self._mtu = config.offer.mtu
        self._tun.configure(config.address, self._mtu, config.peers, routed=config.role == "device")
        status.down(f"waiting for {transport}")

    def run(self) -> None:
        """Keep a link up until stopped. Raises InterfaceGone, and Orphaned when nobody reads the status any
        more.
        """
        try:
            while True:
                self._run_link()
        except EndpointStopped:
            log.info("stopped")
        finally:
            self._transport.close()
            self._tun.close()

    def _run_link(self) -> None:
        """Run one link from its handshake to its end, or fail to open one; then pause."""
        began = time.monotonic()
        try:
            with self._join() as connection:
                self._supervise(connection, *self._open(connection))
        except (InterfaceGone, Orphaned):
            raise
        except VersionMismatch as error:
            self._end_link(str(error), _MISMATCH_PAUSE if self._transport.readiness() is None else 0)
        except (MillpondError, OSError) as error:
            if isinstance(error, LinkViolation):
                self._resets += 1
                log.warning("link reset: %s", error)
            lasted = time.monotonic() - began > _LASTED_SECONDS
            self._pause = _FIRST_PAUSE if lasted else min(2 * self._pause, _LONGEST_PAUSE)
            is_woken = self._transport.readiness() is not None and isinstance(error, MillpondError)
            self._end_link(str(error), 0 if is_woken else self._pause)

    def _end_link(self, reason: str, pause: float) -> None:
        self._status.down(reason, **self._figures())
        if pause:
            self._wait((), pause)

    def _join(self) -> Connection:
        listener = self._transport.readiness()
        while listener is not None and not self._wait((listener,), None):
            pass
        return self._transport.join()

    def _open(self, connection: Connection) -> tuple[LinkParameters, str]:
        config = self._config
        own = replace(config.offer, generation=generation_after(self._generation))
        params, peer = connection.open(own, self._wait)
        self._generation = params.generation
        self._tun.set_offloads(params.offloads)
        if params.mtu != self._mtu:
            self._tun.set_mtu(params.mtu)
            self._mtu = params.mtu
        return params, peer

    def _supervise(self, connection: Connection, params: LinkParameters, peer: str) -> None:
        """Run the pumps until something ends; always raises the error that tells what."""
        config, (outward, inward) = self._config, self._counters
        passing = PacketFilter(config.address, params.vnet_header, config.role, config.peers, params.offloads)
        datapath = DatapathContext(params, self._tun, passing, outward, inward, config.engine)
        with LinkPumps(connection, datapath) as link:
            self._status.up(
                generation=params.generation,
                mtu=params.mtu,
                peer=peer,
                depth=params.depth,
                offloads=params.offloads,
                engine=native.resolve(self._config.engine),
                confinement=self._confinement,
                **self._figures(),
            )
            listener = self._transport.readiness()
            watched = [connection.gone, *(pump.report for pump in link.pumps)]
            watched += [] if listener is None else [listener]
            while True:
                ready = self._wait(watched, connection.check_seconds)
                for pump in link.pumps:
                    if pump.report in ready:
                        raise pump.verdict()
                if connection.gone in ready:
                    raise ConnectionLost("the peer is gone")
                if listener in ready:
                    log.warning("refused a second host")
                    self._transport.reject()
                    self._wait((), _FIRST_PAUSE)  # bounds how often connection attempts are rejected
                connection.check()

    def _wait(self, descriptors: Sequence[int], seconds: float | None) -> set[int]:
        """Return which of the descriptors are readable within ``seconds`` (None: wait for ever). Raises
        EndpointStopped.
        """
        poll = select.poll()
        for descriptor in (*descriptors, self._config.stop):
            poll.register(descriptor, select.POLLIN)
        ready = {found for found, _ in poll.poll(None if seconds is None else seconds * 1000)}
        if self._config.stop in ready:
            raise EndpointStopped
        return ready

    def _figures(self) -> dict[str, object]:
        outward, inward = (counters.read() for counters in self._counters)
        return {
            "resets": self._resets,
            "out": {"packets": outward.packets, "bytes": outward.bytes},
            "in": {"packets": inward.packets, "bytes": inward.bytes, "dropped": inward.dropped},
        }
