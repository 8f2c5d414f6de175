"""Key/value cache: bytes kept for every token of context."""

from headwise.cost import layer_kv_bytes_per_token
from headwise.types import LayerShape, ModelShape

NAME = "kv"
UNIT = "bytes per token"
PER_LENGTH = True  # an absolute limit is for a whole context: kv=2GiB@32k
MEANING = "KV cache"
EXAMPLE = "kv=75%, kv=2GiB@32k"


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """Cache bytes per token of one layer."""
    return layer_kv_bytes_per_token(model, layer)
