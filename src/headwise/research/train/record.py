"""What a run leaves on record: how it ended, what it cost, and where it ran."""

from __future__ import annotations

import datetime
import math
import platform
from typing import Any

import torch

from headwise import cost, families
from headwise.errors import HeadwiseError
from headwise.training.loop import Point, State


def outcome(state: State, tokens: int) -> dict[str, Any]:
    """Losses with their standard errors, and speed."""
    loss, error = _late(state.curve)
    return {
        "train_loss": loss,
        "train_loss_se": error,
        "evaluation": state.curve[-1].evaluation,
        "tokens": tokens,
        "seconds": state.seconds,
        "tokens_per_second": tokens / state.seconds,
    }


def machine(device: torch.device) -> dict[str, str]:
    """Where and when."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"machine": name, "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def training_flops(config: Any, length: int, tokens: int, every_token: bool) -> float | None:
    """FLOPs of forward and backward passes (twice a forward one) over `tokens` in rows of `length`, if known.

    `every_token`: the model gives logits over its vocabulary for all tokens of a row, not once.
    """
    try:
        shape = families.family_of(config).shape_of(config)
    except HeadwiseError:
        return None
    per_row = cost.prefill_flops(shape, length)
    if every_token:
        per_row += (length - 1) * 2.0 * shape.hidden_size * shape.vocab_size
    return 3.0 * per_row * tokens / length


def _late(curve: list[Point]) -> tuple[float, float]:
    """Mean loss of the last tenth of the curve, and its standard error over points."""
    losses = torch.tensor([point.loss for point in curve[-max(1, len(curve) // 10) :]], dtype=torch.float64)
    error = float(losses.std() / math.sqrt(len(losses))) if len(losses) > 1 else 0.0
    return float(losses.mean()), error
