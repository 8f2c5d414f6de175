"""Bytes of cached rows in few bits."""

from __future__ import annotations

import functools

BITS = (8, 7, 6, 5, 4, 3, 2, 1)  # widths of a code, widest first
CODE_GROUP = 64  # neighbouring numbers that share a scale of one byte, about
WHOLE_TOKENS = 4  # at the beginning of a text, which are not coded
NEAR_TOKENS = 32  # newest ones, which are also kept in 8 bits a number
COUNTED_TOKENS = 4_096  # of a text over which both are spread when bytes are counted
CACHE_BYTES = 2  # of a cached number that is not coded, at most: caches are compared at 16 bits a number


@functools.cache
def code_bytes(code: tuple[int, ...], size: int, number: int = CACHE_BYTES) -> int:
    """Bytes of a row of `size` numbers, of which so many have 8, 7, ... 1 bits: codes, scales, and what is beside.

    The first tokens of a text are also kept whole, in `number` bytes each, and the newest in 8 bits a number.

    >>> code_bytes((2, 0, 0, 0, 4, 0, 8, 8), 32)  # 7 of codes, 1 scale, 1 for first and newest tokens
    9
    """
    bits = sum(width * count for width, count in zip(BITS, code, strict=True))
    scales = max(1, round(sum(code) / CODE_GROUP))
    return -(-bits // 8) + scales + beside_bytes(size, number)


def beside_bytes(size: int, number: int = CACHE_BYTES) -> int:
    """Bytes of the first and the newest tokens of a text, kept beside codes, for each of its tokens.

    >>> beside_bytes(512)
    6
    """
    return -(-kept_beside(size, number) // COUNTED_TOKENS)


def kept_beside(size: int, number: int = CACHE_BYTES) -> int:
    """Bytes of the first and the newest tokens of a text that are kept beside codes of rows of `size` numbers."""
    return WHOLE_TOKENS * size * number + NEAR_TOKENS * (size + max(1, round(size / CODE_GROUP)))
