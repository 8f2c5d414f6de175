"""Tiny random models and inputs of every kind that Headwise reads, for the fault campaign. Same bytes every time."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the",
    "a",
    "one",
    "small",
    "cat",
    "dog",
    "house",
    "tree",
    "river",
    "walks",
    "sees",
    "under",
    "over",
    "and",
    "then",
)


def text(path: Path, sentences: int = 160) -> None:
    """Seeded sentences, a few thousand characters."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 9))) + "." for _ in range(sentences)]
    path.write_text("\n".join(lines) + "\n")


def texts(folder: Path) -> None:
    """The same text in every form that is read."""
    folder.mkdir()
    text(folder / "plain.txt")
    content = (folder / "plain.txt").read_text()
    lines = [json.dumps({"text": line * 3}) for line in content.splitlines()]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    for suffix, module in ((".xz", lzma), (".gz", gzip), (".bz2", bz2)):
        (folder / f"packed.txt{suffix}").write_bytes(module.compress(content.encode()))  # type: ignore[attr-defined]


def tokenizer(**more: Any) -> Any:
    """One token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(["<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **more)


def decoder() -> Any:
    """A Llama of two layers with a few thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def model(folder: Path, shards: bool = False) -> None:
    """The decoder with its tokenizer, as a user's folder; `shards`: its weights in several files."""
    decoder().save_pretrained(folder, **({"max_shard_size": "4KB"} if shards else {}))
    tokenizer().save_pretrained(folder)


def gguf_model(path: Path) -> None:
    """The decoder as one .gguf file."""
    import gguf

    stock = decoder()
    config, words = stock.config, tokenizer().get_vocab()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(words, key=words.__getitem__)[:-2], "th", "er"])
    writer.add_token_merges(["t h", "e r"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    names |= {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for i in range(2) for a, b in parts.items()}
    for name, tensor in stock.state_dict().items():
        if (stem := name.removesuffix(".weight")) in names:
            writer.add_tensor(f"{names[stem]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vision(folder: Path) -> None:
    """A classifier of images in `source`, and labelled images in an .npz file."""
    from transformers import ViTImageProcessor

    from headwise.families.vit import FAMILY

    FAMILY.tiny(FAMILY.model_types[0]).save_pretrained(folder / "source")
    size = json.loads((folder / "source" / "config.json").read_text())["image_size"]
    ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(folder / "source")
    pixels = np.random.default_rng(0).integers(0, 256, (40, size, size, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", x=pixels, y=np.arange(40) % 2)


def speech(folder: Path) -> None:
    """A Whisper that hears a second in `source`, and recordings."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    from headwise.families.whisper import FAMILY

    words = tokenizer(pad_token="</s>")
    ends = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), 1)
    sizes = dict(vocab_size=258, max_source_positions=50, max_target_positions=32)
    FAMILY.tiny(**sizes, **ends, decoder_start_token_id=0).save_pretrained(folder / "source")
    WhisperProcessor(WhisperFeatureExtractor(feature_size=6, chunk_length=1), words).save_pretrained(folder / "source")
    (folder / "wavs").mkdir()
    for index in range(4):
        noise = np.random.default_rng(index).normal(0, 3000, 8000).astype("<i2")
        with wave.open(str(folder / "wavs" / f"{index}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(noise.tobytes())
