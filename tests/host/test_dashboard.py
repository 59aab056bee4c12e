# SPDX-License-Identifier: Apache-2.0
"""The dashboard: who may look and who may act, what pages show and escape, and that they stay up to date."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client.metrics import MountStats
from millpond.fs.mount.stats_socket import serve_stats
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor.dashboard import charts, sources
from millpond.host.monitor.dashboard.access import Access, Role, host_of
from millpond.host.monitor.dashboard.sources import DeviceDetail, DeviceSource
from millpond.host.records.jobs import JobEvent
from millpond.wire.audit_log import Answered, InForce

from ..waiting import eventually
from .daemon_rig import Rig
from .dashboard_rig import COOKIE, SECONDS, Served, part, served

__all__ = ["served"]
MILLPOND = (sys.executable, "-m", "millpond.host.main")
PAGES = ("/", "/devices/csd0", "/jobs/1", "/compare?job=1&over=seconds")
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e\x1b[31m{{ 1234*1000 }}"
RAW = re.compile(r"<script>alert|<img|\u202e|\x1b|1234000")
SITE = "http://127.0.0.1:8321"
ACCESS = Access.fresh((SITE, "https://fleet.example"), control=True)


@pytest.mark.parametrize(
    ("method", "headers", "admitted"),
    [
        ("GET", {"host": "127.0.0.1:8321"}, True),
        ("GET", {"host": "FLEET.example"}, True),
        ("GET", {"host": "127.0.0.1:8322"}, False),
        ("GET", {"host": "evil.example"}, False),
        ("GET", {"host": "127.0.0.1:8321.evil.example"}, False),
        ("GET", {}, False),
        ("POST", {"host": "127.0.0.1:8321"}, False),
        ("POST", {"host": "127.0.0.1:8321", "origin": SITE}, True),
        ("POST", {"host": "fleet.example", "origin": "https://fleet.example"}, True),
        ("POST", {"host": "fleet.example", "origin": SITE}, False),
        ("POST", {"host": "127.0.0.1:8321", "origin": "http://127.0.0.1:9000"}, False),
        ("POST", {"host": "127.0.0.1:8321", "origin": "null"}, False),
        ("GET", {"host": "127.0.0.1:8321", "origin": "http://[::1"}, False),
        ("GET", {"host": "127.0.0.1:8321", "sec-fetch-site": "same-origin"}, True),
        ("GET", {"host": "127.0.0.1:8321", "sec-fetch-site": "same-site"}, False),
        (
            "GET",
            {"host": "127.0.0.1:8321", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
            False,
        ),
        (
            "GET",
            {
                "host": "127.0.0.1:8321",
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "document",
            },
            True,
        ),
        (
            "GET",
            {
                "host": "127.0.0.1:8321",
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "iframe",
            },
            False,
        ),
    ],
)
def test_hosts_and_origins(method: str, headers: dict[str, str], admitted: bool) -> None:
    assert bool(ACCESS.refusal(method, headers)) is not admitted


def test_names_are_as_browsers_write_them() -> None:
    named = ("http://A.example:80/x", "https://a.example:443", "http://[::1]:8321", "http://a:99999", "")
    assert [host_of(url) for url in named] == ["a.example", "a.example", "[::1]:8321", "", ""]


def test_each_role_has_a_token_and_a_session_of_its_own() -> None:
    secrets = [*ACCESS.tokens.values(), *ACCESS.sessions.values()]
    assert len(set(secrets)) == 4 and min(map(len, secrets)) >= 32
    assert [ACCESS.of_token(token) for token in ACCESS.tokens.values()] == [Role.VIEW, Role.CONTROL]
    assert {ACCESS.of_token(each) for each in (*ACCESS.sessions.values(), "", "é\udc00")} == {Role.NONE}
    assert set(Access.fresh((SITE,), control=False).tokens) == {Role.VIEW}


def test_nothing_is_shown_without_the_token(served: Served) -> None:
    served.rig.submit()
    for path in (*PAGES, "/live/", "/live/jobs/1", "/jobs/1/model", "/gone", "/?token=", "/?token=guess"):
        for cookie in (None, f"{COOKIE}=guess", f"{COOKIE}={served.access.tokens[Role.VIEW]}", "=;;\x7f"):
            answer = served.ask(path, Cookie=cookie)
            assert answer.status == 403 and "csd0" not in answer.text and "rig" not in answer.text, path


def test_the_token_is_exchanged_for_a_cookie(served: Served) -> None:
    token = served.access.tokens[Role.VIEW]
    answer = served.ask(f"//evil.example/jobs?token={token}&job=1", Cookie=None)
    assert (answer.status, answer.headers["location"]) == (303, "/evil.example/jobs?job=1")
    attributes = answer.headers["set-cookie"].split("; ")
    assert attributes[0] == f"{COOKIE}={served.access.sessions[Role.VIEW]}"
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert served.ask("/", Cookie=attributes[0]).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_other_sites_see_and_do_nothing(served: Served, headers: dict[str, str]) -> None:
    job = served.rig.submit()
    served.role = Role.CONTROL
    for path in ("/", "/live/", "/static/dashboard.js"):
        assert served.ask(path, **headers).status == 403
    assert served.ask(f"/jobs/{job}/stop", method="POST", **headers).status == 403
    assert served.rig.info(job).state in ("queued", "running")


def test_every_answer_has_strict_headers(served: Served) -> None:
    served.rig.submit()
    for path in (*PAGES, "/gone", "/static/dashboard.css", "/static/gone", "/static/../main.py"):
        for cookie in (None, f"{COOKIE}={served.access.sessions[Role.VIEW]}"):
            headers = served.ask(path, Cookie=cookie).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers


def test_pages_have_no_script_and_no_style_of_their_own(served: Served) -> None:
    served.rig.submit()
    for path in PAGES:
        text = served.ask(path).text
        scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", text)
        assert all('src="/static/' in attributes and not body for attributes, body in scripts)
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|https?://", text), path


def test_curves_hold_up_no_first_paint(served: Served) -> None:
    """Before: a browser painted nothing until it had the style of the curves."""
    text = served.ask(f"/jobs/{served.rig.submit()}").text
    head, content = text.split("</head>")
    assert "dashboard.css" in head and "uPlot.min.css" not in head
    assert content.index("</main>") < content.index("uPlot.min.css")


def test_whatever_anyone_says_is_escaped(served: Served) -> None:
    job = served.rig.submit("--set", f"model.arguments.note={json.dumps(HOSTILE)}")
    served.rig.set_device("csd0", state=DeviceState.FAULTY, reason=HOSTILE)
    served.lines["csd0"] += [HOSTILE, "a" * 100_000]
    served.rig.add_round(job, events=(JobEvent(1.0, "lost", HOSTILE, HOSTILE),), missing={HOSTILE: HOSTILE})
    served.feed.ask_now()
    for path, name in (("/", "live_devices"), ("/devices/csd0", "live_log"), (f"/jobs/{job}", "live_events")):
        with served.live(path) as events:
            told = part(events, name, "&lt;script&gt;alert(1)")
        assert not RAW.search(told) and len(told) < 20_000
        assert not RAW.search(served.ask(path).text)


def test_addresses_of_trackers_are_shown_to_nobody(served: Served) -> None:
    given = [served.rig.submit("--set", f'track.mlflow="https://me:secret{n}@x.example"') for n in range(2)]
    for path in (f"/jobs/{given[0]}", f"/compare?job={given[0]}&job={given[1]}"):
        text = served.ask(path).text
        assert "secret" not in text, path


def test_looking_stops_and_removes_nothing(served: Served) -> None:
    job = served.rig.submit()
    for path in (f"/jobs/{job}/stop", f"/jobs/{job}/resume", "/prune"):
        answer = served.ask(path, method="POST", form={"confirmed": "yes", "keep": "0"})
        assert answer.status == 403 and "--control" in answer.text
        assert served.ask(path).status == 405
    assert served.rig.info(job).state != "stopped"
    assert "<form" not in served.ask("/").text


def test_a_token_for_control_stops_resumes_and_prunes(served: Served) -> None:
    served.role = Role.CONTROL
    job = served.rig.submit()
    assert 'action="/prune"' in served.ask("/").text
    stopped = served.ask(f"/jobs/{job}/stop", method="POST")
    assert (stopped.status, stopped.headers["location"]) == (303, f"/jobs/{job}")
    assert served.rig.info(job).state == "stopped"
    wrong = served.ask(f"/jobs/{job}/resume", method="POST", form={"rounds": "many"})
    assert wrong.status == 400 and "whole number" in wrong.text
    assert served.ask(f"/jobs/{job}/resume", method="POST", form={"rounds": " "}).status == 303
    served.rig.wait_for(job, "running")
    assert served.ask("/jobs/77/stop", method="POST").status == 404
    assert served.ask(f"/jobs/{job}/resume", method="POST").status == 409
    served.ask(f"/jobs/{job}/stop", method="POST")
    shown = served.ask("/prune", method="POST", form={"keep": "0"})
    assert f"job {job} (" in shown.text and served.rig.info(job).pruned is None
    served.ask("/prune", method="POST", form={"keep": "0", "confirmed": "yes"})
    served.rig.wait_for_pruned(job)
    assert served.ask("/prune", method="POST", form={"keep": "9" * 5000}).status == 400


def test_what_is_not_there_is_said(served: Served) -> None:
    for path in ("/gone", "/jobs/77", "/devices/csd9", "/live/jobs/77x", "/static/gone", "/jobs/77/model"):
        assert served.ask(path).status == 404, path
    for path in ("/compare?over=miles", "/compare?" + "&".join(f"job={number}" for number in range(9))):
        assert served.ask(path).status == 400, path
    assert served.ask(f"/jobs/{'9' * 40}").status == 404


def test_the_fleet_page_follows_devices_and_jobs(served: Served) -> None:
    with served.live("/") as events:
        assert "csd2" in next(events)["live_devices"]
        served.rig.set_device("csd1", state=DeviceState.FAULTY, reason="the flash is full")
        assert "csd1 is faulty: the flash is full" in part(events, "live_events", "csd1")
        job = served.rig.submit()
        part(events, "live_jobs", f'href="/jobs/{job}"')


def test_the_page_of_a_job_follows_its_rounds(served: Served) -> None:
    job = served.rig.submit()
    served.rig.wait_for(job, "running")
    with served.live(f"/jobs/{job}") as events:
        part(events, "live_state", "running")
        workers = {"csd0": {"loss": 0.5}}
        metrics = {"loss": 0.5, "samples_per_second": 9000.0}
        served.rig.add_round(job, metrics=metrics, by_worker=workers, tunnel={"csd0": (3000, 1000)})
        served.rig.begun[job].context.changed()
        event: dict[str, Any] = {}
        while not event.get("chart_workers", {}).get("names"):
            event |= next(events)
        assert event["chart_scores"]["tables"] == [[[1.0], [0.5]]]
        assert (event["chart_workers"]["names"], event["chart_workers"]["unit"]) == (["csd0"], "loss")
        assert event["chart_shares"]["tables"] == [[[1.0], [1.0]]]
        assert event["chart_training"]["names"] == ["loss"], "thousands would make a flat line of it"
        assert event["chart_speed"]["tables"] == [[[1.0], [9000.0]]]
        assert "3.0 kB" in event["live_workers"]
        served.rig.finish(job)
        told = part(events, "live_state", "done")
        assert "accuracy" in told
    page = served.ask(f"/jobs/{job}").text
    assert "train.batch = 32" in page and "Download" in page


def test_a_part_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    with served.live("/") as events:
        first = next(events)
        assert {"live_devices", "live_jobs", "live_events", "fault"} <= set(first)
        later = next(events)
        assert later and not {"live_jobs", "live_events", "fault"} & set(later)


def test_the_page_of_a_device_has_its_ledger_tunnel_and_log(served: Served) -> None:
    with served.live("/devices/csd0") as events:
        first = next(events)
        assert "parameters" in first["live_ledger"] and "1.0 MB" in first["live_ledger"]
        assert "least_samples" in first["live_policy"] and "nobody" in first["live_answers"]
        served.lines["csd0"].append("one more line")
        told = part(events, "live_log", "one more line")
        assert told.count("begun") == 1
        served.rig.set_device("csd0", state=DeviceState.ABSENT, reason="no answer for 3 s")
        part(events, "live_state", "no answer for 3 s")
    page = served.ask("/devices/csd0").text
    assert "65520" in page and "4.5 kB" in page and "all kinds, by nodes" in page and "5.0 kB" in page


def test_the_page_of_a_device_has_the_mounts_of_its_volume(served: Served) -> None:
    mount = MountStats("csd0", "/mnt/<b>", "", {"read": 10}, {"fs.read": (4,)}, operations={"read": (2, 5)})
    with serve_stats(served.rig.directory / "mounts", lambda: mount):
        page = served.ask("/devices/csd0").text
    assert "/mnt/&lt;b&gt;" in page and "read 6 of 10" in page and '<td class="number">7</td>' in page


def test_the_page_of_a_device_has_its_answers_over_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LEDGER_SECONDS", 0.0)
    for sent in ({"parameters": 7000}, {"parameters": 5000, "metrics": 10}):
        served.note(Answered("job", HOSTILE, exchanges=3, samples={"private/digits": 24}, sent=sent))
    with served.live("/devices/csd0") as events:
        first = next(events)
        assert "private/digits: 48" in first["live_answers"] and "12.0 kB" in first["live_answers"]
        assert not RAW.search(first["live_answers"])
        assert first["chart_answers"]["names"] == ["metrics", "parameters"]
        served.note(InForce("", "1" * 64, {"code": "signed"}))
        part(events, "live_policy", "signed")
        served.audit[:] = []
        served.note(InForce("", "2" * 64, {"code": "listed"}))
        part(events, "live_policy", "listed")


def test_an_audit_log_of_a_hostile_device_takes_little_memory(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2000 entries each may have the length of 128 KiB, and as many kinds as there is room for."""
    monkeypatch.setattr(sources, "LEDGER_SECONDS", 0.0)
    monkeypatch.setattr(sources, "ASK_SECONDS", 0.0)
    found, read, ask = (
        sources.DeviceSource(served.rig.directory, "csd0"),
        list[str](),
        DaemonClient.audit_entries,
    )

    def counted(client: DaemonClient, device: str, first: int) -> tuple[str, ...]:
        read.extend(lines := ask(client, device, first))
        return lines

    monkeypatch.setattr(DaemonClient, "audit_entries", counted)
    for number in range(100):
        served.note(Answered("job", sent={f"{number} {kind:0100}": 1 for kind in range(1000)}))
        assert len(found.detail().entries) < 80
    assert len(read) < 110 and found.detail().entries, "a long log is not read anew again and again"
    served.audit[:] = []
    served.note(Answered("job", sent={f"kind {number}": 1 for number in range(3000)}))
    found.detail()  # which has another log before it
    entries = found.detail().entries
    assert len(entries) == 1 and len(charts.of_answers(entries).curves) <= 12


def test_a_device_that_does_not_answer_holds_up_no_other_page(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: forty open pages of such a device took all threads, and no page was shown."""
    released = threading.Event()
    monkeypatch.setattr(DeviceSource, "detail", lambda _self: released.wait(SECONDS) and DeviceDetail())
    with contextlib.ExitStack() as open_pages:
        open_pages.callback(released.set)
        for _ in range(60):
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
            open_pages.enter_context(contextlib.closing(connection))
            connection.request("GET", "/devices/csd0", None, served._headers({}))
        for _ in range(3):
            assert served.ask("/").status == 200 and not released.is_set()


def test_jobs_are_compared(served: Served) -> None:
    first = served.rig.submit()
    second = served.rig.submit("--set", "train.batch=64")
    served.rig.add_round(first, joules={"csd0": 3.0})
    served.rig.add_round(second, seconds=5.0)
    path = f"/compare?job={first}&job={second}&over=seconds"
    with served.live(path) as events:
        for event in events:
            if len(event.get("chart_comparison", {}).get("names", ())) == 2:
                break
        assert event["chart_comparison"]["tables"] == [[[2.0], [0.5]], [[5.0], [0.5]]]
    page = served.ask(path).text
    assert "train.batch" in page and "<td>64</td>" in page


def test_jobs_that_nobody_looks_at_are_followed_no_longer(served: Served) -> None:
    first, second = served.rig.submit("--devices", "csd0"), served.rig.submit("--devices", "csd1")
    with served.live(f"/jobs/{first}") as events:
        part(events, "live_state", "running")
        assert served.ask(f"/jobs/{second}").status == 200
        eventually(lambda: set(served.feed.snapshot.followed) == {first, second}, "both")
    with served.live(f"/jobs/{second}") as events:
        part(events, "live_state", "running")
        served.ask(f"/jobs/{second}")
        eventually(lambda: first not in served.feed.snapshot.followed, "one alone")


def test_a_model_is_downloaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(served.rig.directory)  # the rig's models have a relative path
    Path("model.safetensors").write_bytes(b"model")
    job = served.rig.submit()
    served.rig.wait_for(job, "running")
    assert served.ask(f"/jobs/{job}/model").status == 409
    served.rig.finish(job)
    answer = served.ask(f"/jobs/{job}/model")
    assert (answer.status, answer.text) == (200, "model")
    assert answer.headers["content-disposition"] == f'attachment; filename="job-{job}.safetensors"'


def test_a_daemon_that_ends_is_told(served: Served) -> None:
    with served.live("/") as events:
        next(events)
        served.rig.server.close()
        assert served.feed._client
        served.feed._client.close()  # as the kernel does at the end of a daemon's process
        part(events, "fault", "daemon")
    assert served.ask("/").status == 200


def test_curves_are_thinned() -> None:
    assert charts.thinned(range(1000), 5) == [0, 250, 500, 749, 999]
    assert charts.thinned([1, 2], 5) == [1, 2]


def test_the_command_prints_urls_that_work(rig: Rig) -> None:
    arguments = ("dashboard", "--fleet", str(rig.directory), "--port", "0", "--control")
    with subprocess.Popen([*MILLPOND, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            lines = [process.stdout.readline() for _ in range(2)]
            for line, words in zip(lines, ("shows the fleet", "also stops"), strict=True):
                url = line.split()[0]
                assert words in line and url.startswith("http://127.0.0.1:")
                opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
                assert "<h1>Fleet rig</h1>" in opener.open(url, timeout=SECONDS).read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


def test_wrong_options_are_refused_in_a_line(rig: Rig) -> None:
    for option, value, words in (
        ("--address", "localhost", "no IP address"),
        ("--address", "192.0.2.1", "choose another one by --port"),
        ("--url", "fleet.example", "no URL such as"),
        ("--url", "https://fleet.example/below?x=1", "no URL such as"),
    ):
        code, _, err = rig.command("dashboard", option, value, "--port", "0")
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_a_machine_without_the_extra_is_told_how_to_have_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.startswith("millpond.host.monitor.dashboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = rig.command("dashboard")
    assert code == 2 and "pip install 'millpond[dashboard]'" in err
