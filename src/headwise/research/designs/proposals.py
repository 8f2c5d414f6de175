"""Proposals for new models: one per strategy, with what each costs and what the papers predict of it."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import budgets as prices
from headwise import cost
from headwise.devices import timed
from headwise.errors import BudgetError, PlanError
from headwise.families import IMAGE_CLASSIFIER
from headwise.research.designs import configs, shapes
from headwise.types import ModelShape

STEP = 1e6  # tokens of training that times are given for


@dataclass(frozen=True, slots=True)
class Proposal:
    """A shape by one strategy, its configuration, and its prices."""

    strategy: str
    shape: ModelShape
    config: Any  # of transformers, stock or tailored
    auto: str  # the Auto class that trains it
    prices: dict[str, float]
    length: int  # tokens of a text that reading times are given for

    @property
    def tailored(self) -> bool:
        """Whether layers differ, so that the runtime is needed."""
        return str(self.config.model_type).startswith("headwise_")

    def build(self, device: str = "cpu") -> nn.Module:
        """The model with random weights."""
        return configs.build(self.config, self.auto, device)

    def write(self, folder: Path, overwrite: bool = False) -> None:
        """A folder that `headwise train` and `from_config` take."""
        configs.write(self.config, self.auto, folder, overwrite)

    def to_json(self) -> dict[str, Any]:
        """For designs.json."""
        return {
            "strategy": self.strategy,
            "tailored": self.tailored,
            "hidden_size": self.shape.hidden_size,
            "prices": {k: v if math.isfinite(v) else None for k, v in self.prices.items()},
            "layers": [layer.to_json() for layer in self.shape.layers],
        }


def design(
    family: str,
    budget: str | Sequence[str],
    strategies: Sequence[str] = tuple(shapes.STRATEGIES),
    *,
    like: str | None = None,
    vocab: int | None = None,
    length: int = 1024,
    depth: int | None = None,
    heads: int | None = None,
    width: int | None = None,
    device: str = "cpu",
    measure: bool = False,
) -> list[Proposal]:
    """Shapes for a new model of a family under budgets, one per strategy that can meet them.

    Percentages are of `like`, whose width, vocabulary and other settings are then taken over.
    """
    maker = configs.Maker(family, vocab, length, like)
    length = maker.read(length)
    texts = [budget] if isinstance(budget, str) else list(budget)
    if not texts:
        raise BudgetError("a design needs a budget, such as --budget params=50M.")
    if like is None and (shares := [text for text in texts if "%" in text]):
        raise BudgetError(f"{shares[0]}: a percentage of what? Give a number, as in params=50M, or --like MODEL.")
    source = maker.source() if like is not None else maker.make(shapes.Sketch(256, 4, 4, 64, 1024))
    limits = tuple(prices.parse(text, source) for text in texts)
    rules = maker.rules(like is not None, depth=depth, heads=heads, width=width, length=length)
    wanted = [name for name in strategies if rules.uneven or name in ("uniform", "leaner") or len(strategies) == 1]
    found: list[Proposal] = []
    refused: list[BudgetError] = []
    for name in wanted:
        try:
            shape = shapes.design(name, maker.make, limits, rules)
        except BudgetError as error:
            refused.append(error)
            continue
        found.append(Proposal(name, shape, maker.config(shape), maker.kind.auto, priced(shape, length), length))
    if not found:
        raise refused[0] if refused else PlanError("no strategy was given; name at least one.")
    rates = machine_rates(torch.device(device))
    for proposal in found:
        proposal.prices.update(estimated(proposal.shape, length, rates))
    if measure:
        _measure(found, length, device)
    return found


def priced(shape: ModelShape, length: int) -> dict[str, float]:
    """What a shape costs by formula."""
    return {
        "parameters": float(cost.parameters(shape)),
        "train_flops_per_token": train_flops(shape, length),
        "prefill_flops": cost.prefill_flops(shape, length),
        "kv_bytes_per_token": float(cost.kv_bytes_per_token(shape)),
        "activation_bytes_per_token": activation_bytes(shape),
        "log_conditioning": shapes.log_conditioning(shape),
        "worst_conditioning": max(map(shapes.layer_conditioning, shape.layers)),
    }


def train_flops(shape: ModelShape, length: int) -> float:
    """FLOPs of training on one token: three times its forward pass."""
    seen = cost.attended(shape, length)
    layers = sum(cost.layer_flops_per_token(shape, layer, seen) for layer in shape.layers)
    return 3.0 * (layers + 2.0 * shape.hidden_size * shape.vocab_size)


def activation_bytes(shape: ModelShape) -> float:
    """About what training keeps of one token for the backward pass, in float32, without checkpointing.

    Inputs and outputs of two norms and the streams between; queries, keys, values and what heads put out; the MLP's
    channels before and after their activation; logits and their softmax.
    """
    kept = 0.0
    for layer in shape.layers:
        queries, keys = layer.query_heads * layer.qk_width, layer.kv_heads * (layer.qk_width + layer.v_dim)
        inner = layer.mlp_width * (4 if shape.mlp_matrices == 3 else 2)
        kept += 6 * shape.hidden_size + queries + keys + layer.query_heads * layer.v_dim + inner
    return 4.0 * (kept + 2 * shape.vocab_size)


def machine_rates(device: torch.device) -> tuple[float, float]:
    """FLOPs per second of a matrix product and bytes per second of a copy, as this device does them now."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = 8192 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=dtype)
    product = median_seconds(lambda: a @ a, device)
    copied = median_seconds(lambda: a.clone(), device)
    return 2.0 * size**3 / product, 2.0 * a.numel() * a.element_size() / copied


def estimated(shape: ModelShape, length: int, rates: tuple[float, float]) -> dict[str, float]:
    """Seconds for a million tokens of training, and for reading a text: products and traffic one after the other."""
    flops, traffic = rates
    kept = activation_bytes(shape)
    read = cost.prefill_flops(shape, length) / flops + length * kept / traffic
    return {
        "estimated_train_seconds_per_million_tokens": STEP * (train_flops(shape, length) / flops + 3 * kept / traffic),
        "estimated_prefill_seconds": read,
    }


def _measure(found: Sequence[Proposal], length: int, device: str) -> None:
    """Real times of training and of reading one row, all proposals in turns."""
    where = torch.device(device)
    steps = [steps_of(proposal, 1, length, where) for proposal in found]
    rounds = [[(timed(train, where)[1], timed(read, where)[1]) for train, read in steps] for _ in range(4)]
    for proposal, times in zip(found, zip(*rounds[1:], strict=True), strict=True):  # the first round warms up
        trained, read = (statistics.median(column) for column in zip(*times, strict=True))
        proposal.prices["measured_train_seconds_per_million_tokens"] = STEP * trained / length
        proposal.prices["measured_prefill_seconds"] = read


def steps_of(
    proposal: Proposal, rows: int, length: int, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step of the proposal's model on so many rows, and a reading of them; in bfloat16 on a GPU."""
    model = proposal.build(str(device))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    inputs = _inputs(proposal, rows, length, device)

    def train() -> None:
        model.train()
        with cast:
            loss = model(**inputs).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    @torch.no_grad()
    def read() -> None:
        model.eval()
        with cast:
            model(**inputs)

    return train, read


def _inputs(proposal: Proposal, rows: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Something to learn from: texts, or images."""
    if proposal.auto == IMAGE_CLASSIFIER:
        side, channels = proposal.config.image_size, proposal.config.num_channels
        labels = torch.zeros(rows, dtype=torch.long, device=device)
        return {"pixel_values": torch.zeros(rows, channels, side, side, device=device), "labels": labels}
    ids = torch.full((rows, length), min(5, proposal.shape.vocab_size - 1), device=device)
    return {"input_ids": ids, "labels": ids}


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call; the first call is left out."""
    return statistics.median([timed(work, device)[1] for _ in range(repeats + 1)][1:])
