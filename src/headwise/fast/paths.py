"""Ways to compute softmax attention. All give the same result; which is quickest depends on device, sizes and phase.

A path takes queries, keys, values and which places are seen, and returns the heads' outputs (B, T, H, V). A path that
cannot compute a case raises; `choice` tries all of them and keeps the quickest correct one.
Shape suffixes: B rows, H query heads, G key/value heads, T new tokens, L places, K and V widths.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Seen"], torch.Tensor]
SIDE_BY_SIDE = ("cuda",)  # where one row holds keys and values of a place; a CPU reads each better on its own
WHOLE = 16  # numbers: rows of a place are multiples of it, which of 16 bits are 32 bytes and read at full speed
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass
class Seen:
    """Which places each new token sees: from its row's start up to itself, the last `window` where there is one."""

    ends_B: torch.Tensor  # int32, on the device: how many places are filled, the new tokens included
    starts_B: torch.Tensor  # int32, on the device: left padding
    end: int | None = None  # the same for all rows, where the host knows it
    padded: bool = False  # whether some row starts late
    window: int | None = None
    scaling: float = 1.0
    softcap: float | None = None
    masks: dict[Any, Any] = field(default_factory=dict)  # made once for all layers

    def plain(self) -> bool:
        """Whether each token sees all places up to itself, and no unfilled places follow."""
        windowed = self.window is not None and (self.end is None or self.end > self.window)
        return self.end is not None and not self.padded and not windowed

    def mask(self, tokens: int, places: int) -> torch.Tensor:
        """True where a place is seen: (B or 1, 1, T, L)."""
        key = (tokens, places, self.window)
        if key not in self.masks:
            device = self.ends_B.device
            rows = slice(None) if self.padded or self.end is None else slice(1)
            last_BT = self.ends_B[rows, None] - tokens + torch.arange(tokens, device=device)
            first_BT = self.starts_B[rows, None].expand_as(last_BT)
            if self.window is not None:
                first_BT = torch.maximum(first_BT, last_BT - self.window + 1)
            if tokens > 1:  # padding sees itself, so that no row of weights is empty
                first_BT = torch.minimum(first_BT, last_BT)
            place = torch.arange(places, device=device)
            self.masks[key] = ((place <= last_BT[..., None]) & (place >= first_BT[..., None]))[:, None]
        return self.masks[key]


def side_by_side(
    make: Callable[..., torch.Tensor], rows: int, heads: int, places: int, qk_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache as views of one buffer made by `make`; its rows may end in padding."""
    both = make(rows, heads, places, -(-(qk_dim + v_dim) // WHOLE) * WHOLE)
    return both[..., :qk_dim], both[..., qk_dim : qk_dim + v_dim]


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Plain products, keys never repeated: works everywhere, and is the reference of all other paths."""
    (B, H, T, K), G = q.shape, k.shape[1]
    logits = ((q * seen.scaling).reshape(B, G, H // G * T, K) @ k.mT).view(B, G, H // G, T, -1)
    if seen.softcap is not None:
        logits = torch.tanh(logits / seen.softcap) * seen.softcap
    if not (T == 1 and seen.plain()):
        logits = logits.masked_fill(~seen.mask(T, k.shape[2])[:, :, None], float("-inf"))
    weights = logits.softmax(-1, dtype=torch.float32).to(v.dtype)
    z = weights.view(B, G, H // G * T, -1) @ v
    return z.view(B, H, T, -1).transpose(1, 2)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    backend: SDPBackend | None = None,  # None: torch chooses, on a CPU the fused one
    widen: bool = False,
    repeat: bool = False,
) -> torch.Tensor:
    """PyTorch's fused attention by one of its kernels."""
    if seen.softcap is not None:
        raise ValueError("no fused kernel caps logits")
    (B, H, T, K), G, V = q.shape, k.shape[1], v.shape[3]
    causal = T > 1 and seen.plain() and k.shape[2] == T
    mask = None if causal or (T == 1 and seen.plain()) else seen.mask(T, k.shape[2])
    if widen:  # zeros at the end of the smaller width change nothing
        width = -(-max(K, V) // 8) * 8
        q, k, v = (pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    if k.is_cuda:
        k, v = _aligned(k), _aligned(v)
    together = T == 1 and G < H  # heads that share keys are tokens that see the same: nothing is repeated
    if together:
        q = q.reshape(B, G, H // G, -1)
        mask = mask if mask is None else mask.expand(-1, -1, H // G, -1)
    elif repeat:
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        z = scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=seen.scaling, enable_gqa=not (together or repeat) and G < H
        )
    return z[..., :V].reshape(B, H, T, V).transpose(1, 2)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy where rows do not begin at multiples of 16 bytes, as kernels require: so in a cache of odd widths."""
    begins = (x.storage_offset(), *x.stride()[:-1])
    return x if all(begin * x.element_size() % 16 == 0 for begin in begins) else x.contiguous()


def _split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, wide: bool = False, **tile: Any
) -> torch.Tensor:
    """Our kernels for one token per row on CUDA: the one for single heads, or for wide rows of pooled heads."""
    from headwise.fast.flash_decode import Tile, flash_decode
    from headwise.fast.row_decode import row_decode

    how = (seen.ends_B, seen.starts_B, seen.scaling, seen.softcap, seen.window)
    return (row_decode if wide else flash_decode)(q[:, :, 0], k, v, *how, Tile(**tile))[:, None]


WIDE = 512  # numbers of a place that our kernel for single heads reads at once, at most
ROW_TILES: dict[str, dict[str, Any]] = {  # of our kernel for wide rows
    "split-rows": dict(places=32, warps=4, stages=2, programs=2, even=True),
    "split-rows-many": dict(places=32, warps=4, stages=2, programs=8),
}
TILES: dict[str, dict[str, Any]] = {  # of our kernel
    "split": dict(places=64, warps=4, stages=3, programs=16),
    "split-128": dict(places=128, warps=4, stages=3),
    "split-whole": dict(places=64, warps=4, stages=3, cut=False),
}


def decode_paths(device: torch.device, qk_dim: int, v_dim: int) -> dict[str, Path]:
    """Paths for one token per row; the first works everywhere."""
    found: dict[str, Path] = {"eager": eager}
    if device.type == "cuda":
        if find_spec("triton") and qk_dim + v_dim > WIDE:
            found |= {name: partial(_split, wide=True, **tile) for name, tile in ROW_TILES.items()}
        elif find_spec("triton"):
            found |= {name: partial(_split, **tile) for name, tile in TILES.items()}
        return found | {name: partial(_sdpa, backend=kind) for name, kind in BACKENDS.items()}
    if qk_dim == v_dim:
        found["fused"] = _sdpa
    return found


def prefill_paths(device: torch.device, qk_dim: int, v_dim: int) -> dict[str, Path]:
    """Paths for many tokens per row; the first works everywhere."""
    found: dict[str, Path] = {"eager": eager}
    uneven = qk_dim != v_dim or qk_dim % 8 > 0
    if device.type != "cuda":
        name = "fused-padded" if qk_dim != v_dim else "fused"
        return found | {name: partial(_sdpa, widen=qk_dim != v_dim)}
    for name, kind in BACKENDS.items():
        repeat = name == "efficient"  # which knows no shared keys
        found[name] = partial(_sdpa, backend=kind, repeat=repeat)
        if uneven:
            found[f"{name}-padded"] = partial(_sdpa, backend=kind, repeat=repeat, widen=True)
    return found
