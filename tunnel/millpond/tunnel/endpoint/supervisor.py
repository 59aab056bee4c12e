"""Edge: one end of the tunnel: keeps its interface, and a link for as long as there is a peer, for ever."""

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
from millpond.tunnel.datapath.address_filter import AddressFilter
from millpond.tunnel.datapath.context import DatapathContext
from millpond.tunnel.datapath.stats_shm import map_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.endpoint.workers import LinkWorkers
from millpond.tunnel.errors import InterfaceGone, LinkViolation, Orphaned
from millpond.tunnel.netdev.tun import Tun
from millpond.tunnel.ring.link_params import LinkParameters, generation_after
from millpond.tunnel.transports.base import Connection, Transport

log = logging.getLogger(__name__)

_INTERFACE_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE, _MISMATCH_PAUSE = 0.02, 0.2, 1.0
_LASTED_SECONDS = 1.0


class EndpointStopped(Exception):
    """This end was asked to stop."""


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """What one end is told. ``stop`` is readable once it shall stop; ``counters`` is a file of
    ``counters.make_counters``; ``peers`` see AddressFilter.
    """

    role: str
    interface: str
    address: Address
    peers: Network | None
    offer: LinkParameters
    engine: str
    stop: int
    counters: int


class Endpoint:
    """Makes the interface at once; ``run`` supervises the link. Raises LocalError."""

    def __init__(self, config: EndpointConfig, transport: Transport, status: StatusWriter) -> None:
        self._config, self._transport, self._status = config, transport, status
        self._generation, self._resets = 0, 0
        self._pause = _FIRST_PAUSE
        self._counters = map_stats(config.counters)
        self._filter = AddressFilter(config.address, config.offer.vnet_header, config.role, config.peers)
        self._tun = Tun(config.interface, config.offer.vnet_header, Deadline.after(_INTERFACE_SECONDS))
        self._tun.set_blocking()
        self._tun.set_offloads(config.offer.offloads)
        self._mtu = config.offer.mtu
        self._tun.configure(config.address, self._mtu, config.peers, routed=config.role == "device")
        status.down(f"waiting for {transport}")

    def run(self) -> None:
        """Until stopped. Raises InterfaceGone, and Orphaned when nobody listens to it any more."""
        try:
            while True:
                self._attempt()
        except EndpointStopped:
            log.info("stopped")
        finally:
            self._transport.close()
            self._tun.close()

    def _attempt(self) -> None:
        """One link from its beginning to its end, or a failure to get one, and the pause after it."""
        began = time.monotonic()
        try:
            with self._join() as connection:
                self._carry(connection, *self._open(connection))
        except (InterfaceGone, Orphaned):
            raise
        except VersionMismatch as error:
            self._end_of_attempt(str(error), _MISMATCH_PAUSE if self._transport.readiness() is None else 0)
        except (MillpondError, OSError) as error:
            if isinstance(error, LinkViolation):
                self._resets += 1
                log.warning("link reset: %s", error)
            lasted = time.monotonic() - began > _LASTED_SECONDS
            self._pause = _FIRST_PAUSE if lasted else min(2 * self._pause, _LONGEST_PAUSE)
            knocked = self._transport.readiness() is not None and isinstance(error, MillpondError)
            self._end_of_attempt(str(error), 0 if knocked else self._pause)

    def _end_of_attempt(self, reason: str, pause: float) -> None:
        self._status.down(reason, **self._figures())
        if pause:
            self._wait((), pause)

    def _join(self) -> Connection:
        knock = self._transport.readiness()
        while knock is not None and not self._wait((knock,), None):
            pass
        return self._transport.join()

    def _open(self, connection: Connection) -> tuple[LinkParameters, str]:
        config = self._config
        own = replace(config.offer, generation=generation_after(self._generation))
        terms, peer = connection.open(own, self._wait)
        self._generation = terms.generation
        self._tun.set_offloads(terms.offloads)
        if terms.mtu != self._mtu:
            self._tun.set_mtu(terms.mtu)
            self._mtu = terms.mtu
        return terms, peer

    def _carry(self, connection: Connection, terms: LinkParameters, peer: str) -> None:
        """Run the pumps until something ends; always raises what it was."""
        outward, inward = self._counters
        gear = DatapathContext(terms, self._tun, self._filter, outward, inward, self._config.engine)
        with LinkWorkers(connection, gear) as link:
            self._status.up(
                generation=terms.generation,
                mtu=terms.mtu,
                peer=peer,
                depth=terms.depth,
                offloads=terms.offloads,
                engine=native.resolve(self._config.engine),
                **self._figures(),
            )
            knock = self._transport.readiness()
            watched = [connection.gone, *(pump.report for pump in link.pumps)]
            watched += [] if knock is None else [knock]
            while True:
                ready = self._wait(watched, connection.check_seconds)
                for pump in link.pumps:
                    if pump.report in ready:
                        raise pump.verdict()
                if connection.gone in ready:
                    raise ConnectionLost("the peer is gone")
                if knock in ready:
                    log.warning("refused a second host")
                    self._transport.turn_away()
                    self._wait((), _FIRST_PAUSE)  # whether it could or not, it does not knock without end
                connection.check()

    def _wait(self, descriptors: Sequence[int], seconds: float | None) -> set[int]:
        """Those of the descriptors that are ready within ``seconds``. Raises Stopped."""
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
