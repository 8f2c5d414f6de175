"""Bytes of cached rows in few bits."""

import functools

BITS = (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)  # widths of a code, widest first
CODE_GROUP = 64  # neighbouring numbers that share a scale of one byte, about
WHOLE_TOKENS = 4  # at the beginning of a text, which are not coded
NEAR_TOKENS = 32  # newest ones, which are also kept in more bits a number
NEAR_BITS = 8  # of their numbers, at least
COUNTED_TOKENS = 4_096  # of a text over which both are spread when bytes are counted
FIELD_BITS = (2, 4, 8, 12)  # bits of a field in which fast kernels read a number: the least that hold its code
MIXTURES = {  # mean bits of a number -> shares of a row's numbers by their bits, as plans mix them
    2: {8: 1 / 16, 4: 3 / 16, 2: 3 / 8},
    4: {8: 1 / 4, 4: 3 / 8, 2: 1 / 4},
    8: {12: 1 / 4, 8: 1 / 2, 4: 1 / 4},
}
CACHE_BYTES = 2  # of a cached number that is not coded, at most: caches are compared at 16 bits a number


@functools.cache
def code_bytes(code: tuple[int, ...], size: int, number: int = CACHE_BYTES) -> int:
    """Bytes of a row of `size` numbers, of which so many have 12, 11, ... 1 bits: codes, scales, and what is beside.

    The first tokens of a text are also kept whole, in `number` bytes each, and the newest in `near_bits` a number.

    >>> code_bytes((0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 8, 8), 32)  # 7 of codes, 1 scale, 1 for first and newest tokens
    9
    """
    bits = sum(width * count for width, count in zip(BITS, code, strict=True))
    scales = max(1, round(sum(code) / CODE_GROUP))
    return -(-bits // 8) + scales + beside_bytes(code, size, number)


def near_bits(code: tuple[int, ...]) -> int:
    """Bits of every number of the newest tokens: those of the widest number of a code, and at least 8."""
    return max([NEAR_BITS, *(width for width, count in zip(BITS, code, strict=True) if count)])


def beside_bytes(code: tuple[int, ...], size: int, number: int = CACHE_BYTES) -> int:
    """Bytes of the first and the newest tokens of a text, kept beside codes, for each of its tokens.

    >>> beside_bytes((0, 0, 0, 0, 512, 0, 0, 0, 0, 0, 0, 0), 512)
    6
    """
    return -(-kept_beside(size, near_bytes(code, size), number) // COUNTED_TOKENS)


def near_bytes(code: tuple[int, ...], size: int) -> int:
    """Bytes of a row of one of the newest tokens: codes and scales."""
    return -(-size * near_bits(code) // 8) + max(1, round(size / CODE_GROUP))


def kept_beside(size: int, near: int, number: int = CACHE_BYTES) -> int:
    """Bytes of the first and the newest tokens of a text, whose rows of `size` numbers are kept beside codes.

    A row of a first token takes `number` bytes a number, one of a newest token `near` bytes in all.
    """
    return WHOLE_TOKENS * size * number + NEAR_TOKENS * near


@functools.cache
def mixture(size: int, mean: int) -> tuple[int, ...]:
    """A code for a row of `size` numbers with so many bits a number, on average: one of MIXTURES.

    >>> mixture(64, 2)
    (0, 0, 0, 0, 4, 0, 0, 0, 12, 0, 24, 0)
    """
    counts, share, given = dict.fromkeys(BITS, 0), 0.0, 0
    for bits, part in MIXTURES[mean].items():
        share += part
        counts[bits], given = round(share * size) - given, round(share * size)
    return tuple(counts.values())


@functools.cache
def read_bits(code: tuple[int, ...]) -> int:
    """Bits of the fields in which fast kernels read a row: what the time to read it depends on.

    >>> read_bits((0, 0, 0, 0, 4, 0, 0, 0, 12, 8, 16, 0))
    144
    """
    fields = [min(field for field in FIELD_BITS if field >= bits) for bits in BITS]
    return sum(bits * count for bits, count in zip(fields, code, strict=True))
