# SPDX-License-Identifier: Apache-2.0
"""Pure: the tables of a training job that no worker needs: its evaluation, limits and trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.base.keys import Key


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """The model is scored after ``every`` rounds or epochs, or outer rounds, and after the last one. Only
    sums and counts leave a device. Without ``metric`` it is "accuracy" if there is one, else "loss". Without
    ``mode`` it is "min" for a loss, else "max".
    """

    every: Annotated[
        int, Key("rounds or epochs (of a resident job, outer rounds) between evaluations", above=0)
    ] = 1
    on: Annotated[
        tuple[Literal["host", "devices"], ...],
        Key('where the model is scored; "devices": on held-out private samples'),
    ] = ("host",)
    held_out: Annotated[
        float, Key('share of a device\'s private samples that is kept for scoring, if "devices" score', 0, 1)
    ] = 0.1
    metric: Annotated[
        str,
        Key(
            "metric that decides, on the first of `on`, which model is best.safetensors",
            example='"accuracy"',
        ),
    ] = ""
    mode: Annotated[
        Literal["", "max", "min"],
        Key('whether a greater ("max") or a smaller ("min") value of the metric is better', example='"max"'),
    ] = ""
    target: Annotated[
        float | None, Key("the job ends when the metric has reached this value", example="0.97")
    ] = None
    patience: Annotated[
        int | None, Key("the job ends after this many evaluations without a better one", above=0, example="5")
    ] = None


@dataclass(frozen=True, slots=True)
class LimitsSpec:
    """The limits of a job. A device's claim beyond them is refused."""

    wait: Annotated[float, Key("seconds without progress after which the job fails", above=0)] = 300.0
    most_samples: Annotated[int, Key("most samples that a device may claim to have", above=0)] = 1 << 24
    most_share: Annotated[float, Key("largest share of all samples that one device may have", above=0)] = 1.0
    most_count: Annotated[float, Key("largest count of a loss per sample, such as of tokens", above=0)] = (
        65536.0
    )
    clip: Annotated[
        float | None,
        Key(
            "largest L2 norm of an update per sample; a larger update is scaled down", above=0, example="1.0"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class OuterSpec:
    """A resident job: it waits until a program outside orders an outer round, of ``every`` rounds or epochs
    from a state that the program sends, and answers with what has changed. So several fleets train one model;
    see `millpond federate`. The job ends when it is told so: neither its ``rounds`` nor a ``target`` ends it.
    """

    every: Annotated[int, Key("rounds or epochs of the fleet in one outer round", above=0)] = 1


@dataclass(frozen=True, slots=True)
class TrackSpec:
    """The trackers of a job. The program that follows the job, such as ``millpond train``, writes to them, as
    its own user: neither the daemon nor a device does. A tracker that fails does not disturb the job.
    """

    tensorboard: Annotated[
        str, Key("a folder; the job's scores, losses and shares are a run in it", example='"runs/"')
    ] = ""
    mlflow: Annotated[
        str,
        Key("the address of an MLflow server, or a folder for its files", example='"http://127.0.0.1:5000"'),
    ] = ""
