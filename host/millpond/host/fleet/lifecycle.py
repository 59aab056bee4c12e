# SPDX-License-Identifier: Apache-2.0
"""Pure: the states of a device as the host sees it, and the only transitions between them."""

from __future__ import annotations

from enum import StrEnum


class DeviceState(StrEnum):
    """The state of a device."""

    ABSENT = "absent"  # its endpoint of the tunnel does not answer
    CONNECTING = "connecting"  # the tunnel is up; the handshake with the agent is under way
    READY = "ready"
    INCOMPATIBLE = "incompatible"  # the agent speaks another version of the protocol
    REFUSED = "refused"  # its certificate, ours, or its messages were not accepted


class DeviceEvent(StrEnum):
    """An event that may change a device's state."""

    TUNNEL_UP = "tunnel up"
    GREETED = "greeted"
    OTHER_VERSION = "other version"
    NOT_TRUSTED = "not trusted"
    LOST = "lost"


_TRANSITIONS = {
    (DeviceState.ABSENT, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.CONNECTING, DeviceEvent.GREETED): DeviceState.READY,
    (DeviceState.CONNECTING, DeviceEvent.OTHER_VERSION): DeviceState.INCOMPATIBLE,
    (DeviceState.CONNECTING, DeviceEvent.NOT_TRUSTED): DeviceState.REFUSED,
    (DeviceState.CONNECTING, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.READY, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.READY, DeviceEvent.OTHER_VERSION): DeviceState.INCOMPATIBLE,
    (DeviceState.READY, DeviceEvent.NOT_TRUSTED): DeviceState.REFUSED,
    (DeviceState.INCOMPATIBLE, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.INCOMPATIBLE, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.REFUSED, DeviceEvent.LOST): DeviceState.ABSENT,
    (DeviceState.REFUSED, DeviceEvent.TUNNEL_UP): DeviceState.CONNECTING,
    (DeviceState.ABSENT, DeviceEvent.LOST): DeviceState.ABSENT,
}


def after(state: DeviceState, event: DeviceEvent) -> DeviceState:
    """Return the state that ``event`` leads to. Raises ValueError for an event that cannot happen in
    ``state``.
    """
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a device that is {state} cannot see '{event}'") from None
