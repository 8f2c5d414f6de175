"""Fast models whose cache is in bits: the same answers as the ordinary way. Kernels are plain code here.

`test_fast_kernel.py` compares the kernels with that code.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import code_reference
import coded_models as coded
import pytest
import torch

from headwise.errors import ModelError
from headwise.fast.code_layout import CodeLayout
from headwise.fast.model import covers, optimise
from headwise.runtime.cache_headwise import WHOLE
from headwise.runtime.coder_headwise import RowCoder


@pytest.fixture
def plain_kernels(monkeypatch):
    for name, kernel in (("code_place", "place_codes"), ("code_beside", "CodeDecode")):
        made = SimpleNamespace(**{kernel: getattr(code_reference, kernel)})
        monkeypatch.setitem(sys.modules, f"headwise.fast.{name}", made)
    for name in ("coded", "model"):
        monkeypatch.setattr(f"headwise.fast.{name}.KERNEL_DEVICES", ["cpu"])


def both(kind, pool):
    model = copy.deepcopy(coded.made(kind, pool)[3])
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = None
    return model, optimise(copy.deepcopy(model))


def read(model, cache, ids, mask, sizes):
    positions, at, found = (mask.cumsum(1) - 1).clamp(min=0), 0, []
    for size in sizes:
        now = slice(at, at + size)
        given = dict(attention_mask=mask[:, : at + size], position_ids=positions[:, now])
        found.append(coded.said(model, ids[:, now], cache, **given))
        at += size
    return torch.cat(found, 1)


@pytest.mark.parametrize(("kind", "pool", "padding", "sizes"), [
    ("llama", 2, 5, [70, 1, 1, 1]),
    ("llama", 1, 0, [2, 1, 1, 1, 1, 33]),
    ("gpt_neox", 1, 25, [40, 30, 1, 1]),
])  # fmt: skip
def test_fast_steps_read_what_ordinary_ones_do(kind, pool, padding, sizes, plain_kernels):
    model, fast = both(kind, pool)
    ids = coded.drawn(2, sum(sizes))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    want = read(model, coded.fresh(model), ids, mask, sizes)
    got = read(fast, fast.headwise_fast.new_cache(len(ids[0])), ids, mask, sizes)
    seen = mask.bool()
    assert (got - want)[seen].norm() < 1e-3 * want[seen].norm(), "scales have 16 bits"
    assert fast.headwise_fast.ordinary == 0


def test_texts_reuse_a_cache_and_stay_the_same(plain_kernels):
    with pytest.warns(UserWarning, match="the fast cache takes .* where memory is what counts"):  # rows are narrow
        model, fast = both("llama", 2)
    for seed in range(2):
        ids = coded.drawn(2, 40, seed)
        how = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
        assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how))
    assert fast.headwise_fast.pool.layers[0].sides, "rows are in bits"
    whole = 2 * 256 * sum(layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in coded_layers(fast)) * 8
    assert fast.headwise_fast.pool.nbytes() < whole


def coded_layers(model):
    return [module for module in model.modules() if getattr(module, "coders", None) is not None]


def test_a_text_cannot_leave_the_fast_way(plain_kernels):
    _, fast = both("llama", 1)
    ids = coded.drawn(1, 2 * WHOLE)
    cache = fast.headwise_fast.new_cache(20)
    coded.said(fast, ids, cache)
    with pytest.raises(ModelError, match="generate it anew"), pytest.warns(UserWarning, match="slower way"):
        coded.said(fast, ids[:, :1], cache, output_attentions=True)


def test_a_text_that_begins_the_ordinary_way_stays_there(plain_kernels):
    model, fast = both("llama", 1)
    ids = coded.drawn(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0  # a hole
    want = read(model, coded.fresh(model), ids, mask, [11, 1])
    with pytest.warns(UserWarning, match="has holes"):
        got = read(fast, fast.headwise_fast.new_cache(20), ids, mask, [11, 1])
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-5, rtol=1e-5)


def test_on_a_cpu_coded_models_stay_as_they_are():
    model, same = both("llama", 1)
    assert not hasattr(same, "headwise_fast") and not covers(model)


def test_segments_are_small_where_large_ones_would_be_mostly_empty():
    many, few = ({str(bits): 36 for bits in range(1, 9)}, 288), ({"8": 128, "4": 512, "2": 384}, 1024)
    sizes = []
    for one in (many, few):
        coder = RowCoder(*one)
        layout = CodeLayout(coder)
        sizes.append(layout.segment)
        assert 2 * layout.words + 2 * len(layout.segments) < 2.5 * coder.bytes
    assert sizes == [32, 64]
