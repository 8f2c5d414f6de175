"""Parameters of the attention blocks alone: projections of queries, keys, values and outputs, with their biases."""

from dataclasses import replace

from headwise.cost import layer_parameters
from headwise.types import LayerShape, ModelShape

NAME = "attention_params"
UNIT = "parameters"
PER_LENGTH = False
MEANING = "parameters of attention"
EXAMPLE = "attention_params=75%"


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """Attention parameters of one layer."""
    if not layer.query_heads:
        return 0
    return layer_parameters(replace(model, layer_norms=0), replace(layer, mlp_width=0))
