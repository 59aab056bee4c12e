# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): the repetitions that worked, by data set and model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from millpond.base.errors import LocalError
from millpond.linux.files import write_durably
from millpond.train.repeats import FixedRepeats


class RememberedRepeats:
    """The repetitions of ``name``, a data set and a model, in a JSON file. Of several trainings the one with
    the best score is remembered.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    @property
    def rule(self) -> FixedRepeats | None:
        """The rule that worked, None for what was not trained yet. Raises LocalError."""
        known = self._read().get(self._name)
        return FixedRepeats(max(1, round(known["repeats"]))) if known else None

    def keep(self, repeats: list[int], score: float) -> None:
        """Remember a training with this best score, unless a better one is known. Raises LocalError."""
        known = self._read()
        if self._name in known and known[self._name]["score"] <= score:
            return
        known[self._name] = {"repeats": fmean(repeats), "score": score}
        try:
            write_durably(self._path, json.dumps(known, indent=1).encode())
        except OSError as error:
            raise LocalError(f"{self._path}: {error.strerror}") from None

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
            return {
                name: {"repeats": float(each["repeats"]), "score": float(each["score"])}
                for name, each in found.items()
            }
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise LocalError(f"{self._path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LocalError(f"{self._path} does not hold remembered repetitions") from None
