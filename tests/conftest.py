"""For all tests: a warning in the log that nobody expected is a failure."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest


class _Unexpected(logging.Handler):
    """Collects the records from WARNING up that match none of ``expected``."""

    def __init__(self, expected: list[re.Pattern[str]]) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._expected = expected

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not any(pattern.search(text) for pattern in self._expected):
            self.lines.append(f"{record.levelname} {record.name}: {text}")


@pytest.fixture(autouse=True)
def no_unexpected_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on log records from WARNING up, but for those of ``@pytest.mark.expected_log(regex)``."""
    marks = request.node.iter_markers("expected_log")
    handler = _Unexpected([re.compile(pattern) for mark in marks for pattern in mark.args])
    root = logging.getLogger()
    root.addHandler(handler)
    yield
    root.removeHandler(handler)
    if handler.lines:
        pytest.fail("unexpected in the log:\n" + "\n".join(handler.lines), pytrace=False)
