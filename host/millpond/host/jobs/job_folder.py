# SPDX-License-Identifier: Apache-2.0
"""Pure: the names of the files in a job's folder."""

from __future__ import annotations

from typing import Final

LOG = "job.log"
MODEL, BEST = "model.safetensors", "best.safetensors"
CURVES, PREPARED = "curves.json", "prepared.json"
SERVER_LOG, HOST_LOG = "parameter-server.log", "host.log"
STATE = "state"
OUTER = "outer.safetensors"

FILES: Final = {
    MODEL: "The trained model, once the job is done.",
    BEST: "The model of the best score so far.",
    "step-NUMBER.safetensors": "Checkpoints, from which the job resumes.",
    OUTER: "The state with which the present outer round of a resident job has begun.",
    CURVES: "The measured curves of a synchronous job's workers.",
    PREPARED: "The workers of a job without rounds.",
    LOG: "The log that `millpond logs JOB` shows.",
    SERVER_LOG: "The output of the parameter server.",
    HOST_LOG: "The output of the host's own worker.",
    STATE: "The folder of what the host's own worker keeps: local layers, a personal model, a task's state.",
}
"""The files, and their meaning to a user."""
