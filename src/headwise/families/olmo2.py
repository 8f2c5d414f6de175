"""OLMo 2: norms come after attention and after the MLP, and queries and keys are normed over all heads together."""

from headwise.families._architecture import Architecture
from headwise.families._rotary import Rotary


class Olmo2(Rotary):
    """No head can go without changing the norm of the others, so heads stay."""

    name = "olmo2"
    kinds = {"olmo2": Architecture(stem="Olmo2", normed="all")}
    summary = "OLMo 2"
    units = ("qk", "v", "mlp")
    norms = {"attention_scale": "post_attention_layernorm", "mlp_scale": "post_feedforward_layernorm"}  # none before
    small = {"hidden_size": 64, "head_dim": None, "initializer_range": 0.1}


FAMILY = Olmo2()
