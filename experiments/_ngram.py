"""One attention layer learns to read past tokens: the trainer that A4 and A5 share.

Tokens are random points on the unit sphere, so that nothing but their position tells them apart. Every seed (and, while
rates are tuned, every rate) is one entry of a leading dimension S of every weight: a point of a sweep is trained as one
tensor program, on a GPU as one captured graph. Tokens have so few dimensions C that heads are applied as products with
them: queries and keys as a C x C form of rank K, values and outputs as a map from C, which is exact and much faster.

Shape suffixes: S seeds, B sequences, T positions, Q positions that are scored (the last ones), H heads, K head
dimension, C token dimension, O what the heads write to, P all weights of one seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments._training import settings_of, train_stack

TOKEN_DIM = 8
POSITIONS = ("linear", "table", "rotary")
SLOPES = (0.1, 4.0)  # of new heads, drawn log-uniformly: from an even look back to the last token alone
ROTARY_BASE = 10_000.0
SLOW = 0.05  # of a slope, per unit of its weight: slopes learn so much slower, or they collapse onto each other
DIVERGED = 1e9  # stands for an error that is no number
RIDGE = 1e-9  # of the mean diagonal, where outputs are solved for
Weights = dict[str, Tensor]


class Point(NamedTuple):
    """One layer: how many heads of what dimension, and how they know positions."""

    heads: int
    dim: int
    positions: str = "linear"

    @property
    def key(self) -> str:
        return f"{self.positions} {self.heads}x{self.dim}"


class Effort(NamedTuple):
    """How long and how often a point is trained."""

    steps: int
    batch: int
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    evaluation: int = 16  # batches of fresh data


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: `y_t = sum_i rho_i f_i(x_{t-i})`, or to complete `A B ... A` with B."""

    rho: tuple[float, ...]
    hidden: int = 0  # width of a tanh layer between heads and output; 0: none
    bend: float = 0.0  # f_i(x) = tanh(bend A_i x) with a random rotation A_i; 0: f_i(x) = x
    induction: bool = False  # a second layer with one head looks for the token that follows the last one's twin
    length: int = 32
    scored: int = 16

    def sample(self, turns: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Fresh tokens (S, B, T, C) and targets (S, B, Q, C); `turns` (S, lags, C, C) are the rotations."""
        x = torch.nn.functional.normalize(
            torch.randn(len(turns), batch, self.length, TOKEN_DIM, device=turns.device), dim=-1
        )
        if self.induction:
            twin = torch.randint(self.length - 2, (len(turns), batch, 1, 1), device=turns.device)
            at = twin.expand(-1, -1, 1, TOKEN_DIM)
            return torch.cat([x[:, :, :-1], x.gather(2, at)], 2), x.gather(2, at + 1)
        y = torch.zeros_like(x[:, :, -self.scored :])
        for lag, weight in enumerate(self.rho, 1):
            past = x[:, :, self.length - self.scored - lag : self.length - lag]
            seen = torch.tanh(self.bend * past @ turns[:, None, lag - 1]) if self.bend else past
            y = y + weight * seen
        return x, y


def shapes(task: Task, point: Point) -> dict[str, tuple[int, ...]]:
    """Every weight of one seed."""
    heads, dim, wide = point.heads, point.dim, task.hidden or TOKEN_DIM
    found: dict[str, tuple[int, ...]] = {
        "query": (heads, TOKEN_DIM, dim),
        "key": (heads, TOKEN_DIM, dim),
        "value": (heads, TOKEN_DIM, dim),
        "output": (heads, dim, wide),
    }
    if point.positions == "linear":
        found["slope"] = (heads,)
    elif point.positions == "table":
        found["table"] = (heads, task.length)
    else:
        found |= {"query_bias": (heads, dim), "key_bias": (heads, dim)}
    if task.hidden:
        found |= {"bias": (wide,), "last": (wide, TOKEN_DIM)}
    if task.induction:
        found |= {"match": (TOKEN_DIM, 2 * TOKEN_DIM), "copy": (2 * TOKEN_DIM, TOKEN_DIM)}
    return found


def initial(task: Task, point: Point, seeds: int) -> Weights:
    """New weights: queries start at zero, so that at first a head sees positions alone."""
    found = {}
    for name, shape in shapes(task, point).items():
        noise = torch.randn(seeds, *shape)
        if name == "slope":
            low, high = (math.log(end) for end in SLOPES)
            found[name] = torch.exp(low + (high - low) * torch.rand(seeds, *shape)) / SLOW
        elif name in ("query", "bias", "table"):
            found[name] = torch.zeros_like(noise)
        elif name == "output":
            found[name] = noise / math.sqrt(point.heads * point.dim)
        elif name.endswith("_bias"):
            found[name] = noise
        else:
            found[name] = noise / math.sqrt(shape[-2])
    return found


class Layer:
    """The sums a forward pass needs that depend on no weight; `attention` and `forward` use them."""

    def __init__(self, task: Task, point: Point, device: torch.device) -> None:
        self.task, self.point = task, point
        places = torch.arange(task.length, device=device)
        self.scored = task.length if task.induction else task.scored
        self.distance = places[-self.scored :, None] - places
        self.mask = torch.zeros(self.distance.shape, device=device).masked_fill(self.distance < 0, -math.inf)
        spread = torch.nn.functional.one_hot(self.distance.clamp(min=0), task.length)
        self.spread = spread.flatten(0, 1).T.float()  # (T, Q T): from a table over distances to all pairs of positions
        pairs = torch.arange(max(1, point.dim // 2), device=device)
        angles = places[:, None] * ROTARY_BASE ** (-pairs / len(pairs))
        self.turn = angles.cos(), angles.sin()

    def attention(self, w: Weights, x_SBTC: Tensor) -> Tensor:
        """Weights over past tokens, (S, B, H, Q, T)."""
        seen, scale = x_SBTC[:, :, -self.scored :], self.point.dim**-0.5
        if self.point.positions == "rotary":
            q = self._turned(torch.einsum("sbqc,shck->sbhqk", seen, w["query"]), w["query_bias"])
            k = self._turned(torch.einsum("sbtc,shck->sbhtk", x_SBTC, w["key"]), w["key_bias"])
            return (q @ k.transpose(-1, -2) * scale + self.mask).softmax(-1)
        form_SHCC = w["query"] @ w["key"].transpose(-1, -2) * scale
        asked = torch.einsum("sbqc,shce->sbhqe", seen, form_SHCC).flatten(2, 3)
        content = (asked @ x_SBTC.transpose(-1, -2)).unflatten(2, (self.point.heads, self.scored))
        if self.point.positions == "linear":
            bias = -SLOW * w["slope"][:, :, None, None] * self.distance
        else:
            bias = (w["table"] @ self.spread).unflatten(-1, self.distance.shape)
        return (content + (bias + self.mask)[:, None]).softmax(-1)

    def _turned(self, x: Tensor, bias: Tensor) -> Tensor:
        """Rotary positions: the last ones of the sequence, as many as `x` has."""
        cos, sin = (part[-x.shape[-2] :] for part in self.turn)
        left, right = (x + bias[:, None, :, None]).chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    def read(self, w: Weights, x_SBTC: Tensor) -> Tensor:
        """What every head has gathered, before its value map: (S, B, H, Q, C)."""
        p = self.attention(w, x_SBTC)
        return (p.flatten(2, 3) @ x_SBTC).unflatten(2, (self.point.heads, self.scored))

    def forward(self, w: Weights, x_SBTC: Tensor) -> Tensor:
        """The layer's answer at the scored positions."""
        out = torch.einsum("sbhqc,shco->sbqo", self.read(w, x_SBTC), w["value"] @ w["output"])
        if self.task.hidden:
            return torch.tanh(out + w["bias"][:, None, None]) @ w["last"][:, None]
        if not self.task.induction:
            return out
        stream = torch.cat([x_SBTC, out], -1)
        asked = x_SBTC[:, :, -1:] @ w["match"][:, None]
        p = (asked @ stream[:, :, :-1].transpose(-1, -2)).softmax(-1)  # the last token is no answer to itself
        return p @ stream[:, :, :-1] @ w["copy"][:, None]


def rotations(task: Task, seeds: int, device: torch.device) -> Tensor:
    """A random rotation per seed and lag, for targets that bend."""
    return torch.linalg.qr(torch.randn(seeds, len(task.rho), TOKEN_DIM, TOKEN_DIM))[0].to(device)


class Trained(NamedTuple):
    """Layers of all seeds after training."""

    layer: Layer
    weights: Weights
    turns: Tensor


def train(task: Task, point: Point, effort: Effort, rates: list[float], seed: int, device: torch.device) -> Trained:
    """Train one layer per rate given, all at once, with Adam and a cosine schedule on fresh data in every step."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        layer, turns = Layer(task, point, device), rotations(task, len(rates), device)
        start = initial(task, point, len(rates))
        if not effort.steps:
            return Trained(layer, {name: value.to(device) for name, value in start.items()}, turns)
        sizes = [value[0].numel() for value in start.values()]

        def named(all_SP: Tensor) -> Weights:
            parts = zip(all_SP.split(sizes, 1), start.items(), strict=True)
            return {name: part.unflatten(1, old.shape[1:]) for part, (name, old) in parts}

        def losses(all_SP: Tensor, step: Tensor) -> Tensor:
            x, y = task.sample(turns, effort.batch)
            return (layer.forward(named(all_SP), x) - y).square().sum(-1).mean((1, 2))

        flat = torch.cat([value.flatten(1) for value in start.values()], 1).to(device)
        settings = settings_of(effort.steps, rates, warm_up=0.0, decay=0.0, clip=0.0, beta2=0.99, seed=seed)
        return Trained(layer, named(train_stack(flat, losses, rates, settings).flat), turns)


@torch.no_grad()
def errors(trained: Trained, effort: Effort, seed: int) -> tuple[list[float], list[float]]:
    """On fresh data, per seed: squared error relative to the target's power, and the root of the mean squared norm."""
    layer, weights, turns = trained
    with torch.random.fork_rng(devices=[turns.device] if turns.is_cuda else []):
        torch.manual_seed(seed + 1)
        wrong, power = torch.zeros(2, len(turns), device=turns.device)
        for _ in range(effort.evaluation):
            x, y = layer.task.sample(turns, effort.batch)
            wrong += (layer.forward(weights, x) - y).square().sum(-1).mean((1, 2)) / effort.evaluation
            power += y.square().sum(-1).mean((1, 2)) / effort.evaluation
    wrong = wrong.nan_to_num(DIVERGED, DIVERGED)
    return (wrong / power).tolist(), wrong.sqrt().tolist()


@torch.no_grad()
def solved(task: Task, point: Point, effort: Effort, seed: int, device: torch.device) -> list[float]:
    """Squared relative error per seed of untrained heads whose output map is the exact least-squares solution."""
    trained = train(task, point, effort._replace(steps=0), [0.0] * effort.seeds, seed, device)
    layer, weights, turns = trained.layer, {k: v.double() for k, v in trained.weights.items()}, trained.turns

    def seen() -> tuple[Tensor, Tensor]:
        x, y = task.sample(turns, effort.batch)
        z = torch.einsum("sbhqc,shck->sbqhk", layer.read(weights, x.double()), weights["value"])
        return z.flatten(3).flatten(1, 2), y.double().flatten(1, 2)

    rows = task.scored * effort.batch
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + 2)
        width = point.heads * point.dim
        gram, right = 0.0, 0.0
        for _ in range(max(effort.evaluation, 16 * width // rows + 1)):
            z, y = seen()
            gram, right = gram + z.transpose(1, 2) @ z, right + z.transpose(1, 2) @ y
        ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        ridged = gram + ridge * torch.eye(width, device=device, dtype=gram.dtype)
        output = torch.cholesky_solve(right, torch.linalg.cholesky(ridged))
        pairs = [seen() for _ in range(effort.evaluation)]
    wrong = sum((z @ output - y).square().sum((1, 2)) for z, y in pairs)
    return (wrong / sum(y.square().sum((1, 2)) for _, y in pairs)).tolist()


@torch.no_grad()
def lag_shares(trained: Trained, effort: Effort, seed: int) -> list[list[float]]:
    """How the first layer's map is spread over lags 0, 1, 2, ... at the last position: shares of norms, per seed."""
    layer, weights, turns = trained
    with torch.random.fork_rng(devices=[turns.device] if turns.is_cuda else []):
        torch.manual_seed(seed + 3)
        x, _ = layer.task.sample(turns, 4 * effort.batch)
        mean_SHT = layer.attention(weights, x)[:, :, :, -1].mean(1).flip(-1)
        maps = torch.einsum("sht,shco->stco", mean_SHT, weights["value"] @ weights["output"])
    norms = torch.linalg.matrix_norm(maps)
    return (norms / norms.sum(-1, keepdim=True)).tolist()


def measure(task: Task, point: Point, effort: Effort, device: torch.device) -> dict[str, Any]:
    """Tune the rate of a point on seeds of its own, then train and measure it on others."""
    tuned = train(task, point, effort, [r for r in effort.rates for _ in range(effort.tuning_seeds)], 1000, device)
    tried = torch.tensor(errors(tuned, effort, 1000)[0]).log().view(len(effort.rates), -1).mean(1)
    rate = effort.rates[int(tried.argmin())]
    del tuned
    trained = train(task, point, effort, [rate] * effort.seeds, 0, device)
    relative, norm = errors(trained, effort, 0)
    found = {"heads": point.heads, "dim": point.dim, "positions": point.positions, "rate": rate}
    found |= {
        "rates": dict(zip(map(str, effort.rates), tried.exp().tolist(), strict=True)),
        "error": relative,
        "norm": norm,
    }
    if task.induction:
        found["lag_shares"] = lag_shares(trained, effort, 0)
    return found
