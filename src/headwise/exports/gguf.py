"""GGUF, the file format of llama.cpp: one file with weights, sizes and tokenizer.

Portable models are written as plain `llama`, with the frequencies of the kept rotary pairs as `rope_freqs.weight`.
Layers with sizes of their own are written as `deci` or `mimo2`, whatever needs less memory (`_llama_layout.py`).
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, ModelError
from headwise.exports._asked import ExportOptions, ExportRequest
from headwise.exports._llama_check import check
from headwise.exports._llama_layout import Layout, heads_in, layouts, output_in, refuse_model, values_in
from headwise.exports._llama_tokens import vocabulary
from headwise.families import Block, family_of
from headwise.families._config import stored_dtype
from headwise.types import LayerShape

MEANING = "one file for llama.cpp and what is built on it"
NEEDS, EXTRA, SUFFIX = ("gguf",), "gguf", ".gguf"
TYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
STORED = {torch.float16: "f16", torch.bfloat16: "bf16"}
Tensor = tuple[str, Callable[[], torch.Tensor]]


def refuse(options: ExportOptions) -> None:
    """Refuse options that this format has not."""
    if options.type not in TYPES:
        raise HeadwiseError(
            f"--type is '{options.type}'; give {', '.join(TYPES)}. Other types: write f16 and run llama.cpp's own "
            "llama-quantize on it."
        )
    if options.tokenizer not in ("text", "ids"):
        raise HeadwiseError(f"--tokenizer is '{options.tokenizer}'; give text or ids.")


def write(asked: ExportRequest, path: Path) -> dict[str, Any]:
    """Write the file, run it where llama.cpp is installed, and say what it holds and what filling costs."""
    import gguf

    refuse_model(asked.model)
    family = family_of(asked.model.config)
    model = family.tailor(asked.model, share="all")
    blocks, layers = family.blocks(model), family.shape_of(model.config).layers
    words = vocabulary(asked.reader, len(model.get_input_embeddings().weight), asked.options.tokenizer)
    layout = layouts(model, blocks, layers)[0]
    kind = asked.options.type if asked.options.type != "auto" else STORED.get(stored_dtype(model.config), "f32")
    writer = gguf.GGUFWriter(path, layout.arch, use_temp_file=True)
    try:
        _settings(writer, model, layout, layers, kind, asked.name)
        for name, value in words.items():
            getattr(writer, f"add_{name}")(value)
        for name, made in asked.track(list(_tensors(model, blocks, layout)), "writing tensors"):
            _add(writer, name, made(), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except (OverflowError, struct.error) as error:
        raise ModelError(f"the model's configuration has a number that no GGUF file holds ({error}).") from None
    finally:
        writer.close()
    facts = {"architecture": layout.arch, "type": kind, "bytes": path.stat().st_size, **_filling(layout, layers)}
    facts["tokenizer"] = words["tokenizer_model"] if asked.options.tokenizer == "text" else "ids"
    text = asked.options.tokenizer == "text"
    return {**facts, "checked": check(asked, path, kind, text) if asked.options.check else None}


def _settings(writer: Any, model: Any, layout: Layout, layers: tuple[LayerShape, ...], kind: str, name: str) -> None:
    import gguf

    config, per_layer = model.config, layout.arch != "llama"

    def sizes(found: list[int]) -> Any:
        return found if per_layer else found[0]

    writer.add_name(Path(name).name)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(layers))
    writer.add_vocab_size(len(model.get_input_embeddings().weight))
    writer.add_feed_forward_length(sizes(list(layout.widths)))
    writer.add_head_count(sizes([layer.query_heads for layer in layers]))
    writer.add_head_count_kv(sizes([layer.kv_heads for layer in layers]))
    writer.add_key_length(layout.k_dim)
    writer.add_value_length(layout.v_dim)
    writer.add_rope_dimension_count(layout.k_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if layout.arch == "mimo2":  # which wants a layer with a window: here one that sees the whole context
        writer.add_sliding_window(config.max_position_embeddings)
        writer.add_sliding_window_pattern([number == 0 for number in range(len(layers))])
        writer.add_rope_freq_base_swa(float(config.rope_parameters["rope_theta"]))
        writer.add_expert_feed_forward_length(0)


def _tensors(model: Any, blocks: list[Block], layout: Layout) -> Iterator[Tensor]:
    """All tensors by llama.cpp's names; each is made when it is written."""
    body, table = model.model, model.get_input_embeddings().weight
    if layout.factors:
        yield "rope_freqs.weight", lambda: torch.tensor(layout.factors)
    yield "token_embd.weight", lambda: table
    yield "output_norm.weight", lambda: body.norm.weight
    head = model.get_output_embeddings()
    tied = head.weight.data_ptr() == table.data_ptr()
    if not tied or layout.arch == "mimo2" or head.bias is not None:
        yield "output.weight", lambda: head.weight
    if head.bias is not None:
        raise ModelError("this model's output table has a bias, which llama.cpp's carriers have not; export another.")
    for number, (block, layer) in enumerate(zip(blocks, body.layers, strict=True)):
        for name, made in _layer(block, layer, layout, number, float(body.rotary_emb.attention_scaling)):
            yield f"blk.{number}.{name}", made


def _layer(block: Block, layer: Any, layout: Layout, number: int, turning: float) -> Iterator[Tensor]:
    # llama.cpp scales by the root of its own key length; some rope types have a factor of cos and sin.
    scale = block.attention.attend.scaling * layout.k_dim**0.5 * turning**2
    yield "attn_norm.weight", lambda: layer.input_layernorm.weight
    parts = {
        "attn_q": (block.attention.q_proj, lambda: heads_in(layout, block, True) * scale),
        "attn_k": (block.attention.k_proj, lambda: heads_in(layout, block, False)),
        "attn_v": (block.attention.v_proj, lambda: values_in(layout, block)),
    }
    for name, (matrix, made) in parts.items():
        columns = block.attention.hidden
        yield f"{name}.weight", lambda made=made, columns=columns: made()[:, :columns]  # type: ignore[misc]
        if matrix.bias is not None:
            yield f"{name}.bias", lambda made=made, columns=columns: made()[:, columns]  # type: ignore[misc]
    yield "attn_output.weight", lambda: output_in(layout, block)
    if block.output.bias is not None:
        yield "attn_output.bias", lambda: block.output.bias
    yield "ffn_norm.weight", lambda: layer.post_attention_layernorm.weight
    yield from _mlp(block, layout.widths[number])


def _mlp(block: Block, width: int) -> Iterator[Tensor]:
    assert block.down is not None, "a layer of these families has an MLP"
    missing = width - block.down.in_features

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, missing) if x.dim() == 2 else (0, missing))

    for name, matrix in zip(("ffn_gate", "ffn_up"), block.inner, strict=True):
        yield f"{name}.weight", lambda matrix=matrix: rows(matrix.weight)  # type: ignore[misc]
        if matrix.bias is not None:
            yield f"{name}.bias", lambda matrix=matrix: rows(matrix.bias)  # type: ignore[misc]
    down = block.down
    yield "ffn_down.weight", lambda: torch.nn.functional.pad(down.weight, (0, missing))
    if down.bias is not None:
        yield "ffn_down.bias", lambda: down.bias


def _add(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    """Vectors stay in 32 bits; matrices whose rows do not divide into a type's blocks stay in 16."""
    import gguf

    array = tensor.detach().float().contiguous().numpy()
    wanted = gguf.GGMLQuantizationType[kind.upper() if array.ndim > 1 else "F32"]
    if array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)


def _filling(layout: Layout, layers: tuple[LayerShape, ...]) -> dict[str, Any]:
    """What the cache takes there per token, in 16 bits, and how much of it is zeros."""
    there, needed = layout.cache_bytes(layers), sum(2 * s.kv_heads * (s.qk_dim + s.v_dim) for s in layers)
    return {"cache_bytes_per_token": there, "cache_filling_bytes_per_token": there - needed}
