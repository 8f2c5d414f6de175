"""Which architecture of llama.cpp carries a model, and how its heads lie there.

llama.cpp has one length of keys and one of values for all layers. `llama` has one number of heads and one MLP width,
`deci` has them per layer; both want keys as long as values. `mimo2` takes shorter values, but no factors of rotary
frequencies and one MLP width. What is shorter than its place is filled with zeros, which changes no answer.
"""

from dataclasses import dataclass
from typing import Any

import torch

from headwise.errors import ModelError
from headwise.families import Block, family_of
from headwise.types import LayerShape

CARRIED = ("llama",)  # families whose graph llama.cpp's carriers compute
BYTES = 2  # of a cached number in llama.cpp, unless its user asks for others
LEAST_MLP = 32  # deci skips a whole layer that has no MLP
SAME = 1e-6  # relative, of a frequency


@dataclass(frozen=True)
class Layout:
    """An architecture of llama.cpp, with its lengths and the place of every rotary pair."""

    arch: str
    k_dim: int
    v_dim: int
    widths: tuple[int, ...]  # of MLPs, by layer
    pairs: tuple[int, ...]  # the source's rotary pairs that any head kept, by their place
    factors: tuple[float, ...]  # by which llama.cpp divides its frequencies; empty where it need not

    @property
    def interleaved(self) -> bool:
        """Whether the two coordinates of a pair are neighbours, or half a head apart."""
        return self.arch != "mimo2"

    def placed(self) -> torch.Tensor:
        """Where the pairs' coordinates lie in a head: first ones, then second ones (2, pairs)."""
        place = torch.arange(len(self.pairs))
        return torch.stack((2 * place, 2 * place + 1) if self.interleaved else (place, place + self.k_dim // 2))

    def cache_bytes(self, layers: tuple[LayerShape, ...]) -> int:
        """Bytes per token of llama.cpp's cache in 16 bits."""
        return sum(layer.kv_heads for layer in layers) * (self.k_dim + self.v_dim) * BYTES

    def layer_weights(self, layers: tuple[LayerShape, ...], hidden: int) -> int:
        """Weights of attention and MLPs, zeros included."""
        heads = sum((s.query_heads + s.kv_heads) * (self.k_dim + self.v_dim) for s in layers)
        return hidden * (heads + 3 * sum(self.widths))


def refuse_model(model: Any) -> None:
    """Refuse in one line what no architecture of llama.cpp computes."""
    family = family_of(model.config)
    if family.name not in CARRIED:
        raise ModelError(
            f"{family.name} models are not written as GGUF here, only {', '.join(CARRIED)} ones; llama.cpp's own "
            "convert_hf_to_gguf.py takes stock models and portable ones whose heads are not cut."
        )
    again = "cut again with --portable and export that."
    for number, layer in enumerate(family.shape_of(model.config).layers):
        if layer.coded:
            raise ModelError(f"layer {number} caches keys and values in bits, which llama.cpp cannot; {again}")
        if layer.pooled > 1:
            raise ModelError(f"layer {number} caches rows that heads share (pooled), which llama.cpp cannot; {again}")
        if layer.qk_dim < layer.qk_width:
            raise ModelError(
                f"layer {number} projects queries and keys after rotary ({layer.qk_width} to {layer.qk_dim}), which no "
                f"architecture of llama.cpp does; {again}"
            )
        if not layer.query_heads:
            raise ModelError(f"layer {number} has no attention, which is not written as GGUF yet; {again}")
    _refuse_settings(model)


def _refuse_settings(model: Any) -> None:
    config, rotary = model.config, model.model.rotary_emb
    family: Any = family_of(config)
    if getattr(config, "sliding_window", None):
        raise ModelError("this model has a sliding window, which llama.cpp's carriers have not; export another.")
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"this model's MLP uses {config.hidden_act}; llama.cpp's carriers know silu alone.")
    settings = config.rope_parameters
    moving = settings["rope_type"] == "longrope" and settings["short_factor"] != settings["long_factor"]
    if moving or settings["rope_type"] == "dynamic" or 2 * len(rotary.inv_freq) != family.stock_layer(config).qk_dim:
        raise ModelError(
            f"this model's positions ({settings['rope_type']}) are no fixed frequencies for whole heads, which is all "
            "that a GGUF file can hold; export another."
        )


def layouts(model: Any, blocks: list[Block], layers: tuple[LayerShape, ...]) -> list[Layout]:
    """All ways to carry a model, first that with the least memory for weights and a cache of the whole context."""
    theta, base = model.model.rotary_emb.inv_freq.double(), float(model.config.rope_parameters["rope_theta"])
    kept = [pairs_of(block) for block in blocks]
    pairs = tuple(sorted({int(pair) for groups in kept for pair in groups.flatten()}))
    v_dim, widths = max(layer.v_dim for layer in layers), tuple(layer.mlp_width for layer in layers)
    k_dim = max(2 * len(pairs), v_dim + v_dim % 2)
    factors = _factors(theta, base, pairs, k_dim)
    alike = len({(s.query_heads, s.kv_heads, s.mlp_width) for s in layers}) == 1 and min(widths) > 0
    found = [Layout("llama", k_dim, k_dim, widths, pairs, factors)] if alike else []
    found.append(Layout("deci", k_dim, k_dim, tuple(max(width, LEAST_MLP) for width in widths), pairs, factors))
    whole, biased = tuple(range(len(theta))), any(_biased(block) for block in blocks)
    if v_dim < 2 * len(theta) and not biased and not _factors(theta, base, whole, 2 * len(theta)):
        found.append(Layout("mimo2", 2 * len(theta), v_dim, (max(widths),) * len(widths), whole, ()))
    table, context = model.get_input_embeddings().weight, model.config.max_position_embeddings
    tied = table.data_ptr() == model.get_output_embeddings().weight.data_ptr()

    def memory(way: Layout) -> int:
        again = table.numel() if tied and way.arch == "mimo2" else 0  # which wants the output table of its own
        return BYTES * (way.layer_weights(layers, table.shape[1]) + again) + way.cache_bytes(layers) * context

    return sorted(found, key=memory)


def _biased(block: Block) -> bool:
    """Whether a layer has biases for which mimo2 has no place."""
    return any(matrix.bias is not None for matrix in (block.output, *block.inner, *filter(None, (block.down,))))


def pairs_of(block: Block) -> torch.Tensor:
    """The source's rotary pairs that every key/value head of a layer kept (G, P)."""
    attention = block.attention
    kept = getattr(attention, "pairs_GP", None)
    return torch.arange(attention.qk_width // 2).expand(attention.kv_heads, -1) if kept is None else kept


def _factors(theta: torch.Tensor, base: float, pairs: tuple[int, ...], width: int) -> tuple[float, ...]:
    """What llama.cpp divides its own frequencies by to get those of the pairs; empty where they are the same."""
    own = base ** (-torch.arange(0, width, 2).double() / width)
    factors = torch.ones(width // 2).double()
    factors[: len(pairs)] = own[: len(pairs)] / theta[list(pairs)]
    return () if bool(((factors - 1).abs() < SAME).all()) else tuple(factors.tolist())


def heads_in(layout: Layout, block: Block, queries: bool) -> torch.Tensor:
    """A layer's query or key projection as llama.cpp takes it (rows, hidden), its bias beside it."""
    attention = block.attention
    matrix, heads = (attention.q_proj, attention.query_heads) if queries else (attention.k_proj, attention.kv_heads)
    weight = _with_bias(matrix, attention.q_proj.first.weight.detach() if queries and attention.q_rank else None)
    weight = weight.view(heads, attention.qk_width, -1)
    found = weight.new_zeros((heads, layout.k_dim, weight.shape[-1]))
    place, slot = layout.placed(), {pair: number for number, pair in enumerate(layout.pairs)}
    kept = pairs_of(block).repeat_interleave(heads // attention.kv_heads, 0)
    for head in range(heads):
        slots = [slot[int(pair)] for pair in kept[head]]
        found[head, place[:, slots].flatten()] = weight[head]
    return found.flatten(0, 1)


def values_in(layout: Layout, block: Block) -> torch.Tensor:
    """A layer's value projection as llama.cpp takes it (rows, hidden), its bias beside it."""
    attention = block.attention
    weight = _with_bias(attention.v_proj).view(attention.kv_heads, attention.v_dim, -1)
    return torch.nn.functional.pad(weight, (0, 0, 0, layout.v_dim - attention.v_dim)).flatten(0, 1)


def output_in(layout: Layout, block: Block) -> torch.Tensor:
    """A layer's output projection as llama.cpp takes it (hidden, rows)."""
    attention, weight = block.attention, block.output.weight.detach()
    weight = weight.view(len(weight), attention.query_heads, attention.v_dim)
    return torch.nn.functional.pad(weight, (0, layout.v_dim - attention.v_dim)).flatten(1)


def _with_bias(matrix: torch.nn.Linear, factor: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix, multiplied with the factor before it where there is one."""
    weight = matrix.weight.detach() if factor is None else matrix.weight.detach() @ factor
    return weight if matrix.bias is None else torch.cat((weight, matrix.bias.detach().unsqueeze(1)), 1)
