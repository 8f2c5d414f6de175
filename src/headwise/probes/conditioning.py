"""How well conditioned the heads' outputs are, side by side.

"Leaner Transformers" (arXiv 2505.20802) states that more heads bring the condition number towards 1. It is the ratio of
the extreme singular values of a (tokens x heads dim) matrix, for the first 8, 16, ... tokens of a text, and can be
measured before or after training, on any tailored model (see `family.tailor`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.data import NOTHING
from headwise.families import Family
from headwise.families._watch import batches, spaced, watching
from headwise.probes._layers import reading
from headwise.progress import Track, silently
from headwise.types import Reading

NAME = "conditioning"
MEANING = "condition numbers of the heads' outputs"
NEEDS_PAST = False
SEQUENCES = 4
COUNTS = (8, 16, 32, 64)  # tokens of a matrix
FLOOR = 1e-7  # of a singular value over the largest: below it float32 has no precision


def condition_numbers(z_BTD: Tensor) -> Tensor:
    """One per matrix of a batch; at most 1 / FLOOR."""
    singular = torch.linalg.svdvals(z_BTD.double())
    return singular[:, 0] / singular[:, -1].clamp(min=FLOOR * singular[:, 0])


@torch.no_grad()
def look(family: Family, model: nn.Module, rows: Tensor) -> list[Tensor]:
    """Every layer's head outputs (B, T, H V), from one forward pass."""
    blocks = family.blocks(model)
    outputs: list[Tensor] = [torch.empty(0)] * len(blocks)

    def note(layer: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> None:
        outputs[layer] = z.flatten(2).float()

    with watching(blocks, note):
        family.run(model, rows)
    return outputs


@torch.no_grad()
def measure(family: Family, model: nn.Module, tokens: Tensor, seed: int, track: Track = silently) -> list[Reading]:
    """Condition numbers of outputs by tokens, for every layer."""
    rows = tokens.dim() < 4  # images are whole
    plain = tokens.dim() == 2 and int(tokens.min()) >= NOTHING  # one text in a row, which can be cut anywhere
    if plain:
        few = _long_ones(tokens)
    else:
        few = max(batches(tokens), key=lambda batch: batch.shape[1])[:SEQUENCES] if rows else spaced(tokens, SEQUENCES)
    device = next(model.parameters()).device
    outputs = look(family, model, few.to(device))
    counts = [tuple(n for n in COUNTS if n <= z.shape[1]) or (z.shape[1],) for z in outputs]
    pairs = zip(track(outputs, NAME), counts, strict=True)
    table = [[condition_numbers(z[:, :count]).log() for count in row] for z, row in pairs]
    return [_reading(counts, table, len(few) * max(map(max, counts)), seed)]


def _long_ones(tokens: Tensor) -> Tensor:
    """A few of the longest rows, cut to their common length: shorter rows end in negative numbers."""
    lengths = (tokens >= 0).sum(1)
    few = spaced(tokens[lengths >= min(int(lengths.max()), COUNTS[-1])], SEQUENCES)
    return few[:, : min(COUNTS[-1], int((few >= 0).sum(1).min()))]


def _reading(counts: list[tuple[int, ...]], table: list[list[Tensor]], tokens: int, seed: int) -> Reading:
    """Geometric means over texts, with their standard errors."""

    def error(cell: Tensor) -> float:
        return float(cell.mean().exp() * cell.std() / len(cell) ** 0.5) if len(cell) > 1 else 0.0

    rows = [
        (ticks, tuple(float(cell.mean().exp()) for cell in row), tuple(map(error, row)))
        for ticks, row in zip(counts, table, strict=True)
    ]
    return reading(NAME, f"{NAME}.outputs", "tokens", rows, "", EXPLAINED, tokens, seed)


EXPLAINED = (
    "How far the outputs of a layer's heads, side by side, are from spreading evenly: the ratio of the largest to the"
    " smallest singular value of the matrix of the first so many tokens, geometric mean over texts. Random heads come"
    " to (sqrt D + sqrt N)/(sqrt D - sqrt N) with D = heads x dimension and N tokens. 1 is best; large means that a few"
    " directions tell most tokens apart."
)
