# SPDX-License-Identifier: Apache-2.0
"""Pure: the energy of a round, formatted for users."""

from __future__ import annotations

from millpond.host.records.jobs import Round

_NAMES = {"rapl": "RAPL", "hwmon": "hwmon", "declared": "declared watts"}


def per_image(result: Round) -> float | None:
    """Return the joules per sample in a round, over workers whose energy is known; None without any."""
    samples = sum(result.workers.get(name, 0) for name in result.joules)
    return sum(result.joules.values()) / samples if samples else None


def rounded(figure: float) -> str:
    """Format joules: 1.32, 0.0410."""
    return f"{figure:.2f}" if figure >= 1 else f"{figure:#.3g}"


def describe(result: Round) -> str:
    """Describe the joules per image, their sources and whose energy is unknown; "" if none is known."""
    figure = per_image(result)
    if figure is None:
        return ""
    sources = sorted({_NAMES[result.energy[name]] for name in result.joules})
    unknown = [name for name, source in result.energy.items() if source == "unknown"]
    without = f"; without {', '.join(unknown)}" if unknown else ""
    return f"{rounded(figure)} J per image ({', '.join(sources)}{without})"
