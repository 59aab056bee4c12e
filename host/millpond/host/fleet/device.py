# SPDX-License-Identifier: Apache-2.0
"""Edge: one device of the fleet while the daemon runs: its tunnel, its agent, its state.

A thread keeps the device's state up to date: a handshake with the agent, then its load, twice a second in a
fleet of up to 128 devices, and less often in larger ones. When the agent stops answering, every connection to
it is closed: no caller waits for a device that is gone.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, LocalError, RemoteError, VersionMismatch
from millpond.base.text import printable
from millpond.base.version import VERSION
from millpond.host.api.daemon import TunnelInfo
from millpond.host.fleet import lifecycle, revocation
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.host.fleet.lifecycle import DeviceEvent, DeviceState
from millpond.host.fleet.power import DevicePower
from millpond.host.store.store import Store
from millpond.images.boards import EMULATED
from millpond.linux.netlink import rtnetlink
from millpond.tunnel.endpoint.handle import STARTING, EndpointHandle, spawn_endpoint
from millpond.tunnel.endpoint.zygote_client import EndpointZygote
from millpond.wire import tls
from millpond.wire.channel import Channel, enable_keepalive
from millpond.wire.control_messages import CONTROL_PORT, Attach, GetLoad, Hello, Load, Welcome
from millpond.wire.framing import Limits
from millpond.wire.messages import Ok
from millpond.wire.texts import cleaned

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
HEARTBEAT_SECONDS = 0.5
_HEARTBEATS_A_SECOND = 256
"""Heartbeats of all devices together: each takes some 0.3 ms of the daemon's CPU."""
RETRY_SECONDS = 0.25
RETRY_INCOMPATIBLE_SECONDS = 2.0
_NO_LINK: dict[str, Any] = {
    "state": "down",
    "reason": "",
    "generation": 0,
    "mtu": 0,
    "depth": 0,
    "offloads": 0,
    "engine": "",
    "confinement": "",
    "resets": 0,
}
_REVOKED = "its certificate is revoked"
LIMITS = Limits(head=4 << 20, payload=1 << 34)
STALLED_SECONDS = 20.0
"""For so long the link of a tunnel may be up and bring no packet of the device, while sessions fail. A device
without an agent answers, too, so that after it a pump on either side must stand still, or the device drops
all: each further tunnel that brings nothing has twice the time.
"""
_MOST_DOUBLED = 6
_LONG = 200
"""Most characters of a text that a device says of itself, or an endpoint of its tunnel."""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The status of a device now. ``reason`` says why it is not ready. ``load`` was ``heard`` at that time of
    the steady clock; ``watts`` is the recent power.
    """

    state: DeviceState = DeviceState.ABSENT
    reason: str = "not seen yet"
    welcome: Welcome | None = None
    load: Load | None = None
    heard: float = 0.0
    watts: float | None = None


class Device:
    """A device. Call ``start`` once; then read ``status``, or open connections while the device is ready."""

    def __init__(self, fleet: Fleet, config: DeviceConfig, store: Store, zygote: EndpointZygote) -> None:
        self.name, self.config = config.name, config
        self._fleet, self._store, self._zygote = fleet, store, zygote
        self._addresses = fleet.addresses(config.name)
        self._context = fleet.context
        self._status = DeviceStatus()
        self._changed = threading.Condition()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._channels_lock = threading.Lock()
        self._stop = threading.Event()
        self._end: EndpointHandle | None = None
        self._heard, self._brought = time.monotonic(), _Brought()
        self._told = (DeviceState.ABSENT, "")
        self._power = DevicePower(config.watts, emulated=config.board == EMULATED)
        self._thread = threading.Thread(target=self._run, name=f"device {self.name}", daemon=True)

    @property
    def status(self) -> DeviceStatus:
        """The present status."""
        with self._changed:
            return self._status

    @property
    def has_tunnel(self) -> bool:
        """Whether this daemon has made the host's end of the tunnel, with its interface."""
        end = self._end
        return end is not None and end.alive and end.status.get("reason") != STARTING

    @property
    def silence(self) -> float:
        """Seconds since the agent last answered."""
        return time.monotonic() - self._heard

    def start(self) -> None:
        """Start the device's thread, which brings up the tunnel."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection, stop the thread and take the tunnel down."""
        self._stop.set()
        self._close_channels()
        self._thread.join(timeout=5)

    def tunnel(self) -> TunnelInfo:
        """Return the state of the host's endpoint of the tunnel. Raises LocalError while there is none."""
        end = self._end
        if end is None:
            raise LocalError(f"the tunnel of {self.name} has not been started yet")
        status, (outward, inward) = end.status, end.counts
        link = {key: status.get(key, default) for key, default in _NO_LINK.items()}
        now = time.monotonic()
        return TunnelInfo(self.name, time=now, to_device=outward, from_device=inward, **cleaned(link, _LONG))

    def wait_ready(self, deadline: Deadline) -> bool:
        """Wait until the device is ready; False if the deadline passes first."""
        with self._changed:
            while self._status.state is not DeviceState.READY:
                if deadline.passed or self._stop.is_set():
                    return False
                self._changed.wait(0.2)
            return True

    def dial(self, port: int, deadline: Deadline) -> socket.socket:
        """Return a TCP connection to a port of the device, through its tunnel. Raises RemoteError, also for a
        device whose certificate is revoked.
        """
        if revocation.is_revoked(self._fleet, self.name):
            raise RemoteError(f"{self.name}: {_REVOKED}")
        try:
            sock = socket.create_connection((self._addresses.device_ip, port), deadline.remaining())
        except TimeoutError:
            raise DeadlineExceeded(f"{self.name} did not answer on port {port} in time") from None
        except OSError as error:
            status = self.status
            absent = f"; it is absent: {status.reason}" if status.state is DeviceState.ABSENT else ""
            raise ConnectionLost(f"{self.name}: {error.strerror or error}{absent}") from None
        enable_keepalive(sock)  # also for those that the socket is passed on to
        return sock

    def control(self, deadline: Deadline) -> Channel:
        """Return a new control connection to the agent. Raises RemoteError."""
        context = self._context.get()
        secure = tls.connect(self.dial(CONTROL_PORT, deadline), context, self.name, deadline)
        return self._track(Channel(secure, self.name, limits=LIMITS, clean=True))

    def bulk(self, token: bytes, encrypted: bool, deadline: Deadline) -> Channel:
        """Return the bulk connection that ``token`` entitles to. Raises RemoteError."""
        context = self._context.get()
        sock = self.dial(CONTROL_PORT, deadline)
        if encrypted:
            sock = tls.connect(sock, context, self.name, deadline)
        channel = self._track(Channel(sock, self.name, limits=LIMITS, clean=True))
        channel.call(Attach(token), Ok, deadline)
        return channel

    def _track(self, channel: Channel) -> Channel:
        with self._channels_lock:
            self._channels.add(channel)
        return channel

    def _close_channels(self) -> None:
        with self._channels_lock:
            channels = list(self._channels)
        for channel in channels:
            channel.shut_down()

    def _run(self) -> None:
        """Run sessions with the agent until ``stop``. The tunnel's endpoint dies with this thread."""
        while not self._stop.is_set():
            if refusal := self._refusal():
                self._transition(DeviceEvent.REVOKED if refusal is _REVOKED else DeviceEvent.LOST, refusal)
                self._stop.wait(HEARTBEAT_SECONDS)
                continue
            try:
                end = self._spawn()
            except (OSError, LocalError, RuntimeError) as error:
                self._transition(DeviceEvent.LOST, f"the tunnel cannot start: {error}")
                self._stop.wait(RETRY_INCOMPATIBLE_SECONDS)
                continue
            self._end = end
            try:
                self._run_sessions(end)
            finally:
                end.stop()

    def _spawn(self) -> EndpointHandle:
        transport, where = self._fleet.peer(self.config)
        return spawn_endpoint(
            "host",
            where,
            self._fleet.interface(self.name),
            self._addresses.host,
            transport=transport,
            peers=self._fleet.peers,
            zygote=self._zygote,
            confinement=self._fleet.config.host.confinement,
        )

    def _run_sessions(self, end: EndpointHandle) -> None:
        """Run sessions until the endpoint has died, brings nothing any more, or is to be stopped."""
        self._brought.begin()
        while end.alive:
            self._run_session(end)
            if self._stop.is_set() or self._refusal():
                return
            if self._brought.nothing_for_long(end):
                if self._brought.stalls == 1:
                    log.warning("the tunnel of %s is up and brings nothing: it is made anew", self.name)
                return
        reason = f"the tunnel cannot go on: {end.status.get('reason', 'its end on the host has died')}"
        self._transition(DeviceEvent.LOST, reason)
        self._tell(DeviceState.ABSENT, reason)
        self._stop.wait(RETRY_SECONDS)

    def _refusal(self) -> str:
        """Return why the device must not be connected: it is revoked, or whether it is cannot be read."""
        try:
            return _REVOKED if revocation.is_revoked(self._fleet, self.name) else ""
        except LocalError as error:
            return str(error)

    def _beat_seconds(self) -> float:
        """Return the seconds between two heartbeats: jobs go on without a device after half its silence."""
        shared = len(self._fleet.config.device) / _HEARTBEATS_A_SECOND
        return max(HEARTBEAT_SECONDS, min(shared, self._fleet.config.silence / 3))

    def _run_session(self, end: EndpointHandle) -> None:
        """Run one session with the agent; after any failure the next one is tried."""
        try:
            self._session(end)
        except Exception as error:
            if not isinstance(error, LocalError):
                log.exception("%s: internal error", self.name)
            self._transition(DeviceEvent.LOST, str(error))
            self._stop.wait(RETRY_INCOMPATIBLE_SECONDS)

    def _session(self, end: EndpointHandle) -> None:
        """Shake hands with the agent, then ask for its load until it is lost."""
        if end.status.get("state") != "up":
            reason = str(end.status.get("reason", ""))
            if reason != STARTING:  # before it has one, what ended the last session stays said
                self._transition(DeviceEvent.LOST, reason or "waiting for the device")
            self._stop.wait(RETRY_SECONDS / 2)
            return
        fault = self._fleet.address_fault(self.name) or self._mend_interface()
        self._transition(DeviceEvent.TUNNEL_UP, fault or "greeting the agent")
        try:
            while self._connection(end):
                pass  # the agent's certificate was renewed: other connections to the agent go on
        except VersionMismatch as error:
            self._transition(DeviceEvent.OTHER_VERSION, str(error))
            self._stop.wait(RETRY_INCOMPATIBLE_SECONDS)
        except (ConnectionLost, DeadlineExceeded) as error:
            self._transition(DeviceEvent.LOST, fault or str(error))
            self._stop.wait(RETRY_SECONDS)
        except RemoteError as error:
            self._transition(DeviceEvent.NOT_TRUSTED, str(error))
            self._stop.wait(RETRY_INCOMPATIBLE_SECONDS)
        finally:
            self._close_channels()

    def _connection(self, end: EndpointHandle) -> bool:
        """Shake hands with the agent over a new connection, then ask for its load. Returns True once the
        certificate that the agent has shown is replaced by another; False when the session is over. Raises
        RemoteError, LocalError.
        """
        with self.control(Deadline.after(HANDSHAKE_SECONDS)) as agent:
            self._handshake(agent)
            assert isinstance(agent.sock, ssl.SSLSocket)
            shown = tls.peer_serial(agent.sock)
            while not self._stop.wait(self._beat_seconds()) and end.alive:
                if revocation.is_revoked(self._fleet, self.name):
                    raise ConnectionLost(f"{self.name}: {_REVOKED}")
                if revocation.is_listed(self._fleet, shown):
                    return True
                self._heartbeat(agent)
        return False

    def _mend_interface(self) -> str:
        """Put back what another program has changed of the tunnel's interface: it is up, and has its address.
        Returns which other interface has the way to the device, or "".
        """
        interface, there = self._fleet.interface(self.name), self._addresses.device_ip
        try:
            rtnetlink.set_up(interface)
            if rtnetlink.add_address(interface, ipaddress.IPv4Interface(self._addresses.host)):
                log.warning("another program had taken the address of %s away: it is back", interface)
            way = rtnetlink.outgoing(ipaddress.IPv4Address(there))
        except (OSError, ValueError):  # the tunnel is being made anew
            return ""
        if way in (interface, ""):
            return ""
        return (
            f"what is sent to {there} leaves by {way}: it has this range; set another 'network' in fleet.toml"
        )

    def _handshake(self, agent: Channel) -> None:
        hello = Hello(VERSION, time.time())
        welcome = cleaned(agent.call(hello, Welcome, Deadline.after(HANDSHAKE_SECONDS)), _LONG)
        if welcome.device != self.name:
            raise RemoteError(f"the agent of {self.name} says that it is '{welcome.device}'")
        load = self._get_load(agent, welcome, HANDSHAKE_SECONDS)
        self._store.saw_device(self.name, welcome.boot, welcome.software)
        event = DeviceEvent.FAULT if load.fault else DeviceEvent.GREETED
        self._transition(event, load.fault, welcome, load)

    def _heartbeat(self, agent: Channel) -> None:
        welcome = self._status.welcome
        assert welcome is not None
        load = self._get_load(agent, welcome, self._fleet.config.silence)
        if bool(load.fault) is not (self._status.state is DeviceState.FAULTY):
            self._transition(
                DeviceEvent.FAULT if load.fault else DeviceEvent.GREETED, load.fault, welcome, load
            )
        with self._changed:
            self._status = replace(
                self._status, reason=load.fault, load=load, heard=self._heard, watts=self._power.watts
            )

    def _get_load(self, agent: Channel, welcome: Welcome, seconds: float) -> Load:
        load = agent.call(GetLoad(), Load, Deadline.after(seconds))
        self._heard = time.monotonic()
        load = cleaned(replace(load, jobs=load.jobs[:64]), _LONG)
        return self._power.take(load, welcome.boot, self._heard)

    def _transition(
        self, event: DeviceEvent, reason: str, welcome: Welcome | None = None, load: Load | None = None
    ) -> None:
        with self._changed:
            before = self._status
            state = lifecycle.after(before.state, event) if not _repeated(before, event) else before.state
            reason = printable(reason.removeprefix(f"{self.name}: "))  # the table names the device already
            self._status = DeviceStatus(state, reason, welcome or before.welcome, load, self._heard)
            self._changed.notify_all()
        if state is not before.state and state is not DeviceState.CONNECTING:
            self._tell(state, reason)

    def _tell(self, state: DeviceState, reason: str) -> None:
        """Log the state, but not again and again for a device that is tried again and again."""
        if self._told != (state, reason):
            self._told = state, reason
            log.info("%s is %s%s", self.name, state, f": {reason}" if reason else "")


class _Brought:
    """Watches whether the endpoints of a device bring its packets while sessions fail. ``stalls`` counts
    those in a row that have brought none.
    """

    def __init__(self) -> None:
        self.stalls, self._packets, self._since = 0, 0, 0.0

    def begin(self) -> None:
        """Begin with another endpoint."""
        self._packets, self._since = 0, time.monotonic()

    def nothing_for_long(self, end: EndpointHandle) -> bool:
        """Return whether a link that is up has brought no packet for too long."""
        packets, now = end.counts[1].packets, time.monotonic()
        if packets != self._packets:
            self.stalls = 0
        if packets != self._packets or end.status.get("state") != "up":
            self._packets, self._since = packets, now
        stalled: bool = now - self._since > STALLED_SECONDS * 2 ** min(self.stalls, _MOST_DOUBLED)
        self.stalls += stalled
        return stalled


def _repeated(status: DeviceStatus, event: DeviceEvent) -> bool:
    """Return whether the event has already had its effect (a retry that failed as before)."""
    return event is DeviceEvent.TUNNEL_UP and status.state is DeviceState.CONNECTING
