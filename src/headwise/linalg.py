"""The linear algebra of cutting: balanced truncation, value directions, ridge refits. All batched over leading axes.

Moments are accumulated and decomposed in double precision: they are small, and their spectra span many decades.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from headwise.errors import HeadwiseError

Elimination = tuple[list[int], list[float]]
TOGETHER = 2**28  # numbers in one stack of matrices: a gigabyte
Decomposition = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WIDE = 512  # columns of a matrix that many threads, or a GPU, decompose faster than one thread
DEAD = 1e-30  # an eigenvalue up to which a matrix counts as zero
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
    """Symmetric square root of a positive semi-definite matrix, and its inverse; of zero, multiples of the identity."""
    values, vectors = torch.linalg.eigh(moment.double())
    largest = values.amax(-1, keepdim=True)
    floor = torch.where(largest > DEAD, largest, 1.0) * FLOOR
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
def two_factors(weight_RC: torch.Tensor, moment_CC: torch.Tensor, price_R: torch.Tensor) -> Decomposition:
    """Factors A (R, n), B (n, C) of a matrix: at every rank r `A[:, :r] B[:r]` is the copy of least cost.

    The cost of an error dW is `1/2 tr(G dW C dW')` with the second moment C of the inputs and a diagonal G, the
    outputs' gradients squared. Returns A, the singular values and B; dropping those from r on costs
    `1/2 sum(s[r:] ** 2)`.
    """
    root, inverse = roots(moment_CC)
    price = price_R.to(root).clamp_min(PRICE_FLOOR * float(price_R.mean())).sqrt()[:, None]
    u, s, vt = torch.linalg.svd(price * (weight_RC.to(root) @ root), full_matrices=False)
    half = s.sqrt()
    return u * half / price, s, half[:, None] * (vt @ inverse)


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
    size = xx.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    penalty = strength * torch.where(size > 0, size, 1.0)  # inputs that are all zero: the start stays
    system = xx.clone()  # of wide MLPs these are gigabytes: no other copy
    system.diagonal(dim1=-2, dim2=-1).add_(penalty[..., 0])
    return penalty, system


def ridge_system(xx: torch.Tensor, strength: float) -> torch.Tensor:
    """X'X with a ridge on its diagonal, relative to it."""
    return _penalised(xx, strength)[1]


def solved(system: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """By Cholesky; a system that rounding left indefinite takes the slower way."""
    factor, failed = torch.linalg.cholesky_ex(system)
    if not bool(failed.any()):
        return torch.cholesky_solve(wanted, factor)
    return least_solution(system, wanted)


def least_solution(system: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The solution of a symmetric system; where there are many (parts that are always zero), that of least norm."""
    try:
        return torch.linalg.solve(system, wanted)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        if not bool(system.isfinite().all()):
            raise _broken(error) from None
        return torch.linalg.pinv(system, hermitian=True) @ wanted


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


SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.62, 0.54, 0.46)  # of the largest number, where others are clipped
PRICE_FLOOR = 1e-3  # of the mean price of an output: few tokens may show no gradient at all
DAMPING = 0.01  # of the mean of a moment's diagonal
BLOCK = 128  # columns whose errors are handed on together


class Rounded(NamedTuple):
    """A matrix in few bits: `whole * scale`, a scale for every row and group of neighbouring columns."""

    whole: torch.Tensor  # (rows, columns), int8
    scale: torch.Tensor  # (rows, groups), bfloat16
    bits: int

    def dense(self) -> torch.Tensor:
        """The matrix that these numbers stand for, in float32."""
        return self.whole.float() * self.scale.float().repeat_interleave(self.whole.shape[1] // self.scale.shape[1], 1)


@torch.no_grad()
def rounded(
    weight_RC: torch.Tensor, moment_CC: torch.Tensor, widths: Sequence[int], group: int, second_order: bool = True
) -> list[Rounded]:
    """A matrix in each of some widths, so that `tr(dW C dW')` is small for the second moment C of its inputs.

    Columns are rounded one after the other, and what a column is off is made good by those that follow (GPTQ, arXiv
    2210.17323). Every group's scale clips where that costs least; it may be negative, which puts the odd level of a
    width on the side that needs it. Without `second_order` every number goes to the nearest. All widths at once.
    """
    rows, columns = weight_RC.shape
    moment = moment_CC.to(weight_RC.device).double()
    alive = moment.diagonal() > 0
    upper = _compensation(moment, alive) if second_order else None
    work = weight_RC.detach().float().repeat(len(widths), 1)
    half = torch.tensor([2.0 ** (bits - 1) for bits in widths], device=work.device).repeat_interleave(rows)
    care = torch.where(alive, moment.diagonal(), moment.diagonal().mean().clamp_min(1e-30)).float()
    whole, scales = torch.empty_like(work, dtype=torch.int8), []
    for start in range(0, columns, group):
        end = start + group
        scale = _scales(work[:, start:end], care[start:end], half)
        scales.append(scale.bfloat16())
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            missed = _round_columns(work, whole, slice(first, last), scales[-1].float(), half, upper)
            if upper is not None and last < columns:
                work[:, last:] -= missed @ upper[first:last, last:]
    scale = torch.stack(scales, 1)
    parts = zip(whole.split(rows), scale.split(rows), widths, strict=True)
    return [Rounded(numbers.clone(), steps.clone(), bits) for numbers, steps, bits in parts]


def _compensation(moment: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Rows by which the error of a column is handed on to those after it: a Cholesky factor of the damped inverse."""
    damped = moment + torch.diag(DAMPING * moment.diagonal().mean().clamp_min(1e-30) + (~alive).double())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _scales(part_NG: torch.Tensor, care_G: torch.Tensor, half_N: torch.Tensor) -> torch.Tensor:
    """The step of every row of a group: of some that clip more or less, the one with the least weighed error."""
    largest = part_NG.gather(1, part_NG.abs().argmax(1, keepdim=True)).squeeze(1)
    full = -largest / half_N  # the odd level lies on the negative side
    full = torch.where(full.abs() > 1e-12, full, 1e-12)
    best, least = full, torch.full_like(full, torch.inf)
    for shrink in SHRINKS:
        step = (shrink * full).bfloat16().float()
        error = ((_nearest(part_NG, step, half_N) * step[:, None] - part_NG).square() * care_G).sum(1)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


def _nearest(part: torch.Tensor, step_N: torch.Tensor, half_N: torch.Tensor) -> torch.Tensor:
    return (part / step_N[:, None]).round().clamp(-half_N[:, None], half_N[:, None] - 1)


def _round_columns(
    work: torch.Tensor,
    whole: torch.Tensor,
    columns: slice,
    step_N: torch.Tensor,
    half_N: torch.Tensor,
    upper: torch.Tensor | None,
) -> torch.Tensor:
    """Round a block of columns, each after the ones before it were made good; what they were off by, as handed on."""
    if upper is None:
        found = _nearest(work[:, columns], step_N, half_N)
        whole[:, columns] = found.to(torch.int8)
        return found
    block, own = work[:, columns].clone(), upper[columns, columns]
    missed = torch.empty_like(block)
    for place in range(block.shape[1]):
        column = block[:, place]
        found = (column / step_N).round().clamp(-half_N, half_N - 1)
        whole[:, columns.start + place] = found.to(torch.int8)
        missed[:, place] = (column - found * step_N) / own[place, place]
        block[:, place + 1 :] -= missed[:, place, None] * own[place, place + 1 :]
    return missed


@torch.no_grad()
def rounding_cost(weight_RC: torch.Tensor, new: Rounded, moment_CC: torch.Tensor, price_R: torch.Tensor) -> float:
    """`1/2 tr(G dW C dW')` with the second moment C of the inputs and a diagonal G, the outputs' gradients squared."""
    off = (new.dense().to(weight_RC.device) - weight_RC.float()).double()
    per_row = ((off @ moment_CC.to(off)) * off).sum(1)
    return 0.5 * float(per_row @ price_R.to(per_row))
