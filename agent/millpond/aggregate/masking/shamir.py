# SPDX-License-Identifier: Apache-2.0
"""Pure: shares of a secret, of which ``threshold`` give it back and fewer tell nothing (Shamir 1979).

The secret is the value at 0 of a random polynomial of degree ``threshold - 1`` over the field of integers
modulo the Mersenne prime ``2**521 - 1``; share ``x`` is its value at ``x``, from 1 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

_PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66
Random = Callable[[int], bytes]
"""Returns so many bytes that nobody can guess, such as ``os.urandom``."""


def split(secret: bytes, count: int, threshold: int, random: Random) -> list[bytes]:
    """Return the shares 1 to ``count`` of a secret of SECRET_BYTES."""
    # 64 bits more than the prime has: the remainder is as good as even.
    drawn = (int.from_bytes(random(SHARE_BYTES + 8)) % _PRIME for _ in range(threshold - 1))
    coefficients = [int.from_bytes(secret), *drawn]
    return [_value_at(place, coefficients).to_bytes(SHARE_BYTES) for place in range(1, count + 1)]


def _value_at(place: int, coefficients: list[int]) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % _PRIME
    return value


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of as many shares, by their numbers, as its threshold is. Raises ValueError for
    shares of none.
    """
    weights = _weights(tuple(shares))
    secret = sum(int.from_bytes(share) * weights[place] for place, share in shares.items()) % _PRIME
    try:
        return secret.to_bytes(SECRET_BYTES)
    except OverflowError:
        raise ValueError("the shares are of no secret") from None


@functools.lru_cache(16)
def _weights(places: tuple[int, ...]) -> dict[int, int]:
    """Return by what each share is multiplied in the secret (Lagrange's polynomials at 0)."""
    found = dict[int, int]()
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above, below = above * other % _PRIME, below * (other - place) % _PRIME
        found[place] = above * pow(below, -1, _PRIME) % _PRIME
    return found
