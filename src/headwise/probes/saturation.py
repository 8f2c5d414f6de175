"""Whether heads stay sharp as the text gets longer: the norm of the softmax Jacobian `diag(p) - p p'` by length.

Theory says that it falls as 1/L while logits stay bounded; trained heads can let their logits grow instead. So the
norm is measured on the last row of the first L tokens, for L = 4, 8, 16, ..., and a slope is fitted for every head.
Norms span decades, so means are geometric; the slope of the mean logarithm is then the mean of the slopes of the
sequences, and their spread gives its standard error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headwise.families import Family, widened
from headwise.families._watch import batches, capped, spaced, watching
from headwise.probes._jacobian import jacobian_norm
from headwise.progress import Track, silently
from headwise.types import Reading

NAME = "saturation"
MEANING = "whether heads stay sharp as the text gets longer"
NEEDS_PAST = True  # of decoders only
LONGEST = 1024
SEQUENCES = 8
FLOOR = 1e-12  # of a norm: a head that looks at one token alone has none, and no logarithm
Array = NDArray[np.float64]


class SoftmaxRows(NamedTuple):
    """SoftmaxRows of softmax weights, described; arrays (sequence, head, row or length)."""

    norm: Array  # of the Jacobian
    half_range: Array  # of the row's logits: the least bound on them, as softmax ignores a shift
    largest: Array  # weight


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The lengths to look at.

    >>> lengths_up_to(100)
    (4, 8, 16, 32, 64)
    """
    return tuple(2**power for power in range(2, 11) if 2**power <= min(longest, LONGEST))


def rows_of(q_BHRK: torch.Tensor, k_BGTK: torch.Tensor, scale: float, softcap: float | None = None) -> SoftmaxRows:
    """Every query row against all the keys; query heads share key heads in order."""
    batch, heads, rows, width = q_BHRK.shape
    grouped = q_BHRK.reshape(batch, k_BGTK.shape[1], -1, width)
    logits = capped((grouped @ k_BGTK.mT).double().view(batch, heads, rows, -1) * scale, softcap)
    p = logits.softmax(-1).cpu().numpy()
    low, high = logits.aminmax(dim=-1)
    return SoftmaxRows(np.maximum(jacobian_norm(p), FLOOR), ((high - low) / 2).cpu().numpy(), p.max(-1))


def norms_at(
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    scale: float,
    lengths: tuple[int, ...],
    window: int | None = None,
    softcap: float | None = None,
) -> SoftmaxRows:
    """Causal attention: the last row of the first `length` tokens, for every length; a window hides older keys."""
    parts = []
    for length in lengths:
        first = 0 if window is None else max(0, length - window)
        parts.append(rows_of(q_BHTK[:, :, length - 1 : length], k_BGTK[:, :, first:length], scale, softcap))
    return joined(parts, axis=-1)


def joined(parts: list[SoftmaxRows], axis: int) -> SoftmaxRows:
    """Several sets of rows as one: of more sequences (axis 0) or more lengths (axis -1)."""
    return SoftmaxRows(*(np.concatenate(part, axis) for part in zip(*parts, strict=True)))


def slopes(lengths: tuple[int, ...], norms_BHL: Array) -> Array:
    """Least-squares slopes of log norm over log length, per sequence and head."""
    x = np.log(np.asarray(lengths, dtype=np.float64))
    x -= x.mean()
    fitted: Array = np.log(norms_BHL) @ x / (x @ x)
    return fitted


def mean_and_error(values_BX: Array) -> tuple[Array, Array]:
    """Mean over sequences and its standard error; one sequence alone has none (zero)."""
    count = len(values_BX)
    error = values_BX.std(0, ddof=1) / count**0.5 if count > 1 else np.zeros_like(values_BX[0])
    return values_BX.mean(0), error


@torch.no_grad()
def measure(
    family: Family, model: nn.Module, tokens: torch.Tensor, seed: int, track: Track = silently
) -> list[Reading]:
    """Norms and logits by length, and a slope per head; nothing where blocks are too short to fit one."""
    lengths, few = lengths_up_to(tokens.shape[1]), spaced(tokens, SEQUENCES)
    if len(lengths) < 2:
        return []
    layers = family.blocks(model)
    seen: list[list[SoftmaxRows]] = [[] for _ in layers]

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor) -> None:
        attend, q, k = layers[layer].attention.attend, widened(q), widened(k)
        seen[layer].append(norms_at(q, k, attend.scaling, lengths, attend.sliding_window, attend.softcap))

    with watching(layers, attention):
        for batch in track(batches(few[:, : lengths[-1]]), "saturation"):
            family.run(model, batch.to(model.device))
    return _readings([joined(parts, axis=0) for parts in seen], lengths, len(few) * lengths[-1], seed)


def _readings(layers: list[SoftmaxRows], lengths: tuple[int, ...], tokens: int, seed: int) -> list[Reading]:
    norms = []
    for rows in layers:
        mean, error = mean_and_error(np.log(rows.norm).mean(1))
        norms.append((np.exp(mean), np.exp(mean) * error))
    fits = [mean_and_error(slopes(lengths, rows.norm)) for rows in layers]
    growth = [mean_and_error(rows.half_range.mean(1)) for rows in layers]
    weights = [mean_and_error(rows.largest.mean(1)) for rows in layers]
    found = {
        "jacobian_norm": ("length", "", norms),
        "slope": ("query_head", "", fits),
        "logit_growth": ("length", "nats", growth),
        "largest_weight": ("length", "", weights),
    }
    return [
        Reading(
            probe=NAME,
            kind=f"{NAME}.{name}",
            axis=axis,
            ticks=tuple(lengths if axis == "length" else tuple(range(len(mean))) for mean, _ in table),
            values=tuple(tuple(mean.tolist()) for mean, _ in table),
            standard_error=tuple(tuple(error.tolist()) for _, error in table),
            unit=unit,
            meaning=MEANINGS[name],
            tokens=tokens,
            seed=seed,
        )
        for name, (axis, unit, table) in found.items()
    ]


MEANINGS = {
    "jacobian_norm": (
        "How strongly the softmax reacts to its logits: the largest eigenvalue of diag(p) - p p' on the last row of the"
        " first so many tokens, geometric mean over heads and sequences. Where it falls as 1/L, longer text makes"
        " heads alike; where it stays level, they still choose."
    ),
    "slope": (
        "How fast each head saturates: the fitted slope of log norm over log length. Near -1 the softmax gets flatter"
        " in step with the text, as theory says for bounded logits; near 0 it stays as sharp as it was."
    ),
    "logit_growth": (
        "Half the range of a row's logits, mean over heads and sequences. Saturation is certain only while it is"
        " bounded: growth by 0.35 (half of ln 2) with every doubling of the length can undo it."
    ),
    "largest_weight": (
        "The largest softmax weight of a row, mean over heads and sequences. It tells a norm that falls because"
        " attention spreads out (small weight) from one that falls because it settles on one token (weight near 1)."
    ),
}
