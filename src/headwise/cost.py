"""What a shape costs: formulas only, each equal to what is counted on the real object.

A multiply-add is two FLOPs. Norms, rotations and the softmax itself are left out: they are below a percent.
"""

from dataclasses import replace

from headwise.types import LayerShape, ModelShape
from headwise.types.weights import NUMBER_BYTES, WHOLE, matrix_bytes


def layer_parameters(model: ModelShape, layer: LayerShape) -> int:
    """Parameters of one layer; none where it is gone."""
    if layer.gone:
        return 0
    norms = model.layer_norms if layer.mlp_width else model.layer_norms // 2
    return _layer_weights(model, layer) + _layer_biases(model, layer) + norms


def _layer_weights(model: ModelShape, layer: LayerShape) -> int:
    """Entries of all matrices that a token is multiplied with."""
    weights = sum(rows * columns for rows, columns in matrices(model, layer).values())
    weights += layer.q_rank * model.hidden_size  # the other factor of queries
    if layer.projected:
        weights += 2 * layer.kv_heads * layer.qk_width * layer.qk_dim
    if layer.v_projected:  # back to every head's own values; the way there is in the weights
        weights += layer.kv_heads * layer.v_dim * layer.v_width
    return weights


def matrices(model: ModelShape, layer: LayerShape) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a layer that can be stored in few bits."""
    wide, inner = model.hidden_size, layer.mlp_width
    found = {
        "q": (layer.query_heads * layer.head_width, layer.q_rank or wide),
        "k": (layer.kv_heads * layer.qk_width, wide),
        "v": (layer.kv_heads * layer.v_dim, wide),
        "o": (wide, layer.query_heads * layer.out_dim),
        "gate": (inner * max(0, model.mlp_matrices - 2), wide),
        "up": (inner, wide),
        "down": (wide, inner),
    }
    return {name: size for name, size in found.items() if size[0] * size[1]}


def _layer_biases(model: ModelShape, layer: LayerShape) -> int:
    values, centred = layer.kv_heads * layer.v_dim, bool(layer.v_code)  # coded values have biases in any case
    rows = layer.query_heads * layer.head_width + layer.kv_heads * layer.qk_width * model.k_bias
    biases = rows * model.qkv_bias + values * (model.qkv_bias or centred)
    biases += model.hidden_size * (model.o_bias or centred) * (layer.query_heads > 0)
    biases += layer.kv_heads * layer.qk_dim * bool(layer.k_code)  # the mean of the keys
    inner = (model.mlp_matrices - 1) * layer.mlp_width
    return biases + (inner + model.hidden_size * (layer.mlp_width > 0)) * model.mlp_bias


def parameters(model: ModelShape) -> int:
    """All parameters, tied embeddings counted once."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return embeddings + model.other_parameters + sum(layer_parameters(model, layer) for layer in model.layers)


def layer_weight_bytes(model: ModelShape, layer: LayerShape) -> int:
    """Bytes of one layer's numbers as stored: packed matrices in their bits, all others in 16.

    Indices of rotary pairs are counted wherever there may be some, though only layers that lost pairs store them.
    """
    if layer.gone:
        return 0
    whole = NUMBER_BYTES * layer_parameters(model, layer)
    for name, (rows, columns) in matrices(model, layer).items():
        whole += matrix_bytes(rows, columns, getattr(layer, f"w_{name}")) - matrix_bytes(rows, columns, WHOLE)
    pairs = 8 * layer.kv_heads * (layer.qk_width // 2) * (model.grain.rotary and not layer.k_code)
    gains = NUMBER_BYTES * layer.kv_heads * (layer.qk_dim * bool(layer.k_code) + layer.v_dim * bool(layer.v_code))
    return whole + pairs + gains


def table_bytes(model: ModelShape) -> int:
    """Bytes of the tables of words, as stored."""
    size = model.vocab_size, model.hidden_size
    return matrix_bytes(*size, model.w_embed) + (0 if model.tied_embeddings else matrix_bytes(*size, model.w_head))


def weight_bytes(model: ModelShape) -> int:
    """Bytes of all weights as stored."""
    layers = sum(layer_weight_bytes(model, layer) for layer in model.layers)
    return table_bytes(model) + NUMBER_BYTES * model.other_parameters + layers


def layer_text_bytes(model: ModelShape, layer: LayerShape, length: int) -> int:
    """Cache bytes that one layer keeps for one text of `length` tokens."""
    if not layer_kv_bytes_per_token(model, layer):
        return 0
    return layer.text_bytes(length, model.cache_bytes)


def layer_flops_per_token(model: ModelShape, layer: LayerShape, attended: float) -> float:
    """FLOPs of one layer for one token that attends to `attended` positions."""
    products = _layer_weights(model, layer)
    heads, rows = layer.query_heads, layer.kv_heads
    if layer.projected:  # every query head is projected, by its group's matrix
        products += (heads * layer.head_width - rows * layer.qk_width) * layer.qk_dim
    if layer.v_projected:
        products += (heads * layer.out_dim - rows * layer.v_width) * layer.v_dim
    seen = sum(layer.k_code) or (layer.qk_dim if layer.projected else layer.head_width)  # others are zeros
    read = sum(layer.v_code) or (layer.v_dim if layer.v_projected else layer.out_dim)
    return 2.0 * products + 2.0 * attended * heads * (seen + read)


def attention_flops(model: ModelShape, layer: LayerShape, length: int) -> float:
    """FLOPs of one layer's attention, projections included, to read a prompt of `length` tokens."""
    return length * layer_flops_per_token(model, replace(layer, mlp_width=0), attended(model, length, layer.role))


def attended(model: ModelShape, length: int, role: str = "") -> float:
    """Positions that a token of a text attends to on average: those before it, or all where nothing is cached.

    So do layers of an encoder, and those that look at its output.
    """
    return (length + 1) / 2 if model.cached and role not in ("encoder", "cross") else float(length)


def prefill_flops(model: ModelShape, length: int) -> float:
    """FLOPs to read a prompt of `length` tokens, with logits for the last token only.

    Of an encoder-decoder, to read an input and an output of that length each.
    """
    head = 2.0 * model.hidden_size * model.vocab_size
    per_token = (layer_flops_per_token(model, layer, attended(model, length, layer.role)) for layer in model.layers)
    return head + length * sum(per_token)


def layer_kv_bytes_per_token(model: ModelShape, layer: LayerShape) -> int:
    """Cache bytes that one layer keeps for every token; an encoder's layer keeps none.

    In a decoder with an encoder, tokens are those of the output for `self` and those of the input for `cross` layers.
    """
    if not (layer.query_heads and model.cached) or layer.role == "encoder":
        return 0
    return layer.kv_heads * layer.row_bytes(model.cache_bytes)


def kv_bytes_per_token(model: ModelShape) -> int:
    """Cache bytes that the model keeps for every token: 8 layers of 4 heads of 64 in two bytes keep 8,192.

    An encoder-decoder's are those of a token of the input and of one of the output together.
    """
    return sum(layer_kv_bytes_per_token(model, layer) for layer in model.layers)
