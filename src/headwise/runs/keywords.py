"""The settings of a run as keyword arguments of Python functions, with their types, for editors and type checkers.

Type checkers read this file, so the fields of `Settings` are repeated here; a test keeps both equal. What a setting
means is written beside it in `Settings`.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from headwise.runs.flags import described

Function = TypeVar("Function", bound=Callable[..., Any])


class RunKeywords(TypedDict, total=False):
    """The fields of `Settings`, except for the model and the budgets, which have parameters of their own."""

    data: str | None
    eval: str | None
    task: str | None
    strategy: str
    rounds: int
    heal: str
    heal_options: tuple[str, ...]
    portable: bool
    allow: tuple[str, ...]
    seed: int
    device: str
    dtype: str
    tokens: int
    eval_tokens: int
    swap_tokens: int
    length: int
    context: int | None
    trust_remote_code: bool
    recompute: bool | None
    stream: bool | None
    pool: str
    max_loss: str | None
    serve: str | None
    multiple: int
    same_dims: bool


def with_keywords(settings: type, leaves_out: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Show the fields of a dataclass in a function's signature in place of `**settings`, as `help` and notebooks read.

    Fields that the function has as parameters are left out, and those in `leaves_out`.
    """

    def wrap(function: Function) -> Function:
        own = inspect.signature(function)
        kept = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        names = {*(parameter.name for parameter in kept), *leaves_out}
        more = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.kind)
            for field in described(settings)
            if field.name not in names
        ]
        function.__signature__ = own.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
        return function

    return wrap
