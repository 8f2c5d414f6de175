"""Fast inference: the same texts as the ordinary way, and kernels that agree with plain attention."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from tiny_models import cut, random_plan, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import headwise
from headwise import families
from headwise.errors import ModelError
from headwise.fast.cache import FastCache
from headwise.fast.layer import joins_as_llama
from headwise.fast.model import optimise, parts
from headwise.fast.paths import eager
from headwise.fast.step import DecodeStep
from headwise.latency.measuring import cases, filled, repeated, replayed

pytestmark = pytest.mark.usefixtures("own_table")

DECODERS = [
    pytest.param("llama", "llama", {}, id="llama"),
    pytest.param("qwen3", "qwen3", {}, id="qwen3"),
    pytest.param("gemma", "gemma2", {"sliding_window": 5}, id="gemma2-windows-and-caps"),
    pytest.param("gemma", "gemma3_text", {"sliding_window": 5}, id="gemma3-windows"),
    pytest.param("gpt2", "gpt2", {}, id="gpt2"),
    pytest.param("opt", "opt", {}, id="opt"),
    pytest.param("gpt_neox", "gpt_neox", {}, id="gpt_neox"),
    pytest.param("phi3", "phi3", {}, id="phi3"),
]


def prepared(name, kind, changes, cutting):
    """An ordinary model on our runtime, and the same made fast."""
    family = next(one for one in families.known() if one.name == name)
    stock = tiny(family, kind, changes)
    model = cut(family, stock, random_plan(family, stock, 3)) if cutting else family.tailor(stock)
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model, optimise(copy.deepcopy(model))


def prompts(rows=3, tokens=11):
    torch.manual_seed(1)
    ids = torch.randint(3, 40, (rows, tokens))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return ids, mask


@pytest.mark.parametrize("cutting", [False, True], ids=["uncut", "cut"])
@pytest.mark.parametrize(("name", "kind", "changes"), DECODERS)
def test_fast_models_write_the_same_text(name, kind, changes, cutting):
    model, fast = prepared(name, kind, changes, cutting)
    ids, mask = prompts()
    for given in ({"attention_mask": mask}, {"attention_mask": torch.ones_like(ids)}):
        how = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, **given)
        assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how))
    assert fast.headwise_fast.pool is not None, "the fast way was gone"


@pytest.mark.parametrize("cutting", [False, True], ids=["uncut", "cut"])
@pytest.mark.parametrize(("name", "kind", "changes"), DECODERS[:3])
def test_a_cache_may_hold_keys_and_values_side_by_side(name, kind, changes, cutting, monkeypatch):
    monkeypatch.setattr("headwise.fast.cache.SIDE_BY_SIDE", ("cpu",))
    test_fast_models_write_the_same_text(name, kind, changes, cutting)
    _, fast = prepared(name, kind, changes, cutting)
    layer = filled(fast, 2, 12).layers[0]
    assert layer.values.data_ptr() == layer.keys.data_ptr() + layer.keys.shape[3] * layer.keys.element_size()
    row = layer.keys.shape[3] + layer.values.shape[3]
    assert layer.keys.stride(2) == layer.values.stride(2) == -(-row // 16) * 16, "rows begin at whole multiples"


def plain_llama(cutting=True):
    return prepared("llama", "llama", {}, cutting)


HOW = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)


def test_long_prompts_are_read_in_parts(monkeypatch):
    model, fast = plain_llama()
    ids, mask = prompts(tokens=23)
    monkeypatch.setattr("headwise.fast.model.TOKENS", 16)
    for given in ({"attention_mask": mask}, {}):
        assert torch.equal(fast.generate(ids, **HOW, **given), model.generate(ids, **HOW, **given))
    monkeypatch.setattr("headwise.fast.model.CELLS", 100)
    cache = FastCache(fast.headwise_fast.layers, 40)
    made = list(parts(fast.headwise_fast, cache, 3, 23, whole=False))
    assert {rows.stop - rows.start for rows, _ in made} == {1} and max(t.stop - t.start for _, t in made) <= 4
    assert torch.equal(fast.generate(ids, **HOW, attention_mask=mask), model.generate(ids, **HOW, attention_mask=mask))


def test_what_the_fast_way_does_not_do_goes_the_ordinary_way():
    model, fast = plain_llama()
    ids, mask = prompts()
    holes = mask.clone()
    holes[0, 4] = 0
    with pytest.warns(UserWarning, match="ordinary, slower way: its attention mask has holes"):
        assert torch.equal(
            fast.generate(ids, **HOW, attention_mask=holes), model.generate(ids, **HOW, attention_mask=holes)
        )
    asked = [
        dict(HOW, attention_mask=mask.flip(1)),  # of holes it was told once
        dict(HOW, attention_mask=mask, num_beams=3),
        dict(HOW, attention_mask=mask, cache_implementation="static"),
        dict(HOW, attention_mask=mask, use_cache=False),
    ]
    for how in asked:
        assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how)), how
    with torch.no_grad():
        assert torch.equal(fast(ids).logits.argmax(-1), model(ids).logits.argmax(-1))
        cache = FastCache(fast.headwise_fast.layers, 40)
        with pytest.warns(UserWarning, match="slower way: it is given output_hidden_states"):
            seen = fast(ids, output_hidden_states=True, past_key_values=cache)
    assert len(seen.hidden_states) == 1 + fast.headwise_fast.layers


def test_a_pad_token_inside_a_prompt_is_slow_only_if_the_mask_is_left_to_be_guessed():
    model, fast = plain_llama()
    ids, _ = prompts()
    fast.generate(ids, **HOW)
    assert fast.headwise_fast.ordinary == 0
    ids[0, 4] = HOW["pad_token_id"]
    with pytest.warns(UserWarning, match="pass attention_mask=torch.ones_like"):
        guessed = fast.generate(ids, **HOW)
    assert fast.headwise_fast.ordinary == HOW["max_new_tokens"] and torch.equal(guessed, model.generate(ids, **HOW))
    whole = dict(HOW, attention_mask=torch.ones_like(ids))
    assert torch.equal(fast.generate(ids, **whole), model.generate(ids, **whole))
    ids[0, :5] = HOW["pad_token_id"]
    assert torch.equal(fast.generate(ids, **HOW), model.generate(ids, **HOW))
    assert fast.headwise_fast.ordinary == HOW["max_new_tokens"], "given whole, or at the left: no pass more"


class Asked(TorchDispatchMode):
    """Notes whatever makes the host wait for a value."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "equal.default")):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "kind", "changes"), DECODERS)
@torch.no_grad()
def test_a_step_never_waits_for_a_value(name, kind, changes):
    _, fast = prepared(name, kind, changes, True)
    ids, mask = prompts()
    cache, positions = FastCache(fast.headwise_fast.layers, 40), (mask.cumsum(1) - 1).clamp(min=0)
    fast(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    for step in range(2):
        mask = torch.cat((mask, mask[:, -1:]), 1)
        given = dict(input_ids=ids[:, :1], attention_mask=mask, position_ids=positions[:, -1:] + 1 + step)
        with Asked() as asked:
            fast(**given, past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert asked.waits == [] and fast.headwise_fast.ordinary == 0


def test_a_step_that_cannot_be_captured_is_taken_as_it_is(monkeypatch):
    _, fast = plain_llama()
    cache, ids = filled(fast, 3, 12), prompts()[0][:, :1]
    positions = torch.full_like(ids, 11)
    with torch.no_grad():
        want = repeated(fast, cache, ids, positions).argmax(-1)

    def refuse(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(DecodeStep, "_capture", refuse)
    with pytest.warns(UserWarning, match="cannot be captured .*not permitted.*launched anew"):
        first = replayed(fast, cache, ids, positions, 1)
    cache.rewind(11)
    assert torch.equal(first, want) and torch.equal(replayed(fast, cache, ids, positions, 1), want)
    assert cache.captured.graph is None


@pytest.mark.parametrize(("name", "kind", "changes"), DECODERS)
def test_kernels_are_built_for_just_the_cases_that_steps_ask_for(name, kind, changes, monkeypatch):
    _, fast = prepared(name, kind, changes, True)
    fast.headwise_fast.capture = False  # as on CUDA, but step by step
    asked = []
    monkeypatch.setattr("headwise.fast.fused.quickest", lambda case: asked.append(case) or eager)
    cache, ids = filled(fast, 3, 40), prompts()[0][:, :1]
    replayed(fast, cache, ids, torch.full_like(ids, 39), 1)
    shape = families.family_of(fast.config).shape_of(fast.config)
    assert asked and set(asked) <= set(cases(fast, shape.layers, 3, 40, fast.dtype))


def test_sampling_and_the_end_of_a_text_are_as_ever():
    model, fast = plain_llama()
    ids, mask = prompts()
    eos = int(model.generate(ids, **HOW, attention_mask=mask)[0, ids.shape[1] + 3])
    assert torch.equal(
        fast.generate(ids, **HOW, attention_mask=mask, eos_token_id=eos),
        model.generate(ids, **HOW, attention_mask=mask, eos_token_id=eos),
    )
    written = []
    for one in (model, fast):
        torch.manual_seed(5)
        how = dict(max_new_tokens=6, do_sample=True, top_k=5, num_return_sequences=2, pad_token_id=0)
        written.append(one.generate(ids, attention_mask=mask, **how))
    assert torch.equal(*written)


def test_a_cache_that_is_given_out_is_the_users_and_a_talk_goes_on_from_it():
    model, fast = plain_llama()
    ids, _ = prompts(rows=1)
    first = fast.generate(ids, **HOW, return_dict_in_generate=True)
    cache = first.past_key_values
    kept = cache.layers[0].keys.clone()
    fast.generate(ids + 1, **HOW)
    assert torch.equal(cache.layers[0].keys, kept), "the next text is written elsewhere"
    longer = torch.cat((first.sequences, ids), 1)
    again = FastCache(fast.headwise_fast.layers, 100)
    with torch.no_grad():
        fast(input_ids=longer[:, :15], past_key_values=again)
        got = fast(input_ids=longer[:, 15:], past_key_values=again).logits
        want = model(longer).logits[:, 15:]
    assert torch.allclose(got, want, atol=1e-4) and again.get_seq_length() == longer.shape[1]
    with pytest.raises(ModelError, match="holds 256 tokens, not 257"):
        fast(input_ids=longer.repeat(1, 9)[:, :257], past_key_values=FastCache(fast.headwise_fast.layers, 100))


def test_a_fast_model_can_be_copied_saved_and_changed(tmp_path):
    model, fast = plain_llama()
    ids, mask = prompts()
    want = model.generate(ids, **HOW, attention_mask=mask)
    assert torch.equal(fast.generate(ids, **HOW, attention_mask=mask), want)
    twin = copy.deepcopy(fast)
    assert torch.equal(twin.generate(ids, **HOW, attention_mask=mask), want)
    fast.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(again).__name__ == type(model).__name__
    assert all(torch.equal(x, y) for x, y in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    for one in (model, fast):  # weights that were joined are still the model's own
        with torch.no_grad():
            one.model.layers[0].self_attn.k_proj.weight.mul_(-2)
            one.model.layers[1].mlp.up_proj.weight.mul_(3)
    changed = model.generate(ids, **HOW, attention_mask=mask)
    assert torch.equal(fast.generate(ids, **HOW, attention_mask=mask), changed) and not torch.equal(changed, want)
    assert torch.equal(fast.double().generate(ids, **HOW, attention_mask=mask), changed), "moved: no longer joined"


def test_load_makes_models_fast_and_refuses_what_does_not_write():
    model, fast = headwise.load("embedded"), headwise.load("embedded", optimise=True)
    ids = torch.arange(20, 40)[None]
    assert fast.dtype == torch.float32 and torch.equal(fast.generate(ids, **HOW), model.generate(ids, **HOW))
    assert headwise.load("embedded", dtype=torch.float64).dtype == torch.float64
    family = next(one for one in families.known() if one.name == "bert")
    with pytest.raises(ModelError, match="for decoders that generate text"):
        optimise(family.tailor(tiny(family, "bert", {})))


@pytest.mark.parametrize(("kind", "joined"), [("Llama", True), ("Qwen3", True), ("Gemma2", False), ("Granite", False)])
def test_layers_take_few_kernels_only_if_they_join_their_parts_as_llama_does(kind, joined):
    name = kind.lower()
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert joins_as_llama(getattr(module, f"{kind}DecoderLayer")) is joined


def test_what_is_put_around_projections_of_a_fast_model_is_not_left_out():
    class Twice(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, x):
            return 2 * self.inner(x)

    both = prepared("llama", "llama", {}, False)
    for model in both:
        layer = model.model.layers[0]
        layer.self_attn.q_proj, layer.mlp.gate_proj = Twice(layer.self_attn.q_proj), Twice(layer.mlp.gate_proj)
    ids, mask = prompts()
    ordinary, fast = (
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
                       return_dict_in_generate=True, pad_token_id=0).logits for model in both
    )  # fmt: skip
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(ordinary, fast, strict=True))
