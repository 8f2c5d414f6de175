"""What a run with a limit on memory will do, and what it expects, in a sentence or two. No torch."""

import math
from collections.abc import Sequence

from headwise import budgets as prices
from headwise.cost import layer_text_bytes, matrices, parameters, weight_bytes
from headwise.types import Budget, ModelShape, Plan
from headwise.types.weights import WHOLE

CHOSEN = {
    "qk": "query/key and value dimensions", "mlp": "MLP widths", "heads": "heads", "kv_heads": "key/value heads",
    "rank": "ranks of query projections",
    "depth": "whole layers", "bits": "bits of cached keys and values", "weights": "bits of every weight matrix",
}  # fmt: skip


def parts(budget: Budget, model: ModelShape) -> dict[str, int]:
    """Bytes of a model's weights and, under a limit on all memory, of its cache."""
    found = {"weights": weight_bytes(model)}
    if prices.of_cache(budget):
        found["cache"] = budget.batch * sum(layer_text_bytes(model, layer, budget.length) for layer in model.layers)
    return found


def to_do(budget: Budget, source: ModelShape, allow: Sequence[str]) -> str:
    """What a run will do, before anything is measured."""
    before = parts(budget, source)
    at = f" of {budget.batch} x {budget.length:,} tokens" if "cache" in before else ""
    said = " and ".join(f"{_megabytes(size)} of {name}{at * (name == 'cache')}" for name, size in before.items())
    pooled = any(layer.pooled > 1 for layer in source.layers)
    skipped = {"qk"} if pooled and "bits" in allow and "cache" in before else set()
    skipped |= set() if "cache" in before else {"bits"}
    units = [words for unit, words in CHOSEN.items() if unit in allow and unit not in skipped]
    return (
        f"{budget.text}: {said} at 16 bits per number become at most {_megabytes(budget.limit)}; "
        f"{' and '.join(filter(None, (', '.join(units[:-1]), units[-1])))} are chosen together, once all are priced."
    )


def in_bits(budget: Budget, source: ModelShape) -> str:
    """What a run with a limit on the cache alone will do by itself, and why; `source` as its rows will be cached."""
    heads = max(layer.pooled for layer in source.layers)
    rows = f", and {heads} key/value heads of a layer share cached rows" if heads > 1 else ""
    return (
        f"{budget.text}: cached keys and values get fewer bits{rows}, which does the least damage for these bytes. "
        "Steps are faster than the source's at long contexts only; for speed at short ones, and for other engines, "
        "cut dimensions: --allow qk,v."
    )


def expected(plan: Plan) -> str:
    """What a plan does and what that is expected to cost."""
    budget = next(budget for budget in plan.budgets if prices.of_weights(budget))
    before, after = parts(budget, plan.source), parts(budget, plan.target)
    said = [f"{name} {_megabytes(before[name])} -> {_megabytes(after[name])}" for name in before]
    damage = plan.predicted_damage
    return (
        f"the plan: {', '.join(said)} ({mean_bits(plan.target):.1f} bits per weight); expected damage {damage:.3g} "
        f"nats per token, {math.expm1(damage):+.1%} perplexity, before healing."
    )


def mean_bits(model: ModelShape) -> float:
    """Bits of a weight on average, scales not counted."""
    total = WHOLE * parameters(model)
    for layer in model.layers:
        for name, (rows, columns) in matrices(model, layer).items():
            total -= (WHOLE - getattr(layer, f"w_{name}")) * rows * columns
    words = model.vocab_size * model.hidden_size
    total -= (WHOLE - model.w_embed) * words + (0 if model.tied_embeddings else (WHOLE - model.w_head) * words)
    return total / parameters(model)


def _megabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
