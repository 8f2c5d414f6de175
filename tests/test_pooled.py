"""Key/value heads that share cached rows: nothing is lost by sharing, less by cutting, and results load anywhere."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report_parts import make_dossier
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise import api, cost, families
from headwise.cli.show import finished
from headwise.cuts import reshape
from headwise.cuts.balance import balance
from headwise.errors import HeadwiseError
from headwise.families.llama import FAMILY as llama
from headwise.fast.model import optimise
from headwise.linalg import balanced
from headwise.probes import gram
from headwise.report._commands import how_to_make
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.allocate import allocate_in
from headwise.stages.source import pooled_heads
from headwise.strategies._options import refuse
from headwise.tasks.causal import Causal
from headwise.types import Budget, LayerKeep, Plan, Readings

KINDS = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "olmo2", "phi3")


def pooled_of(kind: str, heads: int = 2) -> tuple[Any, Any, Any]:
    """A family, a tiny model on our modules, and the same with heads that share rows."""
    family = next(family for family in families.known() if kind in family.model_types)
    stock = family.tiny(kind)
    return family, family.tailor(stock), family.tailor(stock, heads)


def cut_of(family: Any, model: Any, qk_dim: int, v_dim: int) -> Any:
    """A pooled model whose rows are cut."""
    shape = family.shape_of(model.config)
    layers = tuple(replace(layer, qk_dim=qk_dim, v_dim=v_dim) for layer in shape.layers)
    plan = Plan("", shape, shape.with_layers(layers), (LayerKeep(),) * len(layers), "uniform", (), {}, 0.0, 0)
    rows = family.example(model.config, 8, 24)
    return reshape(family, model, plan, gram.collect(family, model, rows, mlp=False))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_share_rows_compute_and_write_what_they_did(kind: str) -> None:
    family, plain, pooled = pooled_of(kind)
    rows = family.example(plain.config)
    with torch.no_grad():
        assert torch.allclose(plain(rows).logits, pooled(rows).logits, atol=1e-5)
    given = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(plain.generate(rows[:, :7], **given), pooled.generate(rows[:, :7], **given))

    shapes = [family.shape_of(model.config) for model in (plain, pooled)]
    assert cost.parameters(shapes[0]) == cost.parameters(shapes[1]) == sum(p.numel() for p in pooled.parameters())
    assert cost.kv_bytes_per_token(shapes[0]) == cost.kv_bytes_per_token(shapes[1])
    assert cost.prefill_flops(shapes[0], 64) == cost.prefill_flops(shapes[1], 64)


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize("kind", ("llama", "qwen3", "gemma2", "gpt2"))
def test_fast_pooled_models_write_the_same_text(kind: str) -> None:
    family, _, pooled = pooled_of(kind)
    ids = family.example(pooled.config, 3, 24)[:, :20]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for model in (pooled, cut_of(family, pooled, 12, 8)):
        model.config._attn_implementation = "sdpa"
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
        fast = optimise(copy.deepcopy(model.eval()))
        for seen in (mask, torch.ones_like(ids)):
            given = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, attention_mask=seen)
            assert torch.equal(fast.generate(ids, **given), model.generate(ids, **given))
        assert fast.headwise_fast.pool is not None and fast.headwise_fast.ordinary == 0, "the fast way was gone"


@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_a_cut_row_is_what_the_cache_holds_and_what_is_counted(kind: str) -> None:
    family, _, pooled = pooled_of(kind)
    cut = cut_of(family, pooled, 12, 10)
    shape = family.shape_of(cut.config)
    assert sum(p.numel() for p in cut.parameters()) == cost.parameters(shape)
    rows = family.example(cut.config)
    with torch.no_grad():
        whole = cut(rows[:, :9]).logits[:, -1]
        before = cut(rows[:, :8], use_cache=True).past_key_values
        after = cut(rows[:, 8:9], past_key_values=before).logits[:, -1]
        assert torch.allclose(whole, after, atol=1e-5)
        short, long = cut(rows[:, :16]).logits, cut(rows).logits[:, :16]  # by rows, and by every head's own keys
        assert torch.allclose(short, long, atol=1e-5)
        held = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in before.layers)
        assert held * shape.cache_bytes == cost.kv_bytes_per_token(shape)
        balance(family.blocks(cut))
        assert torch.equal(cut(rows[:, :9]).logits[:, -1], whole)


def test_a_shared_row_keeps_more_of_the_logits_than_rows_of_single_heads() -> None:
    family, plain, pooled = pooled_of("llama")
    rows = family.example(plain.config, 8, 24)
    (one, *_), (both, *_) = (gram.collect(family, model, rows, mlp=False) for model in (plain, pooled))
    apart = balanced(one["gram_q"], one["gram_k"])[2]
    together = balanced(both["gram_q"], both["gram_k"])[2]
    for kept in (2, 4, 8, 12):
        assert together[0, 2 * kept :].square().sum() < apart[:, kept:].square().sum()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the embedded model's tokens."""
    folder = tmp_path_factory.mktemp("pooled") / "source"
    tokenizer = AutoTokenizer.from_pretrained(families.locate("embedded")[0])
    llama.tiny(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_pools_heads_and_its_model_loads_without_us(source: Path, tmp_path: Path) -> None:
    small = dict(tokens=512, eval_tokens=256, swap_tokens=128, length=64, data="stdlib")
    more = dict(pool="all", allow=("qk", "v"), rounds=2, heal="blockwise", heal_options=("steps=5",))
    dossier = api.run(str(source), "kv=50%", tmp_path / "run", **small, **more)
    assert dossier.plan is not None and all(layer.pooled == 2 for layer in dossier.plan.target.layers)
    shapes = (dossier.plan.target, dossier.plan.source)
    assert cost.kv_bytes_per_token(shapes[0]) <= 0.5 * cost.kv_bytes_per_token(shapes[1])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", trust_remote_code=True)
    rows = torch.arange(3, 23)[None]
    with torch.no_grad():
        again = families.load(str(tmp_path / "run" / "model"))[0]
        assert torch.allclose(loaded(rows).logits, again(rows).logits, atol=1e-5)
    card = (tmp_path / "run" / "report.md").read_text()
    assert "--pool all" in card and "2 key/value heads share a row of the cache" in card
    assert "| uniform |" in card and "| taper |" not in card, "rivals are those that could be carried out"


def test_a_run_on_the_cache_alone_whose_heads_keep_their_own_rows_is_told_of_pooling(tmp_path: Path) -> None:
    dossier = make_dossier()
    assert dossier.plan is not None
    alone = replace(dossier, plan=replace(dossier.plan, budgets=dossier.plan.budgets[:1]))
    assert "--pool all" in finished(alone, tmp_path) and "--pool all" not in finished(dossier, tmp_path)


@pytest.mark.parametrize(
    "asked, said",
    (
        (dict(pool="some"), "how many heads"),
        (dict(pool="all", portable=True), "--portable"),
        (dict(pool="all", allow=("qk", "kv_heads")), "--allow"),
        (dict(pool="all", strategy="svd"), "exact"),
    ),
)
def test_what_pooled_heads_cannot_have_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(HeadwiseError, match=said):
        Settings(model="embedded", **asked)


@pytest.mark.parametrize(
    "heads, cut, asked, said",
    (
        (2, (), dict(pool="2"), "share rows already"),
        (1, (8, 8), dict(pool="2"), "cut already"),
        (2, (12, 10), dict(strategy="svd"), "exact"),
        (2, (), dict(allow=("qk", "kv_heads")), "--allow"),
    ),
)
def test_a_source_that_cannot_be_pooled_or_is_pooled_already_says_so(
    heads: int, cut: tuple[int, ...], asked: dict[str, Any], said: str
) -> None:
    model = llama.tailor(llama.tiny(), heads)
    model = cut_of(llama, model, *cut) if cut else model
    with pytest.raises(HeadwiseError, match=said):
        pooled_heads(Settings(model="", **asked), llama, model, Causal())


def test_a_pooled_run_is_planned_again_only_by_what_can_be_carried_out(tmp_path: Path) -> None:
    _, _, pooled = pooled_of("llama")
    shape, folder = llama.shape_of(pooled.config), RunFolder(tmp_path)
    settings = Settings(model="embedded", pool="all")
    settings.save(folder.settings_file)
    Readings("embedded", shape, (), ({},) * len(shape.layers), 0, 0).save(folder.readings_file)
    for strategy, allow, said in (("svd", ("qk", "v"), "exact"), ("exact", ("qk", "heads"), "--allow")):
        with pytest.raises(HeadwiseError, match=said):
            allocate_in(tmp_path, ("kv=50%",), strategy, allow, False, 0)
    assert "--pool all" in how_to_make(Dossier(settings), "probe")
    limit = Budget("kv", "bytes", 1.0, 64, "kv=1%")
    assert str(refuse(shape, (limit,), (2.0,), ("qk", "v"))).endswith("--allow qk,v,mlp,depth.")
