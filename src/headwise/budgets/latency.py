"""Milliseconds of a token or of a prompt, as measured on a device (latency=80%@decode,32k,b8)."""

from headwise.types import LatencyTable, LayerShape, ModelShape

NAME = "latency"
UNIT = "ms"
PER_LENGTH = False
MEANING = "time as measured"
EXAMPLE = "latency=80%@decode,32k,b8"


def model_cost(model: ModelShape, table: LatencyTable) -> float:
    """Milliseconds of the whole model."""
    return table.model_ms(model)


def layer_cost(model: ModelShape, layer: LayerShape, table: LatencyTable) -> float:
    """Milliseconds that one layer adds."""
    return table.layer_ms(layer)
