"""Make the projection of queries of two thin factors."""

from __future__ import annotations

import torch

from headwise.cuts._heads import Tensors
from headwise.errors import PlanError
from headwise.linalg import two_factors


def factor_queries(tensors: Tensors, rank: int, moments: dict[str, torch.Tensor]) -> Tensors:
    """A layer whose queries are computed by way of `rank` numbers; factors that it has already are thinned."""
    if "w_in" not in moments or "g_q" not in moments:
        raise PlanError(
            "this plan chooses ranks, and the probing has no prices for them; probe again with the same --allow."
        )
    weight = tensors["q.weight"]
    whole = weight if "q_in" not in tensors else weight @ tensors["q_in"]
    rows, _, columns = two_factors(whole, moments["w_in"], moments["g_q"])
    return {
        **tensors,
        "q.weight": rows[:, :rank].to(weight).contiguous(),
        "q_in": columns[:rank].to(weight).contiguous(),
    }
