"""What a user may limit. One price per file; each says how a layer and a model are priced."""

from __future__ import annotations

import re

from headwise.errors import BudgetError
from headwise.registry import find, names
from headwise.types import Budget, LayerShape, ModelShape

SUFFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
DEFAULT_LENGTH = 2048
EXAMPLES = "kv=75%, kv=2GiB@32k, params=20M, params=90%, flops=80%@8k"


def parse(text: str, source: ModelShape) -> Budget:
    """Read a budget such as `kv=50%`, `kv=2GiB@32k`, `params=20M` or `flops=80%@8k`.

    A percentage is of the source model; `@` gives the context length at which the price is meant.
    """
    match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9.]+)\s*([a-zA-Z%]*)\s*(?:@\s*([0-9.]+[kK]?))?\s*", text)
    if not match:
        raise BudgetError(f"cannot read the budget '{text}'. Write it like one of: {EXAMPLES}.")
    name, number, suffix, at = match.groups()
    price = find("headwise.budgets", name)
    if name == "kv" and not source.cached:
        raise BudgetError(f"{text}: {source.family} models keep no cache; use params, flops or attention.")
    length = _length(at, text) if at else source.row_tokens or DEFAULT_LENGTH
    try:
        amount = float(number)
    except ValueError:
        raise BudgetError(f"'{number}' in the budget '{text}' is not a number. Examples: {EXAMPLES}.") from None
    if suffix == "%":
        if not 0 < amount <= 100:
            raise BudgetError(f"{text}: a percentage of the source lies above 0 and at most at 100.")
        limit = amount / 100 * price.model_cost(source, length)
    else:
        units = BYTES if price.UNIT.startswith("bytes") else SUFFIXES
        if suffix.lower() not in units:
            raise BudgetError(f"{text}: '{suffix}' is no unit of {name}; known: %, {', '.join(u for u in units if u)}.")
        limit = amount * units[suffix.lower()]
        if price.PER_LENGTH:
            if not at:
                raise BudgetError(
                    f"{text}: say for how many tokens, as in {name}={number}{suffix}@32k, or give a percentage."
                )
            limit /= length
    return Budget(name=name, unit=price.UNIT, limit=limit, length=length, text=text.replace(" ", ""))


def _length(at: str, text: str) -> int:
    """Tokens of context: a k is 1,024 of them."""
    try:
        length = int(float(at.rstrip("kK")) * (1024 if at[-1] in "kK" else 1))
    except ValueError:
        length = 0
    if length < 1:
        raise BudgetError(f"'@{at}' in the budget '{text}' is no context length. Examples: {EXAMPLES}.")
    return length


def price(budget: Budget, model: ModelShape) -> float:
    """What a model costs in the budget's unit."""
    return float(find("headwise.budgets", budget.name).model_cost(model, budget.length))


def layer_price(budget: Budget, model: ModelShape, layer: LayerShape) -> float:
    """What one layer adds to that."""
    return float(find("headwise.budgets", budget.name).layer_cost(model, layer, budget.length))


def known() -> tuple[str, ...]:
    """The names of all budgets."""
    return names("headwise.budgets")
