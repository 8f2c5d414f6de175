"""The linear algebra of cutting: balanced truncation, value directions, ridge refits. All batched over leading axes.

Moments are accumulated and decomposed in double precision: they are small, and their spectra span many decades.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from headwise.errors import HeadwiseError

Elimination = tuple[list[int], list[float]]
TOGETHER = 2**28  # numbers in one stack of matrices: a gigabyte
Decomposition = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WIDE = 512  # columns of a matrix that many threads, or a GPU, decompose faster than one thread
FLOOR = 1e-9  # of the largest eigenvalue: below it a direction is noise


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fast_products(device: torch.device) -> AbstractContextManager[None]:
    """TF32 for products in float32 on CUDA, within a block."""
    return _products("high") if device.type == "cuda" else nullcontext()


def exact_products() -> AbstractContextManager[None]:
    """Products in full single precision, inside a block of fast ones."""
    return _products("highest")


def _on_one_thread(function: Callable[..., Decomposition]) -> Callable[..., Decomposition]:
    """Decompose small matrices on one CPU thread, wherever they are, and wide ones where they are.

    Several threads only wait for each other, and long on a busy machine; and CUDA decomposes a batch of them one by
    one, each more slowly than a CPU. Of wide matrices neither is so.
    """

    @functools.wraps(function)
    def wrapped(first: torch.Tensor, *others: torch.Tensor | None) -> Decomposition:
        threads, wide = torch.get_num_threads(), first.shape[-1] > WIDE
        torch.set_num_threads(threads if wide else 1)
        place = first.device if wide else torch.device("cpu")
        try:
            found = function(first.to(place), *(None if other is None else other.to(place) for other in others))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise _broken(error) from None
        finally:
            torch.set_num_threads(threads)
        a, b, c = (part.to(first.device) for part in found)
        return a, b, c

    return wrapped


def roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root of a positive semi-definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(moment.double())
    floor = values.amax(-1, keepdim=True).clamp_min(1e-30) * FLOOR
    values = values.clamp_min(floor).sqrt().unsqueeze(-2)
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT


@_on_one_thread
def balanced(gram_q: torch.Tensor, gram_k: torch.Tensor, core: torch.Tensor | None = None) -> Decomposition:
    """Directions that keep the bilinear form q' M k best, for every rank at once: `q' P_q[:, :r] P_k[:, :r]' k`.

    Returns `P_q`, `P_k` and the singular values: dropping directions r and above makes the mean squared error
    `sum(s[r:] ** 2)`. With `core` None the form is the plain dot product and all directions together give it back.
    """
    (root_q, inverse_q), (root_k, inverse_k) = roots(gram_q), roots(gram_k)
    middle = root_q @ root_k if core is None else root_q @ core.double() @ root_k
    u, s, vt = torch.linalg.svd(middle)
    weight = s.clamp_min(s.amax(-1, keepdim=True) * 1e-12).sqrt().unsqueeze(-2)
    return inverse_q @ u * weight, inverse_k @ vt.mT * weight, s


@_on_one_thread
def value_directions(gram: torch.Tensor, metric: torch.Tensor) -> Decomposition:
    """Directions of head outputs by how much they matter: `z P[:, :r] R[:r]` is the best rank-r copy of z.

    `gram` is the second moment of z, `metric` weighs errors by their effect. Returns P, R, singular values.
    """
    (forward, back), (weighed, _) = roots(gram), roots(metric)
    u, s, _ = torch.linalg.svd(forward @ weighed)
    return back @ u, u.mT @ forward, s


def value_basis(gram_z: torch.Tensor, o_weight: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Value directions P (group, V, V) and readout R of each key/value head, most needed first.

    The metric is the output projection (D, heads * V): it needs no backward pass and did better than gradients.
    """
    heads, width, _ = gram_z.shape
    per_head = o_weight.view(len(o_weight), heads, width).double().permute(1, 2, 0)
    metric = (per_head @ per_head.mT).view(kv_heads, -1, width, width).sum(1)
    p, r, _ = value_directions(gram_z.view(kv_heads, -1, width, width).sum(1).to(metric), metric)
    return p, r


@_on_one_thread
def priced_basis(moment: torch.Tensor, price: torch.Tensor) -> Decomposition:
    """A basis B of rows in which coefficients `c`, `x = B c`, are uncorrelated, have variance 1 and have prices.

    `moment` is the covariance of the rows, `price` their Fisher matrix: an error `e` of the coefficients costs
    `1/2 sum(prices * e**2)`, whatever its direction. Returns B, the prices, highest first, and the inverse of B.
    """
    root, inverse = roots(moment)
    values, vectors = torch.linalg.eigh(root @ price.double() @ root)
    values, vectors = values.flip(-1).clamp_min(0.0), vectors.flip(-1)
    return root @ vectors, values, vectors.mT @ inverse


def ridge(xx: torch.Tensor, xy: torch.Tensor, start: torch.Tensor, strength: float) -> torch.Tensor:
    """`argmin_W |X W - Y|^2 + lambda |W - start|^2` from the moments X'X and X'Y; lambda is relative to X'X."""
    penalty, system = _penalised(xx.double(), strength)
    return solved(system, xy.double() + penalty * start.double())


def ridge_step(xx: torch.Tensor, missed: torch.Tensor, strength: float) -> torch.Tensor:
    """How far `ridge` moves from its start, from the moments X'X and X'(Y - X start)."""
    return solved(_penalised(xx.double(), strength)[1], missed.double())


def _penalised(xx: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Lambda, and X'X with it on the diagonal."""
    penalty = strength * xx.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    system = xx.clone()  # of wide MLPs these are gigabytes: no other copy
    system.diagonal(dim1=-2, dim2=-1).add_(penalty[..., 0])
    return penalty, system


def solved(system: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """By Cholesky; a system that rounding left indefinite takes the slower way."""
    factor, failed = torch.linalg.cholesky_ex(system)
    if not bool(failed.any()):
        return torch.cholesky_solve(wanted, factor)
    try:
        return torch.linalg.solve(system, wanted)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise _broken(error) from None


def _broken(error: Exception) -> HeadwiseError:
    return HeadwiseError(
        f"second moments cannot be decomposed ({str(error)[:120]}): activations overflow or are no numbers. Check the "
        "model's weights and the text, then probe again."
    )


def elimination_order(cross: torch.Tensor) -> Elimination:
    """Greedy backward elimination on `1/2 * 1_R' A 1_R`: which unit to remove next, and the damage after each removal.

    Returns the units in the order of their removal and the damage of having removed them so far, cross terms included.
    """
    matrix = cross.cpu().numpy()  # whose steps cost a third of what tensors' do
    own = 0.5 * matrix.diagonal().astype(np.float64)
    pull = np.zeros(len(matrix))  # sum of A over the units that are already gone
    order, damage, total = [], [], 0.0
    for _ in range(len(matrix)):
        step = own + pull
        unit = int(step.argmin())
        total += float(step[unit])
        own[unit] = np.inf  # gone
        pull += matrix[unit]
        order.append(unit)
        damage.append(max(total, 0.0))
    return order, damage


def elimination_orders(crosses: Sequence[torch.Tensor]) -> list[Elimination]:
    """`elimination_order` of many matrices; on CUDA of all that are of one size at once, without moving them."""
    if not crosses or not crosses[0].is_cuda:
        return [elimination_order(cross) for cross in crosses]
    found: dict[int, Elimination] = {}
    for size in sorted({len(cross) for cross in crosses}):
        places = [place for place, cross in enumerate(crosses) if len(cross) == size]
        count = max(1, TOGETHER // size**2)
        for part in (places[start : start + count] for start in range(0, len(places), count)):
            found |= zip(part, eliminated_together(torch.stack([crosses[place] for place in part])), strict=True)
    return [found[place] for place in range(len(crosses))]


def eliminated_together(cross_LUU: torch.Tensor) -> list[Elimination]:
    """`elimination_order` of matrices of one size, a unit of each at every step."""
    own = 0.5 * cross_LUU.diagonal(dim1=-2, dim2=-1).double()
    pull, steps, layers = torch.zeros_like(own), [], torch.arange(len(own), device=own.device)
    for _ in range(own.shape[1]):
        step = own + pull
        unit = step.argmin(1, keepdim=True)
        steps.append((unit, step.gather(1, unit)))
        own.scatter_(1, unit, torch.inf)  # gone
        pull += cross_LUU[layers, unit[:, 0]]
    order, cost = (torch.cat(part, 1) for part in zip(*steps, strict=True))
    return list(zip(order.tolist(), cost.cumsum(1).clamp_min(0.0).tolist(), strict=True))
