# SPDX-License-Identifier: Apache-2.0
"""Pure: define the errors of millpond, under one root; the class says whose fault it is."""

from __future__ import annotations


class MillpondError(Exception):
    """Root of every error that millpond raises on purpose. Its text is one line for a person."""


class LocalError(MillpondError):
    """This side is at fault: configuration, a missing file or feature, a wrong argument."""


class ConfigError(LocalError):
    """A configuration or job file demands the impossible; the text names the file and the key."""


class RemoteError(MillpondError):
    """The peer, or the path to it, is at fault."""


class ConnectionLost(RemoteError):
    """The connection ended before the message did."""


class DeadlineExceeded(RemoteError):
    """The peer did not answer in time."""


class ProtocolError(RemoteError):
    """The peer sent bytes that are no message, or a message that is not expected here."""


class LimitExceeded(ProtocolError):
    """The peer announced more than this side accepts; nothing was allocated for it."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    def __init__(self, peer: str, theirs: int, ours: int) -> None:
        older = peer if theirs < ours else "this side"
        super().__init__(f"{peer} speaks protocol {theirs}, this side {ours}: update millpond on {older}")
        self.theirs, self.ours = theirs, ours


class Refused(RemoteError):
    """The peer understood the request and refuses it; ``code`` is a short stable word."""

    def __init__(self, peer: str, code: str, text: str) -> None:
        super().__init__(f"{peer}: {text}" if peer else text)
        self.peer, self.code, self.text = peer, code, text
