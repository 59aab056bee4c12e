# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): the metrics that ``millpond metrics`` serves."""

from __future__ import annotations

from documents.markdown import code, page, table
from millpond.host.monitor.exporter.catalogue import METRICS


def exported_page() -> str:
    """Return the page of the metrics for Prometheus."""
    rows = [
        [code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), metric.about]
        for metric in METRICS.values()
    ]
    return page(
        "Metrics for Prometheus",
        "`millpond metrics` serves these; [Watch a fleet with Prometheus](../how-to/metrics.md) says how. A"
        " figure that a device does not know is left out. A counter begins at 0 when what counts is started"
        " anew: the agent, the daemon's end of a tunnel, or a mount.",
        table(["metric", "kind", "labels", "meaning"], rows),
    )
