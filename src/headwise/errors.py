"""The few exceptions a user can act on. Every message says what happened, what was possible, and what to type next."""


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
NO_MEMORY_WORDS = (
    *("allocate memory", "out of memory", "bad_alloc", "resource temporarily unavailable", "new thread"),
    *("can't allocate", "unable to allocate", "failed to map segment"),  # a lock, an array, a library
)
NO_EXCEPTION = ("returned NULL", "without exception set")  # of compiled code that got no memory to say what is wrong


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, means that memory ran out.

    Libraries have no common type for it, so texts are searched.
    """
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, SystemError) and any(words in str(error) for words in NO_EXCEPTION):
            return True
        if any(words in str(error).lower() for words in NO_MEMORY_WORDS):
            return True
        error = error.__cause__
    return False


WRONG_TORCHVISION = (
    "the installed torchvision was built for another torch, and transformers cannot be imported beside it. Only models "
    "of timm need torchvision; type: pip uninstall torchvision. To keep it, install the build that fits your torch, on "
    "a machine without a GPU: pip install --force-reinstall --no-deps torchvision --index-url "
    "https://download.pytorch.org/whl/cpu"
)


def is_wrong_torchvision(error: BaseException | None) -> bool:
    """Whether an import failed because torchvision does not fit torch, as the CUDA build beside a CPU torch does."""
    while error is not None:
        if "operator torchvision::" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def known_reason(error: BaseException) -> str | None:
    """One line for an error of another library that the user can act on; None for one that is not known."""
    if is_out_of_memory(error):
        return NO_MEMORY
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{str(error.filename)[:200]} cannot be read or written ({error.strerror})."
    return WRONG_TORCHVISION if is_wrong_torchvision(error) else None
