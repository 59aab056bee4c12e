# SPDX-License-Identifier: Apache-2.0
"""``millpond metrics``: a fleet's figures in Prometheus' format, and the documents' rules and dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millpond.fs.client.metrics import MountStats
from millpond.fs.mount.stats_socket import serve_stats
from millpond.host.api.daemon import JobInfo
from millpond.host.cli.views import metrics as command
from millpond.host.monitor.exporter import server, source
from millpond.host.monitor.exporter.catalogue import JOB_SCORE, METRICS
from millpond.host.monitor.exporter.samples import samples_of
from millpond.host.monitor.exporter.source import FleetSource, shown
from millpond.host.records.jobs import JobEvent
from millpond.wire.control_messages import Ledger

from ..waiting import eventually
from .daemon_rig import LEDGER, Rig

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
Values = dict[tuple[str, ...], float]


def values(text: str) -> Values:
    """Return the samples of a text by name and values of labels, in the order of the labels' names."""
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def promtool(*arguments: object, text: str = "") -> str:
    """Return what promtool says of these files or this text; fail if it refuses."""
    if not (program := shutil.which("promtool")):
        pytest.skip("promtool is not installed: images/prerequisites.sh tests")
    done = subprocess.run(
        [program, *map(str, arguments)], input=text, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def with_rounds(rig: Rig) -> int:
    """Return a running job with two rounds."""
    number = rig.submit()
    rig.wait_for(number, "running")
    share = {"workers": {"csd0": 30, "csd1": 10}, "samples": 40, "tunnel": {"csd0": (100, 40)}}
    rig.add_round(number, **share, joules={"csd0": 1.5}, missing={"csd2": "late"})
    events = (JobEvent(1.0, "plan", "", "csd0 30, csd1 10"),)
    scores = {"host": {"accuracy": 0.75, "loss": None}}
    rig.add_round(number, **share, round=2, scores=scores, metrics={"loss": 0.5}, events=events)
    return number


def test_the_figures_of_a_fleet(rig: Rig) -> None:
    with_rounds(rig)
    took, asked = {"read": (1, 2)}, {"read": 10}
    mount = MountStats("csd0", "/mnt", "", asked, {"fs.read": (4,)}, 300, 200, operations=took)
    with serve_stats(rig.directory / "mounts", lambda: mount):
        code, out, _ = rig.command("metrics", "--once")
    found = values(out)
    assert code == 0
    expected = {
        ("millpond_up",): 1,
        ("millpond_device_state", "csd1", "ready"): 1,
        ("millpond_device_state", "csd1", "faulty"): 0,
        ("millpond_device_info", "plain", "emulated", "csd1", "x86_64", "1"): 1,
        ("millpond_device_flash_bytes", "csd2"): 8 << 30,
        ("millpond_device_energy_joules_total", "csd0", "declared"): 120,
        ("millpond_device_sent_bytes_total", "csd0", "parameters"): 1000,
        ("millpond_device_sender_bytes_total", "csd0", "nodes"): 900,
        ("millpond_device_sender_bytes_total", "csd0", "made up"): None,
        ("millpond_mount_operations_total", "csd0", "read"): 3,
        ("millpond_mount_requests_total", "mount", "csd0", "read"): 6,
        ("millpond_mount_requests_total", "device", "csd0", "read"): 4,
        ("millpond_mount_read_ahead_bytes_total", "csd0"): 300,
        ("millpond_mount_read_ahead_used_bytes_total", "csd0"): 200,
        ("millpond_tunnel_bytes_total", "csd0", "to_device"): 3000,
        ("millpond_tunnel_dropped_packets_total", "csd0", "from_device"): 1,
        ("millpond_jobs", "running"): 1,
        ("millpond_job_state", "1", "running"): 1,
        ("millpond_job_round_seconds_total", "1"): 4,
        ("millpond_job_samples_total", "1", "csd0"): 60,
        ("millpond_job_worker_share_ratio", "1", "csd1"): 0.25,
        ("millpond_job_missed_rounds_total", "1", "csd2"): 1,
        ("millpond_job_tunnel_bytes_total", "csd0", "from_device", "1"): 80,
        ("millpond_job_energy_joules_total", "1", "csd0"): 1.5,
        ("millpond_job_events_total", "1", "plan"): 1,
        ("millpond_job_score", "accuracy", "1", "host"): 0.75,
        ("millpond_job_score", "loss", "1", "train"): 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("millpond_job_score", "loss", "1", "host") not in found  # it was not finite
    assert not promtool("check", "metrics", text=out)


@pytest.mark.expected_log("no host daemon runs")
def test_a_daemon_that_is_down_is_a_figure(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.server.close()
    code, out, _ = rig.command("metrics", "--once")
    assert (code, values(out)) == (0, {("millpond_up",): 0})
    assert caplog.text.count("no host daemon runs") == 1


@pytest.mark.expected_log("no host daemon runs|answers again")
def test_a_served_fleet_outlives_its_daemon(open_rig: Callable[[], Rig]) -> None:
    rig = open_rig()
    number = with_rounds(rig)
    source = FleetSource(rig.directory, period=0.0)
    source.start()
    web = server.serve(source, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{web.server_port}/metrics"
    samples = ("millpond_job_samples_total", str(number), "csd0")

    def scrape() -> Values:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return values(answer.read().decode())

    def has(key: tuple[str, ...], value: float) -> None:
        eventually(lambda: scrape().get(key) == value, f"{key} of {value}", every=0.05)

    try:
        has(samples, 60)
        has(("millpond_device_private_bytes", "csd0"), 4096)
        rig.add_round(number, round=3)
        rig.begun[number].context.changed()
        has(samples, 70)
        rig.server.close()
        assert scrape() == {("millpond_up",): 0}
        again = open_rig()
        assert scrape()[("millpond_up",)] == 1
        has(samples, 70)
        again.wait_for(number, "running")
    finally:
        web.shutdown()
        web.server_close()


def test_a_device_blinds_nobody_to_the_ledgers_of_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by silence nor by a flood of kinds, each of which would be a series."""
    ended, flood = threading.Event(), {f"kind {number}": 1 for number in range(40_000)}
    answers = {"csd0": Ledger({"parameters": 7, **flood}, {"x" * 9000: 1}, 1), "csd1": LEDGER, "csd2": LEDGER}

    def control(name: str) -> Any:
        if name == "csd2":
            ended.wait(20)
        return nullcontext(SimpleNamespace(call=lambda *_arguments: answers[name]))

    for name in answers:
        cast(Any, rig.devices.get(name)).control = lambda _deadline, name=name: control(name)
    monkeypatch.setattr(source, "ANSWER_SECONDS", 1.0)
    found = FleetSource(rig.directory)
    found.read_details()
    ended.set()
    assert found._details
    ledgers = found._details.ledgers
    assert set(ledgers) == {"csd0", "csd1"}
    assert len(ledgers["csd0"].sent) <= 512 and max(map(len, ledgers["csd0"].canaries)) <= 64
    sent = [each for each in samples_of(found.read()) if each.metric.name.endswith("sent_bytes_total")]
    assert {each.labels for each in sent} == {
        ("csd0", "parameters"),
        ("csd1", "parameters"),
        ("csd1", "metrics"),
    }


def test_many_scrapes_take_one_place_at_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the host may scrape, and the places are those of the daemon's owner."""
    taken, most, together = Counter[str](), 0, threading.Barrier(6)

    def connect(*_arguments: object, **_options: object) -> None:
        nonlocal most
        taken["now"] += 1
        most = max(most, taken["now"])
        ended.wait(0.02)
        taken["now"] -= 1
        raise ConnectionError

    def scrape() -> None:
        together.wait(20)
        found.read()

    monkeypatch.setattr(source, "DaemonClient", connect)
    found, ended = FleetSource(tmp_path), threading.Event()
    threads = [threading.Thread(target=scrape) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_running_jobs_are_shown_before_newer_ones() -> None:
    def job(number: int, state: str) -> JobInfo:
        return JobInfo(number, "a", state, "", "", 0, 1, "round", "", None, None, 0, 0.0, None)

    jobs = [job(1, "running"), job(2, "done"), *(job(number, "queued") for number in range(3, 30))]
    assert [each.id for each in shown(jobs, 3)] == [1, 29, 28]


def test_names_and_labels_follow_the_practice_of_prometheus() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"millpond(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not {"job", "instance"} & set(metric.labels)  # Prometheus' own
        assert metric.about.endswith(".")


def test_a_label_cannot_forge_a_sample() -> None:
    """A job's author names its figures."""
    name = 'a"} 1\nmillpond_up 7 # \\'
    (family,) = server.families([JOB_SCORE.of(0.5, "1", "host", name)])
    registry = server.CollectorRegistry(auto_describe=False)
    registry.register(type("Given", (), {"collect": lambda self: [family]})())
    assert values(server.generate_latest(registry).decode()) == {
        ("millpond_job_score", name, "1", "host"): 0.5
    }


@pytest.mark.parametrize("listen", ["9748", "127.0.0.1:", "127.0.0.1:70000", ":1"])
def test_an_address_that_is_none_is_refused(rig: Rig, listen: str) -> None:
    code, _, err = rig.command("metrics", "--listen", listen)
    assert code == 2 and f"such as 127.0.0.1:{command.PORT}" in err


def test_an_address_that_is_taken_is_refused(rig: Rig) -> None:
    source = FleetSource(rig.directory)
    web = server.serve(source, "127.0.0.1", 0)
    try:
        code, _, err = rig.command("metrics", "--listen", f"127.0.0.1:{web.server_port}")
    finally:
        web.shutdown()
        web.server_close()
    assert code == 2 and "Address already in use" in err


def expressions() -> dict[str, str]:
    """Return the expressions of the dashboard by a name that a rule may have."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = {"$__rate_interval": "5m", "$instance": ".*", "$device": ".*", "$job_id": ".*"}
    for name, value in variables.items():
        texts = [text.replace(name, value) for text in texts]
    return {f"panel:{number}": text for number, text in enumerate(texts)}


def test_rules_and_dashboard_use_metrics_that_there_are() -> None:
    texts = [*expressions().values(), (MONITORING / "alerts.yml").read_text()]
    board = (MONITORING / "grafana-dashboard.json").read_text()
    known = {metric.name: set(metric.labels) for metric in METRICS.values()}
    assert not set(re.findall(r"\bmillpond_\w+", "\n".join([*texts, board]))) - known.keys()
    for text in texts:
        for name, selector in re.findall(r"\b(millpond_\w+)\{([^}]*)\}", text):
            named = set(re.findall(r'(\w+)=~?"', selector)) - {"instance"}
            assert named <= known[name], f"{name}{{{selector}}}"


def test_rules_and_dashboard_are_taken_by_prometheus(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(MONITORING / "prometheus.yml", tmp_path)
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")
    rules = [{"record": name, "expr": text} for name, text in expressions().items()]
    (tmp_path / "board.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", tmp_path / "board.yml")


def _alerts(series: Iterable[tuple[str, str]], minutes: int, *expected: dict[str, Any]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": given} for name, given in series],
        "alert_rule_test": [
            {
                "eval_time": f"{minutes}m",
                "alertname": each.pop("alertname"),
                "exp_alerts": [{"exp_labels": each}],
            }
            for each in expected
        ],
    }


def test_alerts_fire(tmp_path: Path) -> None:
    """By promtool's own tests of rules."""
    state = 'millpond_job_state{instance="h", job_id="3", state="%s"}'
    text = (MONITORING / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(re.sub(r" *annotations:\n +summary:.*\n", "", text))
    stalled = {"instance": "h", "job_id": "3", "severity": "warning", "state": "running"}
    tests = [
        _alerts(
            [('millpond_up{instance="h"}', "0x10")],
            5,
            {
                "alertname": "MillpondDaemonDown",
                "instance": "h",
                "severity": "critical",
            },
        ),
        _alerts(
            [(state % "running", "1x90"), ('millpond_job_rounds_total{instance="h", job_id="3"}', "4x90")],
            80,
            {
                "alertname": "MillpondJobStalled",
                **stalled,
            },
        ),
        _alerts(
            [
                (state % "failed", "1x9"),
                ('millpond_job_ended_timestamp_seconds{instance="h", job_id="3"}', "60x9"),
            ],
            5,
            {
                "alertname": "MillpondJobFailed",
                **stalled,
                "state": "failed",
            },
        ),
    ]
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yml")
