# SPDX-License-Identifier: Apache-2.0
"""Edge (HTTP): the dashboard's web server: the ways of its pages, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, cast

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, ExceptionHandler

from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.host.api.daemon import LARGEST_NUMBER
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor.dashboard import control
from millpond.host.monitor.dashboard.access import Access, Role
from millpond.host.monitor.dashboard.guard import Guard
from millpond.host.monitor.dashboard.live import Live
from millpond.host.monitor.dashboard.pages import (
    MOST_COMPARED,
    ComparePage,
    DevicePage,
    FleetPage,
    JobPage,
    PageView,
)
from millpond.host.monitor.dashboard.rendering import HERE, Renderer
from millpond.host.monitor.dashboard.sources import Sources
from millpond.host.monitor.feed import Feed
from millpond.host.monitor.job_view import Axis

PART: Final = 1 << 20
"""The bytes of a model that are sent at once."""
Make = Callable[[Request], PageView]


class Dashboard:
    """The web application ``asgi`` that shows what a ``feed`` knows of a ``fleet`` to those whom ``access``
    admits, by a ``cookie`` of this name.
    """

    def __init__(self, feed: Feed, fleet: str, access: Access, cookie: str) -> None:
        self._feed, self._renderer = feed, Renderer(fleet)
        self._sources, self._live = Sources(feed.directory), Live(feed, self._renderer)
        made: dict[str, Make] = {
            "/": lambda _request: FleetPage(),
            "/devices/{name}": self._device_page,
            "/jobs/{number:int}": self._job_page,
            "/compare": self._compare_page,
        }
        app = Starlette(
            routes=[
                *(Route(path, self._whole(make)) for path, make in made.items()),
                *(Route(f"/live{path}", self._events(make)) for path, make in made.items()),
                Route("/jobs/{number:int}/model", self._model),
                Route("/jobs/{number:int}/stop", self._stop, methods=["POST"]),
                Route("/jobs/{number:int}/resume", self._resume, methods=["POST"]),
                Route("/prune", self._prune, methods=["POST"]),
                Mount("/static", StaticFiles(directory=HERE / "static")),
            ],
            exception_handlers={
                MillpondError: cast(ExceptionHandler, self._failed),
                HTTPException: cast(ExceptionHandler, self._not_done),
            },
        )
        self.asgi: ASGIApp = Guard(app, access, cookie, self._renderer)

    def end(self) -> None:
        """End the answers that would go on for ever."""
        self._live.end()

    async def _failed(self, _request: Request, error: MillpondError) -> Response:
        status = {"unknown": 404, "state": 409}.get(error.code, 502) if isinstance(error, Refused) else 502
        return self._renderer.message(400 if isinstance(error, LocalError) else status, "Refused", str(error))

    async def _not_done(self, _request: Request, error: HTTPException) -> Response:
        return self._renderer.message(error.status_code, "Refused", error.detail)

    def _whole(self, make: Make) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            page = make(request)
            self._live.follow(page.jobs)
            snapshot, role = self._feed.snapshot, request.state.role
            values = await self._live.run(page, self._live.values, page, snapshot, role)
            return self._renderer.page(page.template, values)

        return answer

    def _events(self, make: Make) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            events = self._live.events(make(request), request.state.role)
            return StreamingResponse(events, media_type="text/event-stream")

        return answer

    def _device_page(self, request: Request) -> PageView:
        name = request.path_params["name"]
        if self._feed.snapshot.fleet.device(name) is None:
            raise Refused("", "unknown", f"there is no device '{name}'")
        return DevicePage(self._sources, name)

    def _job_page(self, request: Request) -> PageView:
        return JobPage(self._sources, _job(request))

    def _compare_page(self, request: Request) -> PageView:
        given = request.query_params.getlist("job")
        numbers = tuple(dict.fromkeys(int(text) for text in given if text.isdecimal() and len(text) < 19))
        if len(numbers) > MOST_COMPARED:
            raise LocalError(f"at most {MOST_COMPARED} jobs are compared")
        axis = request.query_params.get("over", "rounds")
        if axis not in tuple(Axis):
            raise LocalError(f"jobs are compared over {', '.join(Axis)}")
        return ComparePage(self._sources, numbers, Axis(axis))

    async def _model(self, request: Request) -> Response:
        job, best = _job(request), "best" in request.query_params
        model = await run_in_threadpool(self._open_model, job, best)
        name = f"job-{job}{'-best' if best else ''}.safetensors"
        return StreamingResponse(
            iterate_in_threadpool(_parts(model)),
            media_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    def _open_model(self, job: int, best: bool) -> BinaryIO:
        with DaemonClient(self._feed.directory) as client:
            return client.open_model(job, best=best)

    async def _stop(self, request: Request) -> Response:
        _check_control(request)
        job = _job(request)
        await run_in_threadpool(control.stop, self._feed.directory, job)
        return self._done(f"/jobs/{job}")

    async def _resume(self, request: Request) -> Response:
        _check_control(request)
        job, fields = _job(request), await control.form(request)
        await run_in_threadpool(control.resume, self._feed.directory, job, fields)
        return self._done(f"/jobs/{job}")

    def _done(self, path: str) -> Response:
        self._feed.ask_now()
        return RedirectResponse(path, status_code=303)

    async def _prune(self, request: Request) -> Response:
        _check_control(request)
        fields = await control.form(request)
        found = await run_in_threadpool(control.prune, self._feed.directory, fields)
        self._feed.ask_now()
        return self._renderer.page("prune.html", {"found": found, "fields": fields})


def _job(request: Request) -> int:
    number: int = request.path_params["number"]
    if number > LARGEST_NUMBER:
        raise Refused("", "unknown", "there is no such job")
    return number


def _check_control(request: Request) -> None:
    if request.state.role < Role.CONTROL:
        raise HTTPException(403, "this needs the second URL that 'millpond dashboard --control' prints")


def _parts(model: BinaryIO) -> Iterator[bytes]:
    with model:
        while part := model.read(PART):
            yield part
