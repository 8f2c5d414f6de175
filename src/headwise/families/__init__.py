"""Model families: one file each, found by this folder. Here: the names that the rest of the package uses."""

from headwise.families._answers import wide_answers, widened
from headwise.families._architecture import (
    BARE,
    CAUSAL,
    CLASSIFIER,
    IMAGE_CLASSIFIER,
    MASKED,
    SEQ2SEQ,
    SPEECH,
    Architecture,
)
from headwise.families._beside import accompany, companions, saved_dtype
from headwise.families._block import Block, repeated, rows_of_context
from headwise.families._config import computed_dtype
from headwise.families._family import Family
from headwise.families._known import TASKS, auto_class_of, family_of, family_of_type, known, register, task_of
from headwise.families._loading import (
    EMBEDDED,
    configuration,
    explained,
    has_words,
    load,
    locate,
    no_processor,
    quietly,
    read_config,
    tokenizer_of,
    without_threads,
)
from headwise.families._tensors import set_format

__all__ = [
    "BARE",
    "CAUSAL",
    "CLASSIFIER",
    "EMBEDDED",
    "IMAGE_CLASSIFIER",
    "MASKED",
    "SEQ2SEQ",
    "SPEECH",
    "TASKS",
    "Architecture",
    "Block",
    "Family",
    "accompany",
    "auto_class_of",
    "companions",
    "computed_dtype",
    "configuration",
    "explained",
    "family_of",
    "family_of_type",
    "has_words",
    "known",
    "load",
    "locate",
    "no_processor",
    "quietly",
    "read_config",
    "register",
    "repeated",
    "rows_of_context",
    "saved_dtype",
    "set_format",
    "task_of",
    "tokenizer_of",
    "wide_answers",
    "widened",
    "without_threads",
]
