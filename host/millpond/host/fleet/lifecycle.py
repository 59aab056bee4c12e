"""Pure: the life of a device as the host sees it: named states and the only transitions between them."""

from __future__ import annotations

from enum import StrEnum


class DeviceState(StrEnum):
    """Where a device is in its life."""

    ABSENT = "absent"  # its end of the tunnel does not answer
    CONNECTING = "connecting"  # the tunnel is up; the agent is being greeted
    READY = "ready"
    INCOMPATIBLE = "incompatible"  # it speaks another version of the protocol
    REFUSED = "refused"  # its certificate, ours, or what it says was not accepted


class DeviceEvent(StrEnum):
    """What can happen to it."""

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
    """The state that ``event`` leads to. Raises ValueError for an event that cannot happen in ``state``."""
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a device that is {state} cannot see '{event}'") from None
