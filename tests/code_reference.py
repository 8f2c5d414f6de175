"""Rows in bits as our kernels keep and read them, in plain code: what kernels are compared with."""

from __future__ import annotations

from typing import Any

import torch

from headwise.fast.code_layout import SCALE_UP, TILE
from headwise.runtime.cache_headwise import NEAR, WHOLE


def place_codes(layout: Any, held: Any, x: torch.Tensor, starts: torch.Tensor, past: Any, by_place: bool, *_: int):
    """As the kernel of this name."""
    tokens, first = x.shape[2], int(past)
    codes, scales = layout.coder._coded(x)
    table, segment = layout.tables(x.device), layout.segment
    for token in range(tokens):
        at = first + token
        words = torch.zeros(*x.shape[:2], max(1, layout.words), dtype=torch.long)
        for chunk, low in enumerate(layout.firsts):
            for number in range(low, int(table["first"][chunk + 1])):
                slots = slice(number * segment, (number + 1) * segment)
                code = codes[:, :, token].long()[..., table["own"][slots]] + table["raised"][slots]
                plane, place, *_ = layout.segments[number]
                field = torch.where(table["bits"][slots] > 0, code >> table["below"][slots] & ((1 << plane) - 1), 0)
                words[..., chunk * segment : (chunk + 1) * segment] += field << place
        short = (words - ((words >= 1 << 15).long() << 16)).short()
        if by_place:
            held.words.view(*x.shape[:2], -1, max(1, layout.words))[:, :, at] = short
        elif layout.chunks:
            tiles = held.words.view(*x.shape[:2], -1, layout.words, TILE)
            tiles[:, :, at // TILE, :, at % TILE] = short
        if layout.chunks:
            groups = [one.group for one in layout.segments]
            halves = held.scales.view(torch.float16)
            factor = (SCALE_UP * torch.exp2(scales[:, :, token, groups].float() / 8 - 16)).half()
            if by_place:
                pairs = halves.view(*x.shape[:2], -1, layout.pairs, TILE, 2)
                pairs[:, :, at // TILE, :, at % TILE] = factor.unflatten(-1, (-1, 2))
            else:
                halves.view(*x.shape[:2], -1, 2 * layout.pairs, TILE)[:, :, at // TILE, :, at % TILE] = factor
        if at >= first + tokens - NEAR:
            held.side[:, :, WHOLE + at % NEAR] = layout.coder.fine.rounded(x[:, :, token : token + 1])[:, :, 0]
        for text, start in enumerate(starts.tolist()):
            if start <= at < start + WHOLE:
                held.side[text, :, at - start] = x[text, :, token]


def rows(side: Any, starts: list[int], end: int) -> torch.Tensor:
    """What the newest token reads (B, G, L, K)."""
    found = side.layout.read(side.words, side.scales, side.by_place)[:, :, :end].to(side.side.dtype)
    for text, start in enumerate(starts):
        for place in range(start, end):
            if place < start + WHOLE:
                found[text, :, place] = side.side[text, :, place - start]
            elif place >= end - NEAR:
                found[text, :, place] = side.side[text, :, WHOLE + place % NEAR]
    return found


class CodeDecode:
    """As the class of this name."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(
        self, q: torch.Tensor, k: Any, v: Any, ends: Any, starts: Any, scaling: float, softcap=None, write=None
    ):
        if write is not None:
            write()
        end, share = int(ends[0]), q.shape[1] // k.words.shape[1]
        keys, values = (rows(side, starts.tolist(), end).repeat_interleave(share, 1) for side in (k, v))
        logits = (q.unsqueeze(2) @ keys.mT) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        hidden = torch.arange(end) < starts[:, None]
        return (logits.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1) @ values)[:, :, 0]
