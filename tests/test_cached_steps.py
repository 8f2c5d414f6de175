"""A cut model that decodes from a cache, token by token, on a CPU: its logits, and what it does to the cache."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from headwise import families
from headwise.runtime import cache_headwise as runtime
from headwise.runtime.step_headwise import SPARE

SIZES = dict(query_heads=4, kv_heads=2, qk_width=16, qk_dim=16, v_dim=16, mlp_width=24)
LAYERS = [  # keys wider than values, projected keys narrower, turned pairs chosen, all as in the source
    {**SIZES, "v_dim": 8},
    {**SIZES, "qk_dim": 8, "v_dim": 12},
    {**SIZES, "qk_width": 12, "qk_dim": 12},
    SIZES,
]
IDS = torch.randint(3, 60, (2, SPARE + 40), generator=torch.Generator().manual_seed(0))
READ = 12  # tokens before the first step


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = families.family_of_type("llama").kinds["llama"].tailored_classes("llama")
    stock = dict(vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=len(LAYERS), head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    assert issubclass(made["AutoConfig"], LlamaConfig)
    config = made["AutoConfig"](**stock, **heads, headwise={"layers": LAYERS})
    return made["AutoModelForCausalLM"](config).eval()


def step(model, cache, ids, **more):
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits[:, -1].float()


def close(found, wanted, dtype=torch.float32):
    return torch.allclose(found, wanted.float(), atol=2e-4 if dtype == torch.float32 else 0.15)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_step_by_step_equals_all_at_once(model, rows, padding, dtype):
    ids, seen = IDS[:rows], torch.ones_like(IDS[:rows])
    seen[0, :padding] = 0  # one row is shorter
    places = (seen.cumsum(-1) - 1).clamp_min(0)
    own = copy.deepcopy(model).to(dtype)
    wanted = own(input_ids=ids, attention_mask=seen, position_ids=places).logits
    cache = DynamicCache(config=own.config)
    given = dict(attention_mask=seen[:, :READ], position_ids=places[:, :READ])
    step(own, cache, ids[:, :READ], **given)
    for at in range(READ, ids.shape[1]):
        given = dict(attention_mask=seen[:, : at + 1], position_ids=places[:, at : at + 1])
        assert close(step(own, cache, ids[:, at : at + 1], **given), wanted[:, at], dtype), f"token {at}"
        assert cache.get_seq_length() == at + 1
    assert cache.layers[0].keys.shape == (rows, 2, ids.shape[1], 16)
    assert cache.layers[1].values.shape == (rows, 2, ids.shape[1], 12)


@torch.no_grad()
def test_what_others_hold_of_a_cache_is_never_written_to(model):
    cache = DynamicCache(config=model.config)
    step(model, cache, IDS[:, :READ])
    step(model, cache, IDS[:, READ : READ + 1])
    held = [layer.keys for layer in cache.layers]
    other = copy.copy(cache)  # which has the same tensors
    other.layers = [copy.copy(layer) for layer in cache.layers]
    was = [keys.clone() for keys in held]
    first = step(model, cache, IDS[:, 30:31])
    kept = cache.layers[0].keys.clone()
    second = step(model, other, IDS[:, 31:32])
    assert not torch.allclose(first, second), "they read different tokens"
    assert torch.equal(cache.layers[0].keys, kept)
    again = DynamicCache(config=model.config)
    step(model, again, IDS[:, : READ + 1])
    assert close(step(model, again, IDS[:, 30:31]), first)
    cache.crop(-1)
    assert close(step(model, cache, IDS[:, 31:32]), second), "continues from where it was cropped"
    assert all(torch.equal(a, b) for a, b in zip(held, was, strict=True))


def test_a_cache_goes_on_in_any_mode(model):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        step(model, cache, IDS[:, :READ])
        step(model, cache, IDS[:, READ : READ + 1])
    with torch.no_grad():
        step(model, cache, IDS[:, READ + 1 : READ + 2])
        wanted = model(input_ids=IDS[:, : READ + 3]).logits[:, -1]
        found = step(model, copy.deepcopy(cache), IDS[:, READ + 2 : READ + 3])
    assert close(found, wanted)
    cache = DynamicCache(config=model.config)
    for at in range(4):
        last = step(model, cache, IDS[:, at : at + 1])
    last.sum().backward()
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters()), "gradients pass through"
    model.zero_grad()


def test_a_cache_that_counts_something_is_left_to_its_own_code(monkeypatch):
    class Counting(DynamicLayer):
        seen = 0

        def update(self, *args, **kwargs):
            self.seen += 1
            return super().update(*args, **kwargs)

    assert runtime._only_appends(), "as this version of transformers does"
    monkeypatch.setattr(runtime, "DynamicLayer", Counting)
    assert not runtime._only_appends.__wrapped__()


def test_a_module_of_transformers_can_be_imported_right_after_headwise():
    firsts = ("transformers.models.llama.modeling_llama", "transformers.modeling_layers")
    code = "import headwise\nimport {}\nimport transformers\ntransformers.AutoConfig.for_model('headwise_llama')"
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen([sys.executable, "-c", code.format(first)], **pipes) for first in firsts]
    for process in running:  # side by side: most of the time goes into imports
        assert (said := process.communicate(timeout=300)[1]) is not None and process.returncode == 0, said[-2000:]
