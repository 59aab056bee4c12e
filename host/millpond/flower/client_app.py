# SPDX-License-Identifier: Apache-2.0
"""Edge (flwr): a fleet as a ClientApp of Flower: each message is an order to its resident job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from millpond.base.errors import ConfigError
from millpond.flower.arrays import arrays_of, buffers_of, state_of
from millpond.flower.resident import ResidentJob
from millpond.train.state import layout

ARRAYS, METRICS, CONFIG, WEIGHT = "arrays", "metrics", "config", "num-examples"
"""The records of messages, by the names that Flower's strategies give them."""


def client(job: str | Path | None = None, mods: Sequence[Any] = ()) -> ClientApp:
    """Return the ClientApp of a fleet: it trains by the resident job of the file ``job``, or by the one that
    the SuperNode's ``--node-config`` names, with the fleet's directory:
    ``fleet="/var/lib/millpond" job="/etc/millpond/job.toml"``; ``test="/data/test"`` is its ``data.test``.

    Messages are ``train``, ``evaluate``, and the queries ``model`` (first values) and ``end`` (the arrays of
    the message are the model, and the job ends). A reply of ``train`` weighs as many samples as were used.
    ``mods`` of Flower, such as ``fixedclipping_mod``, are around ``train`` alone.
    """
    app = ClientApp()
    for register, answer in (
        (app.train(mods=list(mods)), _train),
        (app.evaluate(), _evaluate),
        (app.query("model"), _model),
        (app.query("end"), _end),
    ):
        register(_handler(answer, job))
    return app


def _handler(answer: Any, job: str | Path | None) -> Any:
    def handle(message: Message, context: Context) -> Message:
        return Message(answer(message, resident_job(context.node_config, job)), reply_to=message)

    return handle


def resident_job(config: dict[str, Any], job: str | Path | None) -> ResidentJob:
    """Return the job that a node's configuration names, or else ``job``. Raises ConfigError."""
    path, fleet = config.get("job", job), config.get("fleet")
    if not path or not fleet:
        key = "fleet" if path else "job"
        raise ConfigError(f'--node-config: {key}: it is missing; such as {key}="/path"')
    settings = {"data.test": config["test"]} if "test" in config else {}
    return ResidentJob(Path(str(fleet)), Path(str(path)), settings)


def _model(_message: Message, job: ResidentJob) -> RecordDict:
    model, state = job.model()
    config = ConfigRecord({"buffers": buffers_of(model.tensors)})
    return RecordDict({ARRAYS: arrays_of(model.tensors, state), CONFIG: config})


def _train(message: Message, job: ResidentJob) -> RecordDict:
    began, arrays = time.time(), message.content[ARRAYS]
    done = job.order("train", _key(message), lambda model: state_of(model.tensors, arrays))
    tensors, answer, state = done.model.tensors, done.answer, done.values
    end = layout.parameters_end(tensors)
    state[:end] += done.state[:end]
    metrics = {name: total / max(answer.samples, 1) for name, total in answer.sums.items()}
    trained = arrays_of(tensors, state)
    times = {
        "process-began": psutil.Process().create_time(),
        "began": began,
        "ended": time.time(),
        "ordered-seconds": done.seconds,
        "fleet-seconds": answer.seconds,
    }
    record = MetricRecord({WEIGHT: answer.samples, **metrics, **times})
    return RecordDict({ARRAYS: trained, METRICS: record})


def _evaluate(message: Message, job: ResidentJob) -> RecordDict:
    arrays = message.content[ARRAYS]
    done = job.order("score", _key(message), lambda model: state_of(model.tensors, arrays))
    figures = {
        f"{place}-{name}": float("nan") if value is None else value
        for place, found in done.answer.scores.items()
        for name, value in found.items()
    }
    return RecordDict({METRICS: MetricRecord({WEIGHT: 1, **figures})})  # each fleet counts as much


def _end(message: Message, job: ResidentJob) -> RecordDict:
    arrays = message.content[ARRAYS]
    number = job.end(f"{message.metadata.run_id}/end", lambda model: state_of(model.tensors, arrays))
    return RecordDict({CONFIG: ConfigRecord({"job": number})})


def _key(message: Message) -> str:
    """Return the name of an order, but for its state: the same for a message that is sent again."""
    config = message.content.get(CONFIG)
    number = config["server-round"] if config and "server-round" in config else 0
    return f"{message.metadata.run_id}/{number}"
