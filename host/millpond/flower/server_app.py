# SPDX-License-Identifier: Apache-2.0
"""Edge (flwr): the rounds of a ServerApp over fleets: saved after each, ended on each fleet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from safetensors.numpy import load_file, save_file

from millpond.flower.client_app import ARRAYS, CONFIG

POLL_SECONDS = 0.1
END_SECONDS, MODEL_SECONDS = 600.0, 600.0
_KEPT = ("velocity", "m_t", "v_t", "momentum_vector")
"""What DiLoCo, Flower's adaptive strategies and FedAvgM keep between rounds: arrays by name, or a list."""


class DiLoCo(FedAvg):  # type: ignore[misc]
    """FedAvg whose mean difference is the gradient of an outer SGD step with Nesterov's momentum (DiLoCo,
    Douillard et al. 2023, algorithm 1): ``v = momentum * v + d``, ``w = w - rate * (d + momentum * v)`` with
    ``d`` the old parameters less the mean of the new ones. ``buffers`` become their mean.
    """

    def __init__(self, outer_rate: float = 0.7, outer_momentum: float = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self._rate, self._momentum, self.buffers = outer_rate, outer_momentum, frozenset[str]()
        self.velocity: dict[str, Any] = {}
        self._old: ArrayRecord | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See Flower."""
        self._old = arrays
        found: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return found

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See Flower."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None or self._old is None:
            return mean, metrics
        new = {name: self._stepped(name, mean[name].numpy()) for name in mean}
        return ArrayRecord({name: Array(values) for name, values in new.items()}), metrics

    def _stepped(self, name: str, mean: Any) -> Any:
        if name in self.buffers or self._old is None:
            return mean
        old = self._old[name].numpy()
        difference = old - mean
        velocity = self._momentum * self.velocity.get(name, np.zeros_like(old)) + difference
        self.velocity[name] = velocity
        stepped = old - self._rate * (difference + self._momentum * velocity)
        return np.asarray(stepped, np.float32)


class _Prompt:
    """A Grid that looks for replies every POLL_SECONDS, where Flower's own looks every 3 s."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """See Flower."""
        left, found = set(self._grid.push_messages(messages)), list[Message]()
        deadline = time.monotonic() + (timeout or 0.0)
        while left and (timeout is None or time.monotonic() < deadline):
            replies = list(self._grid.pull_messages(left))
            found += replies
            left -= {reply.metadata.reply_to_message_id for reply in replies}
            if left:
                time.sleep(POLL_SECONDS)
        return found


def serve(grid: Grid, context: Context, make: Callable[..., Strategy] = FedAvg) -> None:
    """Run the rounds that ``context.run_config`` asks for, by the strategy that ``make`` returns for the
    options of FedAvg. After each round the arrays are saved in the folder ``state``: a run that finds them
    goes on there. At the end each fleet's job ends with the arrays as its model.
    """
    config, prompt = context.run_config, _Prompt(grid)
    hosts, rounds = int(config["hosts"]), int(config["rounds"])
    least = int(config.get("least-hosts", hosts))
    strategy = make(
        fraction_evaluate=float(config.get("evaluate", 1.0)),
        min_train_nodes=least,
        min_evaluate_nodes=least,
        min_available_nodes=least,
    )
    saved = _Saved(Path(str(config["state"])), strategy)
    arrays = saved.arrays
    saved.watch()
    if rounds > saved.rounds:
        first = _first_values(prompt, hosts, _inner(strategy))  # also for the buffers, and the arrays' order
        arrays = ArrayRecord({name: arrays[name] for name in first}) if arrays else first
        result = strategy.start(
            prompt,
            arrays,
            num_rounds=rounds - saved.rounds,
            timeout=float(config.get("timeout", 3600.0)),
        )
        arrays = result.arrays or arrays
    _end(prompt, arrays, hosts)


class _Saved:
    """The arrays after the last round, what the strategy keeps, and a line of ``rounds.jsonl`` a round."""

    def __init__(self, folder: Path, strategy: Any) -> None:
        self._folder, self._strategy, self.rounds = folder, strategy, 0
        self._file = folder / "model.safetensors"
        self.arrays: ArrayRecord | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._load()

    def _load(self) -> None:
        values = load_file(self._file)
        self.rounds = int(values.pop("rounds:")[0])
        for about in _KEPT:
            names = sorted(name for name in values if name.startswith(f"{about}:"))
            kept = {name.removeprefix(f"{about}:"): values.pop(name) for name in names}
            if kept and hasattr(inner := _inner(self._strategy), about):
                setattr(inner, about, list(kept.values()) if about == "momentum_vector" else kept)
        self.arrays = ArrayRecord({name: Array(each) for name, each in values.items()})

    def watch(self) -> None:
        """Save the outcome of each round from now on."""
        aggregate, sent, before = self._strategy.aggregate_train, [time.time()], self.rounds
        configure, score = self._strategy.configure_train, self._strategy.aggregate_evaluate

        def configured(server_round: int, *arguments: Any) -> Iterable[Message]:
            messages = list(configure(before + server_round, *arguments))
            sent[0] = time.time()
            return messages

        def aggregated(server_round: int, replies: Iterable[Message]) -> Any:
            came, known = time.time(), list(replies)
            arrays, metrics = aggregate(before + server_round, known)
            if arrays is not None:
                self._save(arrays)
            whole = [dict(each.content["metrics"]) for each in known if not each.has_error()]
            self._note({"round": self.rounds, "sent": sent[0], "came": came, "replies": whole})
            return arrays, metrics

        def scored(server_round: int, replies: Iterable[Message]) -> Any:
            metrics = score(server_round, replies)
            if metrics is not None:
                self._note({"round": self.rounds, "scores": dict(metrics)})
            return metrics

        self._strategy.aggregate_evaluate = scored
        self._strategy.configure_train, self._strategy.aggregate_train = configured, aggregated

    def _note(self, line: dict[str, Any]) -> None:
        with (self._folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, arrays: ArrayRecord) -> None:
        self.rounds += 1
        values = {name: np.ascontiguousarray(each.numpy()) for name, each in arrays.items()}
        for about in _KEPT:
            kept = getattr(_inner(self._strategy), about, None) or {}
            if isinstance(kept, list):
                kept = {f"{number:06d}": each for number, each in enumerate(kept)}
            values |= {f"{about}:{name}": np.ascontiguousarray(each) for name, each in kept.items()}
        fresh = self._file.with_suffix(".part")
        save_file(values | {"rounds:": np.array([self.rounds], np.int64)}, fresh)
        fresh.replace(self._file)


def _inner(strategy: Any) -> Any:
    """Return the strategy that averages, inside wrappers such as those of differential privacy."""
    return _inner(strategy.strategy) if hasattr(strategy, "strategy") else strategy


def _first_values(grid: _Prompt, hosts: int, strategy: Any) -> ArrayRecord:
    """Ask one fleet for the first values. Raises RuntimeError if none has any."""
    deadline, error = time.monotonic() + MODEL_SECONDS, "no host has come"
    while time.monotonic() < deadline:
        for node in list(grid.get_node_ids())[:hosts]:
            message = Message(content=RecordDict({}), message_type="query.model", dst_node_id=node)
            for reply in grid.send_and_receive([message], timeout=MODEL_SECONDS):
                if not reply.has_error():
                    strategy.buffers = frozenset(reply.content[CONFIG]["buffers"])
                    return reply.content[ARRAYS]
                error = reply.error.reason
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"no fleet has told its first values: {error}")


def _end(grid: _Prompt, arrays: ArrayRecord, hosts: int) -> None:
    """End the job of each fleet, also of those that come back late. Raises RuntimeError."""
    deadline, done = time.monotonic() + END_SECONDS, set[int]()
    while len(done) < hosts and time.monotonic() < deadline:
        content = RecordDict({ARRAYS: arrays})
        messages = [
            Message(content=content, message_type="query.end", dst_node_id=node)
            for node in set(grid.get_node_ids()) - done
        ]
        replies = grid.send_and_receive(messages, timeout=90.0)
        done |= {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
        time.sleep(POLL_SECONDS)
    if len(done) < hosts:
        raise RuntimeError(f"{len(done)} of {hosts} fleets have ended their jobs")
