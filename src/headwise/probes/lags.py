"""How much each relative position contributes to a layer's attention output: the rho of the allocation bound, measured.

At lag m the output at t receives `sum_h p_h(t, t-m) W_h v_h(t-m)`. Its squared norm is a quadratic form of the heads'
weights in the Gram matrix (head by head) of what they would add from position t - m, so no vector of hidden size is
formed for any pair of positions. Shape suffixes: B sequences, T positions read, S positions read from, H query heads,
G key/value heads, K and V their widths.
"""

from __future__ import annotations

import torch
from torch import nn

from headwise.families import Family, widened
from headwise.families._watch import batches, capped, spaced, watching
from headwise.probes._layers import Row, reading
from headwise.progress import Track, silently
from headwise.types import Reading

NAME = "lags"
MEANING = "how much of a layer's attention output comes from how far back"
NEEDS_PAST = True  # of decoders only
SEQUENCES = 8
POSITIONS = 256
SHOWN = 64  # lags that the reading keeps; what is missing from a sum of 1 lies further back


def weights_of(
    q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    """Causal softmax weights (B, H, T, S); a window hides older keys."""
    batch, heads, count, width = q_BHTK.shape
    logits = (q_BHTK.reshape(batch, k_BGTK.shape[1], -1, width) @ k_BGTK.mT).view(batch, heads, count, count) * scale
    logits = capped(logits, softcap)
    seen = torch.ones(count, count, dtype=torch.bool, device=logits.device).tril()
    if window is not None:
        seen &= ~seen.tril(-window)
    return logits.masked_fill(~seen, float("-inf")).softmax(-1)


def head_grams(v_BGTV: torch.Tensor, o_weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Inner products (B, S, H, H) of what every two query heads would add to the output from each position."""
    w_HVD = o_weight.view(len(o_weight), heads, -1).permute(1, 2, 0)
    share = heads // v_BGTV.shape[1]
    added = ((v_GTV.repeat_interleave(share, dim=0) @ w_HVD).transpose(0, 1) for v_GTV in v_BGTV)  # (S, H, D) each
    return torch.stack([a_SHD @ a_SHD.mT for a_SHD in added])


def squares_by_lag(weights_BHTS: torch.Tensor, grams_BSHH: torch.Tensor) -> torch.Tensor:
    """Mean squared contribution of every lag (B, lag), over the second half of the positions: each has a past.

    Where a lag reaches back before the first token, nothing was contributed, and nothing is counted.
    """
    count = weights_BHTS.shape[-1]
    later = torch.arange(count // 2, count, device=weights_BHTS.device)
    source = later[:, None] - torch.arange(count, device=later.device)  # (t, lag) -> position
    out = []
    for weights_HTS, grams_SHH in zip(weights_BHTS, grams_BSHH, strict=True):
        p_STH = weights_HTS[:, later].permute(2, 1, 0)
        squares_TS = ((p_STH @ grams_SHH) * p_STH).sum(-1).clamp_min(0).mT
        by_lag = squares_TS.gather(1, source.clamp_min(0)).masked_fill(source < 0, 0.0)
        out.append(by_lag.double().mean(0))
    return torch.stack(out)


def shares(squares_BM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square per lag over all sequences, made to sum to 1, and its jackknife standard error."""

    def normalised(mean_square: torch.Tensor) -> torch.Tensor:
        root = mean_square.sqrt()
        return root / root.sum(-1, keepdim=True).clamp_min(1e-300)

    count = len(squares_BM)
    value = normalised(squares_BM.mean(0))
    if count < 2:
        return value, torch.zeros_like(value)
    without = normalised((squares_BM.sum(0) - squares_BM) / (count - 1))
    return value, ((count - 1) * without.var(0, unbiased=False)).sqrt()


@torch.no_grad()
def measure(
    family: Family, model: nn.Module, tokens: torch.Tensor, seed: int, track: Track = silently
) -> list[Reading]:
    """One reading: each lag's share, per layer, on a few short sequences."""
    few = spaced(tokens, SEQUENCES)[:, :POSITIONS]
    layers = family.blocks(model)
    seen: list[list[torch.Tensor]] = [[] for _ in layers]

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        attend, o_weight = layers[layer].attention.attend, layers[layer].read_out()
        q, k, v, o_weight = (widened(t) for t in (q, k, v, o_weight))
        weights = weights_of(q, k, attend.scaling, attend.sliding_window, attend.softcap)
        seen[layer].append(squares_by_lag(weights, head_grams(v, o_weight, q.shape[1])).cpu())

    with watching(layers, attention):
        for batch in track(batches(few), "lags"):
            family.run(model, batch.to(model.device))
    rows: list[Row] = []
    for parts in seen:
        value, error = (tuple(part[:SHOWN].tolist()) for part in shares(torch.cat(parts)))
        rows.append((tuple(range(len(value))), value, error))
    return [reading(NAME, f"{NAME}.contribution", "lag", rows, "share", EXPLAINED, few.numel(), seed)]


EXPLAINED = (
    "How much of a layer's attention output comes from the token so many positions back (root mean square over the"
    " second half of each block; all lags together make 1, so what is missing lies further back). These are the rho"
    " for which `headwise theory allocate --rho readings.json:LAYER` spends a budget."
)
