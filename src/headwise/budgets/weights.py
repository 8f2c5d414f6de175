"""Weights: bytes as stored, against 16 bits per number (weights=50%)."""

from headwise.cost import layer_weight_bytes, weight_bytes
from headwise.types import LayerShape, ModelShape

NAME = "weights"
UNIT = "bytes"
PER_LENGTH = False
MEANING = "bytes of weights as stored"
EXAMPLE = "weights=50%"


def model_cost(model: ModelShape, length: int) -> float:
    """Bytes of all weights."""
    return weight_bytes(model)


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """Bytes of one layer's weights."""
    return layer_weight_bytes(model, layer)
