# SPDX-License-Identifier: Apache-2.0
"""Pure: the admission of requests to the dashboard: tokens and sessions, hosts and origins."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}
SAFE = ("GET", "HEAD")
"""The methods of requests that change nothing."""


class Role(IntEnum):
    """The rights of a browser; each has those of the ones before it."""

    NONE = 0
    VIEW = 1
    CONTROL = 2


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one run of the dashboard. A ``token`` of a role stands in a printed URL; the browser
    gets the ``session`` of that role for it, as a cookie. ``hosts`` are the names, with their ports, by which
    a browser may know the dashboard. ``secure`` hosts are reached by TLS.
    """

    tokens: Mapping[Role, str]
    sessions: Mapping[Role, str]
    hosts: frozenset[str]
    secure: frozenset[str] = frozenset()

    @classmethod
    def fresh(cls, urls: tuple[str, ...], *, control: bool) -> Self:
        """Return new secrets, of the role CONTROL too if ``control``. ``urls`` are the dashboard's."""
        roles = (Role.VIEW, Role.CONTROL) if control else (Role.VIEW,)
        hosts = {host_of(url): urlsplit(url).scheme for url in urls}
        return cls(
            {role: secrets.token_urlsafe(24) for role in roles},
            {role: secrets.token_urlsafe(24) for role in roles},
            frozenset(hosts),
            frozenset(host for host, scheme in hosts.items() if scheme == "https"),
        )

    def of_token(self, text: str) -> Role:
        """Return the role of a token, NONE for a text that is none."""
        return _role(self.tokens, text)

    def of_session(self, text: str) -> Role:
        """Return the role of a cookie's session, NONE for a text that is none."""
        return _role(self.sessions, text)

    def refusal(self, method: str, headers: Mapping[str, str]) -> str:
        """Return the reason for which a request is refused whatever its cookie says, "" for none.

        A foreign ``Host`` is that of a name that somebody has pointed at this machine (DNS rebinding). A
        request with a foreign ``Origin`` is of a page of another site or port. Browsers send ``Origin`` with
        every request that may change something, and ``Sec-Fetch-Site`` with those that show something.
        """
        host = headers.get("host", "").lower()
        if host not in self.hosts:
            return "the dashboard has no such name: open the URL that 'millpond dashboard' has printed"
        origin = headers.get("origin")
        if origin is not None and host_of(origin) != host:
            return "a page of another site asks for this"
        if origin is None and method not in SAFE:
            return "the request does not say of which page it is"
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return ""
        is_link = method in SAFE and headers.get("sec-fetch-mode") == "navigate"
        return "" if is_link and headers.get("sec-fetch-dest") == "document" else "another site asks for this"


def host_of(url: str) -> str:
    """Return the name of a URL, or an origin, as the header ``Host`` has it: a usual port is left out."""
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:
        return ""
    name = (found.hostname or "").lower()
    shown = f"[{name}]" if ":" in name else name
    return shown if port in (None, DEFAULT_PORTS.get(found.scheme)) else f"{shown}:{port}"


def _role(known: Mapping[Role, str], text: str) -> Role:
    given, found = text.encode(errors="replace"), Role.NONE
    for role, secret in known.items():
        if hmac.compare_digest(given, secret.encode()):
            found = max(found, role)
    return found
