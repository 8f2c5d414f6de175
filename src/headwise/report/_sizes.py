"""What a model costs in every unit that a budget can limit: bytes of cache, parameters, FLOPs, milliseconds."""

from typing import NamedTuple

from headwise import budgets
from headwise.errors import HeadwiseError
from headwise.registry import find
from headwise.report._text import human
from headwise.types import Budget, ModelShape, Plan

FAMILIAR = ("kv", "params", "flops", "attention")  # what people ask for first
LONG = ("flops", "attention")  # depend on the length of the input
SERVED = {"memory": "bytes of the weights plus the cache"}  # depend on the texts that are served


class Size(NamedTuple):
    """A unit in which a model can be measured, and the source's size in it."""

    budget: Budget
    meaning: str
    full: float

    @property
    def label(self) -> str:
        """The meaning, with the texts that it is counted for."""
        budget = self.budget
        if budget.name in SERVED:
            texts = "a text" if budget.batch == 1 else f"{budget.batch} texts"
            return f"{SERVED[budget.name]} of {texts} of {budget.length:,} tokens"
        return self.meaning + (f" of {budget.length:,} tokens" if budget.name in LONG else "")

    @property
    def full_label(self) -> str:
        """The label, with the unit where it does not say it."""
        return self.label if self.budget.unit in self.label else f"{self.label}, {self.budget.unit}"

    def words(self, shape: ModelShape) -> tuple[str, str]:
        """Size and share of a shape."""
        size = size_of(self.budget, shape)
        return human(size), "–" if size is None or not self.full else f"{size / self.full:.1%}"


def sizes_of(plan: Plan) -> tuple[Size, ...]:
    """Every unit that applies to the model; those that the plan limits come first, at their own length."""
    own = {budget.key: budget for budget in plan.budgets}
    known = budgets.known()
    found = []
    for name in dict.fromkeys((*own, *(name for name in FAMILIAR if name in known), *known)):
        if name == "kv" and not plan.source.cached:
            continue
        try:
            module = find("headwise.budgets", name.partition("@")[0])
            budget = own.get(name) or Budget(name, module.UNIT, 0.0, budgets.DEFAULT_LENGTH, name)
            full = full_size(budget, plan)
            if full is not None:
                found.append(
                    Size(budget, f"{module.MEANING}, {budget.workload}" if budget.workload else module.MEANING, full)
                )
        except (HeadwiseError, AttributeError):
            continue
    return tuple(found)


def size_of(budget: Budget, shape: ModelShape) -> float | None:
    """What a shape costs under a budget; None for a unit that this version does not know."""
    try:
        return budgets.price(budget, shape)
    except HeadwiseError:
        return None


def full_size(budget: Budget, plan: Plan) -> float | None:
    """What the source costs under a budget, of which a share is meant; None for a unit that is not known here."""
    try:
        return budgets.source_price(budget, plan.source)
    except HeadwiseError:
        return None
