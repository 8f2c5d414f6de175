"""Parameters, tied embeddings counted once."""

from headwise.cost import layer_parameters, parameters
from headwise.types import LayerShape, ModelShape

NAME = "params"
UNIT = "parameters"
PER_LENGTH = False
MEANING = "parameters"
EXAMPLE = "params=20M, params=90%"


def model_cost(model: ModelShape, length: int) -> float:
    """All parameters."""
    return parameters(model)


def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    """Parameters of one layer that a plan can change."""
    return layer_parameters(model, layer)
