"""How well conditioned attention is: the heads' outputs side by side, and the map that computes them.

"Leaner Transformers" (arXiv 2505.20802) states that more heads bring the first towards 1. Measured before or after
training, on any tailored model (see `family.tailor`).

Outputs: the ratio of the extreme singular values of a (tokens x heads dim) matrix, for the first 8, 16, ... tokens of a
text. Jacobian of those outputs with respect to what the block reads: by products with it and with its transpose alone
(Golub and Kahan's bidiagonalisation, every step made orthogonal to all before it). With as many steps as the smaller
side has rows that is exact; with few it finds the largest value at once and the smallest from above, so that the
ratio is a lower bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.data import NOTHING
from headwise.families import Family
from headwise.families._watch import batches, spaced, watching
from headwise.probes._layers import reading
from headwise.progress import Track, silently
from headwise.types import Reading

NAME = "conditioning"
MEANING = "condition numbers of the heads' outputs and of their Jacobian"
NEEDS_PAST = False
SEQUENCES = 4
COUNTS = (8, 16, 32, 64)  # tokens of a matrix
FLOOR = 1e-7  # of a singular value over the largest: below it float32 has no precision
JACOBIAN_TOKENS, JACOBIAN_STEPS = 8, 24


class Extremes(NamedTuple):
    """Largest and smallest singular value."""

    largest: float
    smallest: float

    @property
    def ratio(self) -> float:
        return self.largest / max(self.smallest, FLOOR * self.largest)


def condition_numbers(z_BTD: Tensor) -> Tensor:
    """One per matrix of a batch; at most 1 / FLOOR."""
    singular = torch.linalg.svdvals(z_BTD.double())
    return singular[:, 0] / singular[:, -1].clamp(min=FLOOR * singular[:, 0])


def extremes(
    product: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> Extremes:
    """Extreme singular values of a map known by its products, after so many steps of bidiagonalisation.

    `start` is any vector of the map's inputs; where outputs are fewer than inputs, hand over the adjoint as the map.
    """
    right = [start / start.norm()]
    left: list[Tensor] = []
    upper: list[float] = []
    diagonal: list[float] = []
    for step in range(steps):
        u = _apart(product(right[-1]), left)
        diagonal.append(float(u.norm()))
        if diagonal[-1] <= FLOOR * max(diagonal):
            break
        left.append(u / u.norm())
        if step == steps - 1:
            break
        v = _apart(adjoint(left[-1]), right)
        if float(v.norm()) <= FLOOR * max(diagonal):
            break
        upper.append(float(v.norm()))
        right.append(v / v.norm())
    size = len(diagonal)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    matrix += torch.diag(torch.tensor(upper[: size - 1], dtype=torch.float64), 1)
    values = torch.linalg.svdvals(matrix)
    return Extremes(float(values[0]), float(values[-1]))


def _apart(vector: Tensor, others: list[Tensor]) -> Tensor:
    """The vector made orthogonal to others; twice, because once leaves rounding errors."""
    for _ in range(2):
        for other in others:
            vector = vector - (vector @ other) * other
    return vector


class AttentionInput(NamedTuple):
    """The arguments of a block's attention."""

    stream: Tensor
    positions: Any
    mask: Any


def heads_outputs(attention: Any, seen: AttentionInput) -> Callable[[Tensor], Tensor]:
    """The map from what the block reads to its heads' outputs side by side, both as vectors."""
    shape = seen.stream.shape

    def run(flat: Tensor) -> Tensor:
        q, k, v = attention.heads(flat.view(shape), seen.positions)
        q, k = attention.project(q, k)
        z: Tensor = attention.attend(q, k, v, seen.mask)[0]
        return z.flatten()

    return run


def jacobian_extremes(attention: Any, seen: AttentionInput, steps: int = JACOBIAN_STEPS, seed: int = 0) -> Extremes:
    """Of the Jacobian of one block's head outputs at one text."""
    run, at = heads_outputs(attention, seen), seen.stream.flatten()
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():  # fused kernels know no forward derivative
        out, pull = torch.func.vjp(run, at)[:2]

        def push(vector: Tensor) -> Tensor:
            return torch.func.jvp(run, (at,), (vector,))[1].detach()

        def back(vector: Tensor) -> Tensor:
            return pull(vector)[0].detach()

        wide = out.numel() < at.numel()
        size = min(out.numel(), at.numel())
        rng = torch.Generator().manual_seed(seed)
        start = torch.randn(size, generator=rng).to(at)
        first, second = (back, push) if wide else (push, back)
        return extremes(first, second, start, min(steps, size))


@torch.no_grad()
def look(family: Family, model: nn.Module, rows: Tensor) -> tuple[list[Tensor], list[AttentionInput]]:
    """Every layer's head outputs (B, T, H V) and its attention's arguments, from one forward pass."""
    blocks = family.blocks(model)
    outputs: list[Tensor] = [torch.empty(0)] * len(blocks)
    inputs: list[AttentionInput] = []

    def note(layer: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> None:
        outputs[layer] = z.flatten(2).float()

    def hand(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        inputs.append(AttentionInput(stream, kwargs.get("position_embeddings"), mask))

    hooks = [block.attention.register_forward_pre_hook(hand, with_kwargs=True) for block in blocks]
    try:
        with watching(blocks, note):
            family.run(model, rows)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, inputs


@torch.no_grad()
def measure(
    family: Family, model: nn.Module, tokens: Tensor, seed: int, track: Track = silently, jacobian: bool = True
) -> list[Reading]:
    """Condition numbers of outputs by tokens, and of the Jacobian on a short text, for every layer."""
    rows = tokens.dim() < 4  # images are whole
    plain = tokens.dim() == 2 and int(tokens.min()) >= NOTHING  # one text in a row, which can be cut anywhere
    if plain:
        few = _long_ones(tokens)
    else:
        few = max(batches(tokens), key=lambda batch: batch.shape[1])[:SEQUENCES] if rows else spaced(tokens, SEQUENCES)
    device = next(model.parameters()).device
    outputs, _ = look(family, model, few.to(device))
    counts = [tuple(n for n in COUNTS if n <= z.shape[1]) or (z.shape[1],) for z in outputs]
    pairs = zip(track(outputs, NAME), counts, strict=True)
    table = [[condition_numbers(z[:, :count]).log() for count in row] for z, row in pairs]
    found = [_reading("outputs", counts, table, len(few) * max(map(max, counts)), seed)]
    if jacobian and plain:
        length = min(JACOBIAN_TOKENS, few.shape[1])
        _, inputs = look(family, model, few[:1, :length].to(device))
        values = [
            [torch.tensor([jacobian_extremes(*_in_full(block.attention, seen), seed=seed).ratio]).log()]
            for block, seen in zip(family.blocks(model), track(inputs, f"{NAME} of Jacobians"), strict=True)
        ]
        found.append(_reading("jacobian", [(length,)] * len(values), values, length, seed))
    return found


def _in_full(attention: Any, seen: AttentionInput) -> tuple[Any, AttentionInput]:
    """Attention and its arguments in float32: fewer bits would hide small singular values."""
    if seen.stream.dtype in (torch.float32, torch.float64):
        return attention, seen
    turned = None if seen.positions is None else tuple(table.float() for table in seen.positions)
    mask = seen.mask.float() if isinstance(seen.mask, Tensor) and seen.mask.is_floating_point() else seen.mask
    return copy.deepcopy(attention).float(), AttentionInput(seen.stream.float(), turned, mask)


def _long_ones(tokens: Tensor) -> Tensor:
    """A few of the longest rows, cut to their common length: shorter rows end in negative numbers."""
    lengths = (tokens >= 0).sum(1)
    few = spaced(tokens[lengths >= min(int(lengths.max()), COUNTS[-1])], SEQUENCES)
    return few[:, : min(COUNTS[-1], int((few >= 0).sum(1).min()))]


def _reading(name: str, counts: list[tuple[int, ...]], table: list[list[Tensor]], tokens: int, seed: int) -> Reading:
    """Geometric means over texts, with their standard errors."""

    def error(cell: Tensor) -> float:
        return float(cell.mean().exp() * cell.std() / len(cell) ** 0.5) if len(cell) > 1 else 0.0

    rows = [
        (ticks, tuple(float(cell.mean().exp()) for cell in row), tuple(map(error, row)))
        for ticks, row in zip(counts, table, strict=True)
    ]
    return reading(NAME, f"{NAME}.{name}", "tokens", rows, "", MEANINGS[name], tokens, seed)


MEANINGS = {
    "outputs": (
        "How far the outputs of a layer's heads, side by side, are from spreading evenly: the ratio of the largest to"
        " the smallest singular value of the matrix of the first so many tokens, geometric mean over texts. Random"
        " heads come to (sqrt D + sqrt N)/(sqrt D - sqrt N) with D = heads x dimension and N tokens. 1 is best; large"
        " means that a few directions tell most tokens apart."
    ),
    "jacobian": (
        "The same ratio for the map from what a block reads to its heads' outputs, by products with its Jacobian: at"
        " least so large. Large means that some changes of the input hardly reach the output, and gradients hardly"
        " return."
    ),
}
