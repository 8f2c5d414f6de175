"""Weights in few bits: which matrices a layer has, and what they take in a file of compressed-tensors.

The format packs whole numbers of 1 to 8 bits without gaps, 32 to a word, with a scale of 16 bits for every group of
neighbours in a row and the matrix's two sizes.
"""

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer
FIELDS = tuple(f"w_{name}" for name in MATRICES)  # of a LayerShape: bits of a number of each
ENDS = ("w_embed", "w_head")  # of a ModelShape: of the table of words, and of the output's where it is another one
WHOLE = 16  # bits of a number that is not packed
WIDTHS = (WHOLE, 8, 6, 5, 4, 3, 2)  # that a plan may choose, widest first
GROUPS = (64, 32, 16)  # numbers that share a scale: the first that divides a row, else the whole row
SCALE_BYTES = 2
SHAPE_BYTES = 16  # two sizes of 8 bytes
NUMBER_BYTES = 2  # of what is not packed


def group_of(columns: int) -> int:
    """How many neighbours in a row of so many numbers share a scale.

    >>> group_of(576), group_of(288), group_of(172)
    (64, 32, 172)
    """
    return next((size for size in GROUPS if columns % size == 0), columns)


def ranks(rows: int, columns: int, full: int) -> tuple[int, ...]:
    """A matrix's rank, and smaller ones at which its two factors have fewer entries than it has: about ten of them.

    >>> ranks(576, 576, 576)[:3], ranks(576, 576, 192), ranks(16, 16, 16)
    ((576, 256, 224), (192, 160, 128, 96, 64, 32), (16,))
    """
    most = max(0, rows * columns - 1) // max(1, rows + columns)
    step = max(8, most // 9 // 8 * 8)
    return full, *(rank for rank in range(most // step * step, 0, -step) if rank < full)


def matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of a matrix as stored.

    >>> matrix_bytes(2, 64, 16), matrix_bytes(2, 64, 4)
    (256, 84)
    """
    if bits == WHOLE:
        return NUMBER_BYTES * rows * columns
    words = -(-columns * bits // 32)
    return rows * (4 * words + SCALE_BYTES * (columns // group_of(columns))) + SHAPE_BYTES * (rows > 0)
