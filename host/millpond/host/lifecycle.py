"""Pure: the life of a device as the host sees it: named states and the only transitions between them."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a device is in its life."""

    ABSENT = "absent"  # its end of the tunnel does not answer
    CONNECTING = "connecting"  # the tunnel is up; the agent is being greeted
    READY = "ready"
    INCOMPATIBLE = "incompatible"  # it speaks another version of the protocol
    REFUSED = "refused"  # its certificate, ours, or what it says was not accepted


class Event(StrEnum):
    """What can happen to it."""

    TUNNEL_UP = "tunnel up"
    GREETED = "greeted"
    OTHER_VERSION = "other version"
    NOT_TRUSTED = "not trusted"
    LOST = "lost"


_TRANSITIONS = {
    (State.ABSENT, Event.TUNNEL_UP): State.CONNECTING,
    (State.CONNECTING, Event.GREETED): State.READY,
    (State.CONNECTING, Event.OTHER_VERSION): State.INCOMPATIBLE,
    (State.CONNECTING, Event.NOT_TRUSTED): State.REFUSED,
    (State.CONNECTING, Event.LOST): State.ABSENT,
    (State.READY, Event.LOST): State.ABSENT,
    (State.READY, Event.OTHER_VERSION): State.INCOMPATIBLE,
    (State.READY, Event.NOT_TRUSTED): State.REFUSED,
    (State.INCOMPATIBLE, Event.LOST): State.ABSENT,
    (State.INCOMPATIBLE, Event.TUNNEL_UP): State.CONNECTING,
    (State.REFUSED, Event.LOST): State.ABSENT,
    (State.REFUSED, Event.TUNNEL_UP): State.CONNECTING,
    (State.ABSENT, Event.LOST): State.ABSENT,
}


def after(state: State, event: Event) -> State:
    """The state that ``event`` leads to. Raises ValueError for an event that cannot happen in ``state``."""
    try:
        return _TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"a device that is {state} cannot see '{event}'") from None
