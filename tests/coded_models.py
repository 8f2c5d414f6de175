"""Tiny models whose cache is coded, for tests, and ways to read with them."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache

from headwise import families
from headwise.cuts import reshape
from headwise.families.llama import FAMILY as llama
from headwise.probes import fisher, gram
from headwise.types import BITS, LayerKeep, LayerShape, Plan


def sharp_folder(path: Path, words: int, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny Llama that attends sharply, saved with the embedded model's tokens; beside it a text of so many words."""
    tokenizer = AutoTokenizer.from_pretrained(families.locate("embedded")[0])
    model = llama.tiny(vocab_size=len(tokenizer), initializer_range=0.3)
    families.set_format(model, dtype)
    model.config.dtype = dtype
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path.parent / "text.txt").write_text(". ".join(f"word{n * n % 97} is{n % 7}" for n in range(words)))
    return path


def drawn(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def spread_over(size: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """A code that gives equal parts of a row so many bits each."""
    given = [widths[place * len(widths) // size] for place in range(size)]
    return tuple(given.count(bits) for bits in BITS)


def coded_layers(layers: tuple[LayerShape, ...], kept: float) -> tuple[LayerShape, ...]:
    """Keys and values in other bits in every layer."""
    made = []
    for index, layer in enumerate(layers):
        keys, values = (max(1, int(kept * size)) for size in (layer.qk_dim, layer.v_dim))
        codes = spread_over(keys, (8, 6, 3 - index % 2)), spread_over(values, (5, 4, 2))
        made.append(replace(layer, k_code=codes[0], v_code=codes[1]))
    return tuple(made)


@functools.cache
def made(kind: str, pool: int = 1, kept: float = 0.75, changes: tuple[tuple[str, Any], ...] = ()) -> Any:
    """A family, a tiny source on our modules, its plan and the coded model; in double precision.

    So no number lies so near to the edge of a step that the order of a sum decides on which side.
    """
    family = next(family for family in families.known() if kind in family.model_types)
    source = family.tailor(family.tiny(kind, **dict(changes)), pool)
    rows = family.example(source.config, 8, 24)
    found = zip(gram.collect(family, source, rows, mlp=False), fisher.collect(family, source, rows, 0), strict=True)
    before = family.shape_of(source.config)
    after = before.with_layers(coded_layers(before.layers, kept))
    plan = Plan("", before, after, (LayerKeep(),) * len(after.layers), "exact", (), {}, 0.0, 0)
    model = reshape(family, source, plan, [one | more for one, more in found])
    return family, source.double(), plan, model.double().eval()


def uncoded(family: Any, model: Any) -> Any:
    """The same model with coefficients as they are."""
    other = copy.deepcopy(model)
    for block in family.blocks(other):
        for coder in block.attention.coders:
            coder.rounded = coder.fine.rounded = lambda x: x
    return other


@torch.no_grad()
def said(model: Any, ids: torch.Tensor, cache: Any = None, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, **more).logits
    return found


def fresh(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-6, rtol=1e-6)


def in_parts(model: Any, ids: torch.Tensor, sizes: list[int], cache: Any = None) -> torch.Tensor:
    cache = fresh(model) if cache is None else cache
    return torch.cat([said(model, part, cache) for part in ids.split(sizes, 1)], 1)
