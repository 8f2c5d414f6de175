"""One new token per row against a long cache, on CUDA: the places are split over programs, a second kernel combines.

Query heads that share keys read them once, and only the filled places and true dimensions are read: widths that are no
power of two are cut into two blocks, the rest of which is masked. Lengths lie on the device, so that one captured graph
serves all of them. Imported only where Triton is. Source of the split: Dao et al., Flash-Decoding, 2023.
Shape suffixes: B rows, H query heads, G key/value heads, L places, K and V widths, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How the kernel is built."""

    places: int = 64  # read at once
    warps: int = 4
    stages: int = 3  # reads in flight
    programs: int = 8  # per multiprocessor, about
    cut: bool = True  # widths into two blocks; otherwise one, rounded up to a power of two


def blocks(width: int, cut: bool) -> tuple[int, int]:
    """Powers of two (at least 16, the second perhaps none) that hold a width."""
    whole = max(16, triton.next_power_of_2(width))
    first = whole // 2
    if not cut or width == whole or first < 16:
        return whole, 0
    second = max(16, triton.next_power_of_2(width - first))
    return (whole, 0) if first + second >= whole else (first, second)


@triton.jit
def _capped(s, cap):
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / cap)))


@triton.jit
def _attend(
    q, k, v, part, top, lengths, starts, scaling, cap, S,
    q_row, q_head, k_row, k_head, v_row, v_head,
    G: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    end = tl.load(lengths + b)
    begin = tl.load(starts + b)
    if WINDOW > 0:
        begin = tl.maximum(begin, end - WINDOW)
    span = tl.cdiv(tl.cdiv(end - begin, N), S) * N
    low = begin + split * span
    high = tl.minimum(low + span, end)
    rows = tl.arange(0, M)
    real = rows < SHARE
    dk1 = tl.arange(0, K1)
    dv1 = tl.arange(0, V1)
    queries = q + b * q_row + (g * SHARE + rows)[:, None] * q_head
    q1 = tl.load(queries + dk1[None, :], mask=real[:, None] & (dk1 < K)[None, :], other=0.0)
    if K2 > 0:
        dk2 = K1 + tl.arange(0, K2)
        q2 = tl.load(queries + dk2[None, :], mask=real[:, None] & (dk2 < K)[None, :], other=0.0)
    if V2 > 0:
        dv2 = V1 + tl.arange(0, V2)
        z2 = tl.zeros([M, V2], tl.float32)
    z1 = tl.zeros([M, V1], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    keys = k + b * k_row + g * k_head
    values = v + b * v_row + g * v_head
    for n in range(low, high, N):
        at = n + tl.arange(0, N)
        there = at < high
        k1 = tl.load(keys + at[:, None] * K + dk1[None, :], mask=there[:, None] & (dk1 < K)[None, :], other=0.0)
        s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if K2 > 0:
            k2 = tl.load(keys + at[:, None] * K + dk2[None, :], mask=there[:, None] & (dk2 < K)[None, :], other=0.0)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        s = s * scaling
        if CAPPED:
            s = _capped(s, cap)
        s = tl.where(there[None, :], s * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        fade = tl.exp2(most - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        most = higher
        v1 = tl.load(values + at[:, None] * V + dv1[None, :], mask=there[:, None] & (dv1 < V)[None, :], other=0.0)
        p = p.to(v1.dtype)
        z1 = tl.dot(p, v1, z1 * fade[:, None], input_precision=PRECISION)
        if V2 > 0:
            v2 = tl.load(values + at[:, None] * V + dv2[None, :], mask=there[:, None] & (dv2 < V)[None, :], other=0.0)
            z2 = tl.dot(p, v2, z2 * fade[:, None], input_precision=PRECISION)
    some = tl.where(total > 0, total, 1.0)
    place = ((b * G + g) * SHARE + rows) * S + split
    tl.store(top + place, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=real)
    tl.store(part + place[:, None] * V + dv1[None, :], z1 / some[:, None], mask=real[:, None] & (dv1 < V)[None, :])
    if V2 > 0:
        tl.store(part + place[:, None] * V + dv2[None, :], z2 / some[:, None], mask=real[:, None] & (dv2 < V)[None, :])


@triton.jit
def _combine(part, top, out, S, SPLITS: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    x = tl.load(top + row * S + split, mask=split < S, other=float("-inf"))
    most = tl.max(x, 0)
    weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - most))
    total = tl.sum(weight, 0)
    at = (row * S + split)[:, None] * V + d[None, :]
    z = tl.load(part + at, mask=(split < S)[:, None] & (d < V)[None, :], other=0.0)
    mixed = tl.sum(z * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + d, mixed.to(out.dtype.element_ty), mask=d < V)


def splits_for(pairs: int, places: int, processors: int, tile: Tile) -> int:
    """Programs per row and key/value head, fixed when a graph is captured: enough to fill the device evenly."""
    wanted = -(-processors * tile.programs // pairs)
    return max(1, min(wanted, -(-places // tile.places), 128))


def flash_decode(
    q_BHK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a row are seen, its last `window` where given."""
    tile = tile or Tile()
    (B, H, K), (G, L, V) = q_BHK.shape, (*k_BGLK.shape[1:3], v_BGLV.shape[3])
    for x, width in ((q_BHK, K), (k_BGLK, K), (v_BGLV, V)):
        if x.stride(-1) != 1 or (x.dim() == 4 and x.stride(2) != width):
            raise ValueError("the places of a cache must lie one behind the other")
    share = H // G
    S = splits_for(B * G, L, torch.cuda.get_device_properties(q_BHK.device).multi_processor_count, tile)
    out = torch.empty(B, H, V, dtype=q_BHK.dtype, device=q_BHK.device)
    part = torch.empty(B, H, S, V, dtype=torch.float32, device=q_BHK.device)
    top = torch.empty(B, H, S, dtype=torch.float32, device=q_BHK.device)
    (K1, K2), (V1, V2) = blocks(K, tile.cut), blocks(V, tile.cut)
    precise: Any = "ieee" if q_BHK.dtype == torch.float32 else "tf32"
    _attend[(B * G, S)](
        q_BHK, k_BGLK, v_BGLV, part, top, lengths_B, starts_B, scaling, softcap or 1.0, S,
        q_BHK.stride(0), q_BHK.stride(1), k_BGLK.stride(0), k_BGLK.stride(1), v_BGLV.stride(0), v_BGLV.stride(1),
        G=G, SHARE=share, K=K, V=V, K1=K1, K2=K2, V1=V1, V2=V2, M=max(16, triton.next_power_of_2(share)),
        N=tile.places, WINDOW=window or 0, CAPPED=softcap is not None, PRECISION=precise,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _combine[(B * H,)](part, top, out, S, SPLITS=triton.next_power_of_2(S), V=V, WIDTH=triton.next_power_of_2(V))
    return out
