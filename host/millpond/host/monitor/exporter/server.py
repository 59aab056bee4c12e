# SPDX-License-Identifier: Apache-2.0
"""Edge: serves a fleet's figures in Prometheus' format by HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpond.base.errors import LocalError
from millpond.host.monitor.exporter.catalogue import METRICS, Sample
from millpond.host.monitor.exporter.samples import samples_of
from millpond.host.monitor.exporter.source import FleetSource


class FleetCollector(Collector):
    """Collects the figures of a fleet at each scrape."""

    def __init__(self, source: FleetSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that have a sample."""
        return families(samples_of(self._source.read()))

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that no scrape is needed to register this."""
        return ()


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Yield the metrics of samples in the order of the documents."""
    found: dict[str, list[Sample]] = {metric.name: [] for metric in METRICS.values()}
    for sample in samples:
        found[sample.metric.name].append(sample)
    for name, own in found.items():
        if own:
            metric = own[0].metric
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.about, labels=metric.labels)
            for sample in own:
                family.add_metric(sample.labels, sample.value)
            yield family


def text(source: FleetSource) -> str:
    """Return all figures of a fleet once, in Prometheus' text format."""
    source.read_once()
    return generate_latest(_registry(source)).decode()


def _registry(source: FleetSource) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(source))
    return registry


def serve(source: FleetSource, address: str, port: int) -> WSGIServer:
    """Serve the figures at an address, by threads of this process, and return the server. Raises
    LocalError.
    """
    try:
        server, _ = start_http_server(port, address, _registry(source))
    except OSError as error:
        raise LocalError(f"{address}:{port}: {error.strerror or error}") from None
    return server
