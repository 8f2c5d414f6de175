"""Models whose cache is coded in bits: the change of basis, and every way in which a cache is used."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import drawn, fresh, in_parts, made, said, same, uncoded
from safetensors.torch import load_file
from tiny_models import VARIANTS, FakeTokenizer
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from headwise import cost, families
from headwise.checks.exactness import TOLERANCE, cache_bytes_per_token, count_checks, write_proof
from headwise.cuts import save
from headwise.families._decoder import Decoder
from headwise.runtime import cache_headwise, step_headwise
from headwise.runtime.cache_headwise import CodedLayer

# Full attention, no rotary positions, windows with capped logits, windows with normed queries and keys; some pooled.
CASES = (("llama", 1), ("llama", 2), ("gpt2", 2), ("gemma2", 1), ("qwen3", 2))
cases = pytest.mark.parametrize("kind, pool", CASES, ids=lambda value: str(value))
DECODERS = [param for param in VARIANTS if isinstance(param.values[0], Decoder)]
GREEDY = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.fixture(autouse=True)
def _few_near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are read as long ones are: few tokens are near, few read or are read together, few can be taken back.

    Saved models have the real numbers.
    """
    if "saved" not in request.node.name and "long" not in request.node.name:
        for name, number in (("NEAR", 5), ("BLOCK", 7), ("SMALL", 6), ("BACK", 12)):
            monkeypatch.setattr(cache_headwise, name, number)
        monkeypatch.setattr(step_headwise, "TILE", 256)


# The change of basis.


@pytest.mark.parametrize("family, kind, changes", DECODERS)
def test_in_the_other_basis_a_model_computes_what_it_did(family: Any, kind: str, changes: dict[str, Any]) -> None:
    pool = 1 if changes.get("num_key_value_heads") == 1 else 2
    for heads in {1, pool} if not changes else {pool}:
        _, source, plan, coded = made.__wrapped__(kind, heads, 1.0, tuple(changes.items()))
        plain, ids = uncoded(family, coded), drawn(2, 40)
        wanted = said(source, ids)
        near = 1e-5 * wanted.abs().max()
        assert (said(plain, ids) - wanted).abs().max() < near, "many queries: the keys of every head"
        assert (said(plain, ids[:, :12]) - wanted[:, :12]).abs().max() < near, "few: whole rows"
        assert (said(coded, ids) - wanted).abs().max() > near, "which codes are not"
        assert sum(p.numel() for p in coded.parameters()) == cost.parameters(plan.target)
        assert all(check.passed for check in count_checks(coded, plan, plan.source))


# One text, read and written in different ways.


@cases
def test_a_text_read_in_parts_is_read_as_a_whole(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    ids = drawn(2, 40)
    wanted = said(model, ids)
    for sizes in ([40], [1] * 40, [2, 1, 30, 7], [20, 20]):
        assert same(in_parts(model, ids, sizes), wanted), sizes
    assert same(in_parts(model, ids, [3, 1, 36], DynamicCache()), wanted), "a cache that knows no windows"
    written = model.generate(ids[:, :20], max_new_tokens=8, **GREEDY)
    for more in (dict(use_cache=False), dict(cache_implementation="static")):
        assert torch.equal(model.generate(ids[:, :20], max_new_tokens=8, **GREEDY, **more), written), more


@cases
def test_texts_of_a_batch_are_read_as_each_alone(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    ids, lengths = drawn(4, 24), (24, 21, 9, 2)
    seen = torch.stack([torch.arange(24) >= 24 - length for length in lengths]).long()
    given = dict(max_new_tokens=8, **GREEDY)
    alone = [model.generate(row[None, -length:], **given)[0, length:] for row, length in zip(ids, lengths, strict=True)]
    for more in ({}, dict(prefill_chunk_size=5), dict(cache_implementation="static"), dict(use_cache=False)):
        together = model.generate(ids * seen, attention_mask=seen, **given, **more)[:, 24:]
        assert torch.equal(together, torch.stack(alone)), more
    places = (seen.cumsum(-1) - 1).clamp_min(0)
    wanted = said(model, ids[2:3, -9:])
    for how in ("eager", model.config._attn_implementation):
        model.set_attn_implementation(how)
        cache = fresh(model)
        for at in range(0, 24, 3):  # the third text begins after some parts that are all padding
            part = slice(at, at + 3)
            found = said(model, ids[:, part], cache, attention_mask=seen[:, : at + 3], position_ids=places[:, part])
            assert at < 15 or same(found[2:3], wanted[:, at - 15 : at - 12]), (how, at)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pool", [1, 2])
def test_in_16_bits_on_a_gpu_texts_of_a_batch_are_read_as_on_a_cpu(pool: int) -> None:
    _, _, _, model = made("llama", pool)
    ids, wanted = drawn(4, 447), said(model, drawn(4, 447))
    there = copy.deepcopy(model).to("cuda", torch.bfloat16)
    error = (said(there, ids.to("cuda")).float().cpu() - wanted).square().mean((1, 2)).sqrt()
    assert (error < 0.03 * wanted.std()).all(), "every row: no kernel may mind how long a masked row is"


@cases
def test_beams_and_helpers_write_what_they_do_without_a_cache(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    ids, given = drawn(1, 11), dict(max_new_tokens=8, **GREEDY)
    beams = dict(num_beams=3, num_return_sequences=3, **given)
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
    plain = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **given), plain)
    assert torch.equal(model.generate(ids, assistant_model=made(kind, pool, 0.5)[3], **given), plain)


@pytest.mark.parametrize("pool", (1, 2))
def test_near_tokens_of_a_long_text_are_read_in_full_whatever_the_code(pool: int) -> None:
    _, source, _, model = made("llama", pool, 0.1)  # most directions have no bits
    ids, cache = drawn(2, 80), fresh(model)
    wanted, near = said(source, ids), cache_headwise.NEAR
    off = (said(model, ids) - wanted).abs().amax((0, 2)) / wanted.abs().max()
    assert off[:near].max() < 0.02 < 0.05 < off[near + 8 :].max(), "so many tokens are all near"
    said(model, ids[:, :70], cache)
    cache.crop(-60)  # more than can be taken back: some near tokens are read from their codes, until new ones come
    late = (said(model, ids[:, 10:], cache) - wanted[:, 10:]).abs().amax((0, 2)) / wanted.abs().max()
    assert torch.isfinite(late).all() and late.max() < 3 * off.max()


# A cache in the hands of its user.


@cases
def test_a_conversation_goes_on_from_its_cache(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    cache, given = fresh(model), dict(max_new_tokens=4, **GREEDY)
    first = model.generate(drawn(1, 3), past_key_values=cache, **given)
    both = torch.cat((first, drawn(1, 9, 1)), 1)
    assert torch.equal(model.generate(both, past_key_values=cache, **given), model.generate(both, **given))


@cases
def test_a_cache_can_be_cropped_copied_and_stored(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    ids, other = drawn(2, 12), drawn(2, 12, 1)
    cache, split = DynamicCache(), ids.shape[1]  # which forgets nothing that windows leave behind
    said(model, ids, cache)
    held, file = copy.deepcopy(cache), io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    stored = torch.load(file, weights_only=False)
    for left in (split - 1, 3, 1, 0):  # of which some are the first tokens of the text
        part = copy.deepcopy(held)
        part.crop(left - split)
        wanted = said(model, torch.cat((ids[:, :left], other), 1))[:, left:]
        assert same(said(model, other, part), wanted), left
        part.crop(-other.shape[1])
        assert same(said(model, other, part), wanted), f"{left}, again"
    wanted = said(model, torch.cat((ids, other), 1))[:, split:]
    for kept in (held, stored):
        assert same(said(model, other, kept), wanted), "as if nothing had been done to the other"
    cache.reset()
    others = [layer for layer in cache.layers if type(layer) is not CodedLayer]
    if not any(layer.get_seq_length() for layer in others):  # transformers 5.17 leaves their tokens, as zeros
        assert same(said(model, ids, cache), said(model, ids)), "begins again"


@cases
def test_texts_of_a_cache_can_be_chosen_and_repeated(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    ids, later = drawn(3, 9), drawn(3, 3, 1)
    for begun in (2, 9):  # with some of the first tokens of a text still to come, and with all
        chosen, repeated, picked = (fresh(model) for _ in range(3))
        for cache in (chosen, repeated, picked):
            said(model, ids[:, :begun], cache)
        order = torch.tensor([2, 0, 0])
        chosen.reorder_cache(order)
        wanted = said(model, torch.cat((ids[order, :begun], later), 1))[:, begun:]
        assert same(said(model, later, chosen), wanted)
        repeated.batch_repeat_interleave(2)
        doubled = torch.cat((ids[:, :begun], later), 1).repeat_interleave(2, 0)
        assert same(said(model, doubled[:, begun:], repeated), said(model, doubled)[:, begun:])
        picked.batch_select_indices(torch.tensor([1]))
        assert same(
            said(model, later[1:2], picked), said(model, torch.cat((ids[1:2, :begun], later[1:2]), 1))[:, begun:]
        )


def test_a_cache_that_was_taken_apart_lacks_only_whole_first_tokens() -> None:
    _, _, _, model = made("llama")
    ids, cache = drawn(2, 12), fresh(made("llama")[3])
    said(model, ids[:, :9], cache)
    again = DynamicCache([layer[:2] for layer in cache])  # as its iterator and its constructor have it
    wanted, found = said(model, ids)[:, 9:], said(model, ids[:, 9:], again)
    assert (found - wanted).abs().max() < 0.3 * wanted.abs().max()


def test_layers_may_be_moved_away_between_steps() -> None:
    """As a cache with `offloading=True` moves them, which needs a GPU."""
    _, _, _, model = made("llama", 2)
    ids, cache = drawn(1, 9), fresh(model)
    for token in ids.split(1, 1):
        for layer in cache.layers:
            layer.prefetch()
        found = said(model, token, cache)
        for layer in cache.layers:
            layer.offload()
    assert same(found, said(model, ids)[:, -1:])


def test_a_static_cache_holds_coded_numbers() -> None:
    _, _, _, model = made("llama", 2)
    ids, cache = drawn(2, 12), StaticCache(config=model.config, max_cache_len=16)
    assert same(in_parts(model, ids, [2, 1, 6, 3], cache), said(model, ids))


# What a cache takes.


def tensors_of(cache: Any) -> list[torch.Tensor]:
    """Everything that a cache holds, as its object would be stored."""
    found = [value for layer in cache.layers for value in vars(layer).values()]
    held = [part for value in found for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in held if isinstance(part, torch.Tensor)]


def memory(tensors: list[torch.Tensor]) -> int:
    """Bytes of memory behind tensors, places for tokens to come included."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("pool", (1, 2))
def test_a_long_text_takes_the_counted_bytes_and_nothing_else(pool: int) -> None:
    sizes = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=128, num_hidden_layers=2)
    _, _, plan, model = made("llama", pool, 0.75, (*sizes.items(), ("max_position_embeddings", 8192)))
    model, ids, cache = copy.deepcopy(model).float(), drawn(1, 4_096), fresh(model)
    counted = cost.kv_bytes_per_token(plan.target)
    assert cache_bytes_per_token(model, 2) == counted
    said(model, ids[:, :4_030], cache)
    assert memory(tensors_of(cache)) == pytest.approx(4_030 * counted, rel=0.02)
    for at in range(4_030, 4_096):
        said(model, ids[:, at : at + 1], cache)
    assert cache.get_seq_length() == 4_096
    held = tensors_of(cache)
    assert sum(t.numel() * t.element_size() for t in held) == pytest.approx(4_096 * counted, rel=0.02)
    assert memory(held) < 1.02 * 4_096 * counted + step_headwise.SPARE * counted
    assert all(type(layer) is CodedLayer and layer.keys.dtype == torch.uint8 for layer in cache.layers)


# Gradients.


@cases
def test_gradients_pass_through_codes_with_and_without_a_cache(kind: str, pool: int) -> None:
    _, _, _, model = made(kind, pool)
    model, ids = copy.deepcopy(model).train(), drawn(2, 24)
    grads = []
    for cached in (False, True):
        model.zero_grad()
        found = model(input_ids=ids, labels=ids, use_cache=cached)
        assert same(found.logits.detach(), said(model, ids))
        found.loss.backward()
        attention = families.family_of(model.config).blocks(model)[0].attention
        grads.append({name: p.grad.clone() for name, p in attention.named_parameters() if p.grad is not None})
        assert not [name for name in ("k_proj.weight", "v_proj.weight", "q_proj.weight") if name not in grads[-1]]
        assert all(float(grad.abs().max()) > 0 for name, grad in grads[-1].items() if "k_proj.bias" not in name)
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-7) for name in grads[0])


def test_a_step_of_training_brings_a_coded_model_nearer_to_its_source() -> None:
    _, source, _, model = made("qwen3", 2, 0.5)
    model, ids = copy.deepcopy(model).train(), drawn(8, 24)
    wanted, losses = said(source, ids).log_softmax(-1), []
    steps = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(8):
        found = model(input_ids=ids).logits.log_softmax(-1)
        loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert losses[-1] < 0.7 * losses[0]


# Saved models.

GENERATE = """
import sys, torch
sys.modules["headwise"] = None  # importing it fails
import transformers
folder = sys.argv[1]
for kind in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}", trust_remote_code=True)
    given = torch.load(f"{folder}/{kind}.pt")
    cache = transformers.DynamicCache(config=model.config)
    found = model.generate(**given["inputs"], past_key_values=cache, do_sample=False, max_new_tokens=12)
    assert torch.equal(found, given["wanted"]), (kind, found, given["wanted"])
    assert all(layer.keys.dtype == torch.uint8 for layer in cache.layers), kind
"""


def test_saved_models_write_the_same_without_headwise(tmp_path: Path) -> None:
    kinds = ("llama", "gpt2", "gemma2")
    ids, seen = drawn(2, 9), torch.ones(2, 9, dtype=torch.long)
    seen[1, :5] = 0
    given = dict(input_ids=ids * seen, attention_mask=seen)
    for kind in kinds:
        family, _, _, model = made(kind, 2)
        model = copy.deepcopy(model).float()
        model.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
        model = save(family, model, FakeTokenizer(), tmp_path / kind, portable=False)
        wanted = model.generate(**given, do_sample=False, max_new_tokens=12)
        for trusting in ({}, dict(trust_remote_code=True)):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind, **trusting)
            assert torch.equal(loaded.generate(**given, do_sample=False, max_new_tokens=12), wanted)
        torch.save({"inputs": given, "wanted": wanted}, tmp_path / f"{kind}.pt")
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    alone |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", GENERATE, str(tmp_path), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=alone, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_proof_of_a_reload_does_not_hang_on_last_bits(tmp_path: Path) -> None:
    _, _, _, model = made("qwen3", 2)
    other, ids, answers, draw = copy.deepcopy(model), drawn(32, 64), [], torch.Generator().manual_seed(0)
    for tensor in other.parameters():
        tensor.data.mul_(1 + 2e-6 * torch.randn(tensor.shape, generator=draw))
    for number, one in enumerate((model, other)):
        write_proof(one, ids[:1], tmp_path / f"{number}.safetensors")
        answers.append(load_file(tmp_path / f"{number}.safetensors")["logits"])
    near = TOLERANCE * answers[0].abs().max()
    assert (answers[0] - answers[1]).abs().max() < near
    assert (said(model, ids) - said(other, ids)).abs().max() > near, "as it is made without codes, which do"
    assert (said(model, ids[:1]) - answers[0]).abs().max() > near, "and which are there again"


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("tokens", [3, 6, 33, 65, 120])
def test_a_prompt_is_read_the_same_in_small_blocks(pool, tokens):
    model, ids = copy.deepcopy(made("llama", pool)[3]), drawn(2, tokens)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(2, 1, -1, -1)  # given: read in large blocks
    model.config._attn_implementation = "sdpa"
    got, want = said(model, ids, fresh(model)), said(model, ids, fresh(model), attention_mask=causal)
    assert (got - want).norm() < 1e-9 * want.norm()
