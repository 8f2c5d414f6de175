"""The few exceptions a user can act on. Every message says what happened, what was possible, and what to type next."""

from __future__ import annotations


class HeadwiseError(Exception):
    """Base of all errors that are the input's fault, not the program's: the command line prints them in one line."""


class ShapeError(HeadwiseError):
    """Sizes that no model can have, or that do not fit together."""


class BudgetError(HeadwiseError):
    """A budget that cannot be read or cannot be met."""


class PlanError(HeadwiseError):
    """A plan file that is not valid, or does not belong to this model."""


class ModelError(HeadwiseError):
    """A model that cannot be loaded or is of a kind that is not supported."""


class DataError(HeadwiseError):
    """Calibration or evaluation text that is missing, empty or too short."""


class OutputError(HeadwiseError):
    """An output folder that is in use, or cannot be written."""


class UnknownNameError(HeadwiseError):
    """A plug-in name that does not exist."""


NO_MEMORY = (
    "too little memory; what was done is kept. Close other programs or add --recompute, and the run resumes; or start "
    "anew with --stream, or with a lower --length or --tokens."
)
NO_MEMORY_WORDS = ("allocate memory", "out of memory", "bad_alloc", "resource temporarily unavailable", "new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. Libraries have no common type for it, so texts are searched."""
    if isinstance(error, MemoryError) or (isinstance(error, SystemError) and "returned NULL" in str(error)):
        return True
    return any(words in str(error).lower() for words in NO_MEMORY_WORDS)
