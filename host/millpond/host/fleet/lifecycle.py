# SPDX-License-Identifier: Apache-2.0
"""Pure: the states of a device as the host sees it, and the only transitions between them."""

from __future__ import annotations

from enum import StrEnum


class DeviceState(StrEnum):
    """The state of a device."""

    ABSENT = "absent"  # its endpoint of the tunnel does not answer
    CONNECTING = "connecting"  # the tunnel is up; the handshake with the agent is under way
    READY = "ready"
    FAULTY = "faulty"  # the agent answers, and says why it can run no job
    INCOMPATIBLE = "incompatible"  # the agent speaks another version of the protocol
    REFUSED = "refused"  # its certificate, ours, or its messages were not accepted
    REVOKED = "revoked"  # the fleet has revoked its certificate: it is not connected to


class DeviceEvent(StrEnum):
    """An event that may change a device's state."""

    TUNNEL_UP = "tunnel up"
    GREETED = "greeted"
    FAULT = "fault"
    OTHER_VERSION = "other version"
    NOT_TRUSTED = "not trusted"
    LOST = "lost"
    REVOKED = "revoked"


_TRANSITIONS = {
    (DeviceState.ABSENT, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.CONNECTING, DeviceEvent.GREETED): DeviceState.READY,
    (DeviceState.CONNECTING, DeviceEvent.OTHER_VERSION): DeviceState.INCOMPATIBLE,
    (DeviceState.CONNECTING, DeviceEvent.NOT_TRUSTED): DeviceState.REFUSED,
    (DeviceState.CONNECTING, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.CONNECTING, DeviceEvent.FAULT): DeviceState.FAULTY,
    (DeviceState.READY, DeviceEvent.FAULT): DeviceState.FAULTY,
    (DeviceState.READY, DeviceEvent.GREETED): DeviceState.READY,  # anew, since its certificate is
    (DeviceState.FAULTY, DeviceEvent.GREETED): DeviceState.READY,
    (DeviceState.FAULTY, DeviceEvent.FAULT): DeviceState.FAULTY,
    (DeviceState.FAULTY, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.FAULTY, DeviceEvent.OTHER_VERSION): DeviceState.INCOMPATIBLE,
    (DeviceState.FAULTY, DeviceEvent.NOT_TRUSTED): DeviceState.REFUSED,
    (DeviceState.READY, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.READY, DeviceEvent.OTHER_VERSION): DeviceState.INCOMPATIBLE,
    (DeviceState.READY, DeviceEvent.NOT_TRUSTED): DeviceState.REFUSED,
    (DeviceState.INCOMPATIBLE, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.INCOMPATIBLE, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.REFUSED, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.REFUSED, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.REVOKED, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.REVOKED, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.ABSENT, DeviceEvent.LOST): DeviceState.ABSENT,
} | {(state, DeviceEvent.REVOKED): DeviceState.REVOKED for state in DeviceState}


def after(state: DeviceState, event: DeviceEvent) -> DeviceState:
    """Return the state that ``event`` leads to. Raises ValueError for an event that cannot happen in
    ``state``.
    """
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a device that is {state} cannot see '{event}'") from None
