"""FLOPs of the attention blocks alone, projections included, for a prompt (attention=80%@1k)."""

from headwise.cost import attention_flops
from headwise.types import LayerShape, ModelShape

NAME = "attention"
UNIT = "FLOPs"
PER_LENGTH = False
MEANING = "FLOPs of attention in a prompt"
EXAMPLE = "attention=85%@1k"


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """Attention FLOPs of one layer for that prompt."""
    return attention_flops(model, layer, length)
