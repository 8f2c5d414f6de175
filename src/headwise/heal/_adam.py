"""Adam whose steps are shares of what they change: at a learning rate of 0.01 a tensor moves by about a hundredth of
its mean size.

With one step length for all tensors, as AdamW has it, what barely moves a large tensor ruins a small one, and the rate
that spares the small one teaches the others nothing.

`torch.optim.Adam` with one group per tensor (`lr` = rate times size) computes the same formula, but not the same bits:
it rounds in another order and adds `eps` elsewhere. It would also read every group's rate when a step is captured; here
one rate is read from the device, so that a captured step can be replayed at another rate.
"""

import statistics
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from headwise import processes
from headwise.heal._lora import LowRank
from headwise.training import shards

TINY = 1e-12  # gradients of a lightly damaged model are small
AT_ONCE = 1 << 27  # numbers whose steps are computed at once


class RelativeAdam(torch.optim.Optimizer):
    """Adam of `weights`, whose steps at learning rate 1 are as long as `sizes`; no weight decay.

    The moments have AdamW's names; the count of steps is kept once, with those of the first tensor.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], sizes: Sequence[float], rate: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(list(weights), {"lr": rate})
        self.weights, self.sizes, self.betas = list(weights), list(sizes), betas
        self.rate = torch.zeros((), device=weights[0].device)
        for weight in weights:
            self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        self.state[weights[0]]["step"] = torch.zeros_like(self.rate)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no step needs a loss computed anew
        """Move every tensor that has a gradient."""
        if not (self.rate.is_cuda and torch.cuda.is_current_stream_capturing()):  # else written before every replay
            self.write_rate()
        beta1, beta2 = self.betas
        count = self.state[self.weights[0]]["step"].add_(1)
        pace = self.rate * (1 - torch.pow(beta2, count)).sqrt() / (1 - torch.pow(beta1, count))
        some: list[tuple[torch.Tensor, float]] = []
        for weight, size in zip(self.weights, self.sizes, strict=True):
            if weight.grad is not None:
                some.append((weight, size))
            if sum(shards.own(w).numel() for w, _ in some) > AT_ONCE:
                self._advance(some, pace)
                some = []
        if some:
            self._advance(some, pace)

    def write_rate(self) -> None:
        """Bring the learning rate to the device, without waiting for it."""
        self.rate.fill_(self.param_groups[0]["lr"])

    def _advance(self, some: list[tuple[torch.Tensor, float]], pace: torch.Tensor) -> None:
        """Move some tensors at once, with few launches."""
        weights, gradients = [shards.own(w) for w, _ in some], [shards.own(cast(torch.Tensor, w.grad)) for w, _ in some]
        first, second = ([shards.own(self.state[w][name]) for w, _ in some] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = self.betas
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, TINY)
        way = torch._foreach_div(first, roots)
        torch._foreach_mul_(way, [size for _, size in some])
        torch._foreach_mul_(way, pace)
        torch._foreach_sub_(weights, way)


@torch.no_grad()
def sizes_of(model: nn.Module) -> dict[str, float]:
    """The size of every trained tensor, by name: the root of its mean square, equal in every process.

    Vectors count as at least as large as the other tensors of their module: biases are often nearly zero, and steps in
    proportion would never move them. A LoRA factor that starts at zero counts with the size at which its change is as
    large as the weight that it changes; any other zero tensor, with the median size.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        sizes = {name: _size(module, name, weight) for name, weight in own.items() if weight.numel()}
        for name, size in sizes.items():
            found[name] = torch.stack(list(sizes.values())).max() if own[name].dim() < 2 else size
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.numel()]
    if not names:
        return {}
    values = processes.agreed(torch.stack([found[name].double() for name in names]).cpu()).tolist()
    median = statistics.median([value for value in values if value > 0] or [1.0])
    return {name: value if value > 0 else median for name, value in zip(names, values, strict=True)}


def _size(module: nn.Module, name: str, weight: Any) -> torch.Tensor:
    if isinstance(module, LowRank) and name.endswith("up_OR"):
        return torch.full((), module.full_size(), device=weight.device)
    return torch.linalg.vector_norm(weight.detach().float()) / weight.numel() ** 0.5
