# SPDX-License-Identifier: Apache-2.0
"""Edge: whether the devices of a job may add its updates among themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection

from millpond.host.jobs.context import JobContext, JobFailed
from millpond.host.records.jobs import HOST
from millpond.host.workers.masked_reduction import MaskedReduction
from millpond.host.workers.node_reduction import DATAGRAMS, NodeReduction
from millpond.host.workers.parameter_server import ParameterServer
from millpond.train.job.spec import Job

_MOST_NOISE = 2.0
"""Noise of all devices together, over that which the fewest devices of a sum add."""


def masked_reduction(
    job: Job, server: ParameterServer, nodes: NodeReduction | None
) -> MaskedReduction | None:
    """Return the reduction of masked updates, by ``nodes`` if they can, None for a job without masks. Raises
    JobFailed.
    """
    if not job.work.secure:
        return None
    combine, fault = server.ready.combine, ""
    if combine.votes or server.ready.local.normalized:  # of a class of the user's own
        fault = "the strategy is more than a mean of differences"
    elif buffer := next((tensor.name for tensor in server.tensors if tensor.buffer), ""):
        fault = f"no clip bounds the buffer '{buffer}': keep it on its device by federated.local"
    if fault:
        raise JobFailed(f"federated: secure: {fault}")
    clip, noise = job.work.clip, 0.0
    if job.privacy:
        noise = _MOST_NOISE * job.privacy.multiplier(job.total) * clip
    return MaskedReduction(server.mean, clip, noise, nodes)


def noisy_bound(job: Job) -> Callable[[Collection[int]], float] | None:
    """Return what bounds the terms of a sum of updates with noise, by their samples; None without noise."""
    privacy, clip, rounds = job.privacy, job.limits.clip, job.total
    if privacy is None or clip is None:
        return None
    return lambda samples: privacy.largest(clip, rounds, samples)


def node_reduction(
    job: Job,
    context: JobContext,
    server: ParameterServer,
    log: logging.Logger,
    closers: list[Callable[[], None]],
) -> NodeReduction | None:
    """Return the reduction by devices, None for a job whose updates the host adds. ``closers`` are to be
    called at the job's end. Raises JobFailed.
    """
    combine, devices = server.ready.combine, context.devices
    have_lan = all(device.config.lan for device in devices.values())
    reason = job.adds_on_host or (f"the rule '{combine.rule}'" if combine.votes else "")
    if job.aggregate == HOST or (job.aggregate == "auto" and (reason or not have_lan)):
        return None
    if reason or (job.aggregate != "auto" and job.aggregate not in devices):
        raise JobFailed(f"aggregate: '{job.aggregate}': {reason or 'no device that takes part'}")
    if job.topology == DATAGRAMS and not have_lan:
        raise JobFailed("topology: 'udp' is for devices that have a LAN of their own")
    if not job.repair and not server.ready.step:
        raise JobFailed("repair: lost datagrams are left out where the mean alone is the step, as in FedAvg")
    if not have_lan:
        reachable = contextlib.ExitStack()
        reachable.enter_context(context.between(list(devices)))
        closers.append(reachable.close)
    spec = job.averaging
    # The host needs each state: a late update has changed the buffers of an old one, or it removes the masks.
    step = None if job.work.secure else server.ready.step
    in_rounds = job.synchronous is None and spec.fraction == 1 and spec.late != "carry"
    holder = server if in_rounds and server.ready.stateless and not job.work.secure else None
    nodes = NodeReduction(job.aggregate, job.topology, log, step, holder, repair=job.repair)
    closers.append(nodes.close)
    return nodes
