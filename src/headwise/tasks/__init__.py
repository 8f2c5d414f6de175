"""What a model is used for: how data becomes its input, what it answers, how two answers differ. One task per file."""

from typing import Any

from torch import nn

from headwise import families
from headwise.registry import find, names
from headwise.tasks._task import Prepared, Task

__all__ = ["Prepared", "Task", "known", "of"]


def known() -> tuple[str, ...]:
    """The names of all tasks."""
    return names("headwise.tasks")


def of(model: nn.Module, tokenizer: Any, where: str = "") -> Task:
    """The task of a loaded model; `where` is its hub id or folder."""
    config: Any = model.config
    task: Task = find("headwise.tasks", families.task_of(config)).TASK.for_model(config, tokenizer, where)
    return task
