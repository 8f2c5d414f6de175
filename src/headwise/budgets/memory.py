"""All memory: bytes of weights as stored and of the cache of some texts at a time (memory=8GiB@32k,b4)."""

from headwise.cost import layer_text_bytes, layer_weight_bytes, weight_bytes
from headwise.types import LayerShape, ModelShape

NAME = "memory"
UNIT = "bytes"
PER_LENGTH = False
PER_BATCH = True  # what follows the length: memory=40%@8k,b8
MEANING = "bytes of the weights plus the cache of a batch at a context length"
EXAMPLE = "memory=40%@8k,b8"


def model_cost(model: ModelShape, length: int, batch: int = 1) -> float:
    """Bytes of all weights, and of the cache of `batch` texts of `length` tokens."""
    cache = sum(layer_text_bytes(model, layer, length) for layer in model.layers)
    return weight_bytes(model) + batch * cache


def layer_cost(model: ModelShape, layer: LayerShape, length: int, batch: int = 1) -> float:
    """Bytes of one layer's weights and of its part of the cache."""
    return layer_weight_bytes(model, layer) + batch * layer_text_bytes(model, layer, length)
