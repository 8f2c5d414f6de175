"""Tiny random Llamas with layers of given sizes, and a tokenizer for them, as an export takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwise import families
from headwise.cuts import save
from headwise.types import LayerShape

HEAD, WORDS = 16, 300  # head dimension of a tiny model, and its vocabulary
PLAIN = LayerShape(query_heads=4, kv_heads=2, qk_dim=HEAD, v_dim=HEAD, mlp_width=64, qk_width=HEAD)


def tokenizer(split: Any = None) -> PreTrainedTokenizerFast:
    """Bytes and a few words that merge; text is split as GPT-2 does, or in another way."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("\u0120", "the")]
    words = ["<s>", *letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<s>")


def tailored(layers: tuple[LayerShape, ...], **changes: Any) -> Any:
    """A tailored Llama with random weights; every key/value head of a narrower layer keeps rotary pairs of its own."""
    family = families.family_of_type("llama")
    torch.manual_seed(0)
    like = family.tiny("llama", vocab_size=WORDS, num_hidden_layers=len(layers), **changes)
    model: Any = family.frame(like, layers).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 1.0 if parameter.dim() == 1 else HEAD**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("pairs_GP"):
            buffer.copy_(torch.stack([torch.randperm(HEAD // 2)[: buffer.shape[1]].sort()[0] for _ in buffer]))
        elif name.endswith(("k_gain_GK", "v_gain_GV")):
            buffer.fill_(1.0)
    model.model.rotary_emb = like.model.rotary_emb
    model.config.architectures = [type(model).__name__]
    return model.eval()


def saved(folder: Path, *layers: LayerShape, split: Any = None, **changes: Any) -> Path:
    """The folder of such a model."""
    model = tailored(layers, **changes)
    save(families.family_of(model.config), model, tokenizer(split), folder, portable=False)
    return folder
