# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): seeds for the random draws of models, which the host cannot know.

A host that knows what a model draws for each sample, such as the masks of dropout, can choose seeds with
which the samples of a group have known and different weights; then as many answers as samples show each of
them. So seeds follow from the request and from a key that stays on the device: the same request has the same
draws on this device, and nobody else can compute them.
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from millpond.linux.files import write_secret
from millpond.train.protocol import Work

log = logging.getLogger(__name__)

_SIZE = 32


class SecretDraws:
    """Seeds by the key in ``file``, made once. If it cannot be kept, it is for this process alone."""

    def __init__(self, file: Path) -> None:
        self._key = b""
        try:
            self._key = file.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be read: %s", file, error.strerror)
        if len(self._key) == _SIZE:
            return
        self._key = os.urandom(_SIZE)
        try:
            write_secret(file, self._key)
        except OSError as error:
            log.warning("%s cannot be written: %s", file, error.strerror)

    def seed(self, request: Work) -> int:
        """Return the seed for a request, above 0."""
        text = repr((request.seed, request.epoch, request.ranges, request.synthetic))
        return 1 + int.from_bytes(hmac.digest(self._key, text.encode(), "sha256")[:7], "little")
