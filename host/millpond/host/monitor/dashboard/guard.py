# SPDX-License-Identifier: Apache-2.0
"""Edge (HTTP): admits requests to the dashboard by their cookie, and gives each answer its headers."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.host.monitor.dashboard.access import Access, Role
from millpond.host.monitor.dashboard.rendering import Renderer

OPEN: Final = "/static/"
"""Files that hold no secret: the page about a missing token has its style from there, too."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Passes on to ``app`` what ``access`` admits, with the role in the state of the request. A URL with a
    token is answered by a cookie and the way to the same URL without it.
    """

    def __init__(self, app: ASGIApp, access: Access, cookie: str, renderer: Renderer) -> None:
        self._app, self._access, self._cookie, self._renderer = app, access, cookie, renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._answer(HTTPConnection(scope), scope["method"]) or self._app
            await answer(scope, receive, _with_headers(send))
        else:  # a WebSocket: closed before it is accepted
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, request: HTTPConnection, method: str) -> Response | None:
        """Return the answer to a request that is not passed on."""
        if reason := self._access.refusal(method, request.headers):
            return self._refused(reason)
        if "token" in request.query_params and method == "GET":
            return self._enter(request)
        role = self._access.of_session(self._session(request))
        request.scope.setdefault("state", {})["role"] = role
        if role is Role.NONE and not request.url.path.startswith(OPEN):
            return self._refused("open the URL with the token that 'millpond dashboard' has printed")
        return None

    def _session(self, request: HTTPConnection) -> str:
        try:
            found = SimpleCookie(request.headers.get("cookie", ""))
        except CookieError:
            return ""
        return found[self._cookie].value if self._cookie in found else ""

    def _enter(self, request: HTTPConnection) -> Response:
        role = self._access.of_token(request.query_params["token"])
        if role is Role.NONE:
            return self._refused("the token is not that of the dashboard that runs now")
        left = urlencode([(key, value) for key, value in parse_qsl(request.url.query) if key != "token"])
        path = "/" + request.url.path.lstrip("/")  # "//name" would be another host
        answer = RedirectResponse(f"{path}?{left}" if left else path, status_code=303)
        secure = request.headers["host"].lower() in self._access.secure
        answer.set_cookie(
            self._cookie, self._access.sessions[role], httponly=True, samesite="strict", secure=secure
        )
        return answer

    def _refused(self, reason: str) -> Response:
        return self._renderer.message(403, "Not admitted", reason)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sent
