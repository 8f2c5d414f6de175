"""FLOPs to read a prompt of a given length (2,048 unless said: flops=80%@8k)."""

from headwise.cost import attended, layer_flops_per_token, prefill_flops
from headwise.types import LayerShape, ModelShape

NAME = "flops"
UNIT = "FLOPs"
PER_LENGTH = False
MEANING = "FLOPs of a prompt"
EXAMPLE = "flops=80%@8k"


def model_cost(model: ModelShape, length: int) -> float:
    """FLOPs to read a prompt of `length` tokens."""
    return prefill_flops(model, length)


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """FLOPs of one layer for that prompt."""
    return length * layer_flops_per_token(model, layer, attended(model, length, layer.role))
