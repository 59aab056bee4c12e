"""Pure: the error of samples that cannot be used, and what of it may leave a device."""

from __future__ import annotations

from pathlib import Path

from millpond.base.errors import LocalError

_USUAL = ("images.npy", "labels.npy")


class DataError(LocalError):
    """The samples cannot be used. Names files, those in ``found`` not from the job; never what is in them."""

    def __init__(self, text: str, *found: str) -> None:
        super().__init__(text)
        self._found = [name for name in found if Path(name).name not in _USUAL]

    @property
    def discreet(self) -> str:
        """The text without names that were only found on the device: a name can tell of a person."""
        text = str(self)
        for name in self._found:
            text = text.replace(name, "a file of the samples")
        return text
