"""Engines that own the cache: sizes that they take, rows filled up for them, and what is said where there is none."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import coded_models
import pytest
import tiny_models
import torch
from conftest import Invented, invent
from test_pooled import cut_of
from transformers import LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

from headwise.budgets import parse_all
from headwise.cli.commands import app
from headwise.cli.serving import in_words
from headwise.engines import process
from headwise.engines.compare import agreement
from headwise.errors import BudgetError, HeadwiseError, ModelError
from headwise.families.llama import FAMILY as llama
from headwise.report import for_engine
from headwise.runs.dossier import Dossier
from headwise.runs.settings import Settings
from headwise.runtime import softmax_headwise as softmax
from headwise.runtime.hub_headwise import recording
from headwise.runtime.modeling_headwise import SoftmaxAttention, tailored
from headwise.stages.allocate import plan_for
from headwise.strategies import exact
from headwise.strategies._reach import check
from headwise.types import Plan
from headwise.types.served import Cache, Served
from headwise.types.shape import ENGINES

WIDE = Invented(layers=4, kv_heads=2, queries_per_group=2, dim=64, mlp_width=512, sizes=17)
SIZES = [("exact", {"serve": "vllm"}), ("exact", {"multiple": 16}), ("exact", {"same_dims": True, "multiple": 8})]
SIZES += [("uniform", {"serve": "vllm"})]


def planned(strategy: str = "exact", **sizes: Any) -> Plan:
    settings = Settings("x", budgets=("params=85%",), allow=("qk", "v", "mlp"), strategy=strategy, **sizes)
    readings = invent(1, WIDE)
    return plan_for(settings, readings, parse_all(settings.budgets, readings.source))


@pytest.mark.parametrize(("strategy", "sizes"), SIZES, ids=str)
def test_a_plan_has_only_the_sizes_that_were_asked_for_and_says_what_that_costs(strategy: str, sizes: dict) -> None:
    plan = planned(strategy, **sizes)
    for layer in plan.target.layers:
        assert "serve" not in sizes or {layer.qk_dim, layer.v_dim} <= set(ENGINES["vllm"])
        assert layer.qk_dim == layer.v_dim or sizes == {"multiple": 16}
        assert all(n % sizes.get("multiple", 1) == 0 for n in (layer.qk_dim, layer.v_dim, layer.mlp_width))
    assert plan.free_damage is not None and plan.predicted_damage >= plan.free_damage - 1e-12
    assert all(plan.spent[budget.key] <= budget.limit for budget in plan.budgets)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_with_all_sizes_names_no_other_damage() -> None:
    assert planned("uniform").free_damage is None


def test_sizes_that_no_engine_has_are_refused_with_what_to_type() -> None:
    settings = Settings("x", budgets=("kv=60%",), allow=("qk", "v"), serve="vllm")
    readings = invent(3)  # whose heads are smaller than any that the engine takes
    with pytest.raises(BudgetError, match="leave out --serve"):
        plan_for(settings, readings, parse_all(settings.budgets, readings.source))
    with pytest.raises(HeadwiseError, match="--serve takes: vllm"):
        Settings("x", serve="other")
    with pytest.raises(HeadwiseError, match="leave out --strategy depth"):
        Settings("x", serve="vllm", strategy="depth")


def test_the_saved_code_takes_every_size_that_is_planned() -> None:
    assert set(ENGINES["vllm"]) <= set(softmax.PAGED_SIZES)
    assert all(softmax.paged_size(size, size) == size for size in ENGINES["vllm"])
    assert softmax.paged_size(33, 20) == softmax.paged_size(20, 33) == 48 and softmax.paged_size(49, 20) == 64


@pytest.mark.parametrize("groups", [1, 2])
def test_products_by_group_are_the_same_for_few_and_for_many_tokens(groups: int) -> None:
    torch.manual_seed(0)
    x, matrices = torch.randn(softmax.FEW + 5, 4, 6), torch.randn(groups, 6, 3)
    every = torch.einsum("thw,hwk->thk", x, matrices.repeat_interleave(4 // groups, 0))
    assert torch.allclose(softmax.by_group(x, matrices), every, atol=1e-5)
    assert torch.allclose(softmax.by_group(x[:7], matrices), every[:7], atol=1e-5)


def _engine(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """As an engine: one head size for queries, keys and values, one text, a row for every token."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] in softmax.PAGED_SIZES
    z, _ = softmax.eager(module, q, k, v, softmax.added(None, q, k, True), scaling)
    return z.reshape(q.shape[2], -1), None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", _engine)


def rebuilt(family: Any, model: Any) -> Any:
    """The same model, built as an engine builds it: with its attention named first."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "vllm"
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(("kind", "pool"), [("llama", 1), ("llama", 2), ("olmo2", 1), ("opt", 1)])
def test_rows_that_are_filled_up_for_an_engine_give_the_same_answers(kind: str, pool: int, engine: None) -> None:
    family = next(f for f in tiny_models.HERE if kind in f.model_types)
    source = family.tailor(family.tiny(kind), pool)
    plan = tiny_models.random_plan(family, source, 3) if pool == 1 else None
    model = tiny_models.cut(family, source, plan) if plan else cut_of(family, source, 20, 12)
    ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, found = model.eval()(ids).logits, rebuilt(family, model)(ids, use_cache=False).logits
    assert torch.allclose(want, found, atol=1e-5)


@pytest.mark.parametrize("pool", [1, 2])
def test_processes_that_share_the_heads_of_a_layer_give_the_same_answers_together(
    pool: int, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama.tailor(llama.tiny("llama", num_attention_heads=8, num_key_value_heads=4), pool)
    model = cut_of(llama, source, 8 * pool, 4 * pool)
    hidden = torch.randn(1, 24, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = model.model.rotary_emb(hidden, torch.arange(24)[None])

    def answer(part: int, parts: int) -> torch.Tensor:
        monkeypatch.setattr(softmax, "share", lambda: (parts, part))
        layer = rebuilt(llama, model).model.layers[0].self_attn
        for name, side in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            own = getattr(layer, f"{name}_proj")
            own.weight.data = own.weight.chunk(parts, side)[part]
        return layer(hidden, None, positions)[0]

    with torch.no_grad():
        assert torch.allclose(answer(0, 2) + answer(1, 2), answer(0, 1), atol=1e-5)
    with pytest.raises(ValueError, match="--tensor-parallel-size 3 cannot share out"):
        answer(0, 3)


def test_a_coded_cache_is_refused_by_an_engine_with_what_to_type(engine: None) -> None:
    _, _, _, model = coded_models.made("llama")
    with pytest.raises(ValueError, match="--serve vllm"):
        rebuilt(llama, model)


def test_an_engine_that_reads_the_source_finds_one_call_and_its_scale() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(SoftmaxAttention.forward)))
    named = [n.targets[0].id for n in ast.walk(tree) if isinstance(n, ast.Assign) and "ALL_ATTENTION" in ast.dump(n)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in named]
    assert len(calls) == 1
    (scale,) = (word.value for word in calls[0].keywords if word.arg == "scaling")
    assert ast.unparse(scale).startswith("self.")


def test_a_class_that_an_engine_has_changed_is_made_anew_and_its_constructor_says_no_types() -> None:
    class Body(torch.nn.Module):
        pass

    class Compiling:
        pass

    first = recording(Body, {}, {})
    assert recording(Body, {}, {}) is first
    first.__bases__ += (Compiling,)  # as vLLM does to compile it
    assert recording(Body, {}, {}) is not first
    assert not tailored(LlamaModel).__init__.__annotations__, "vLLM takes them for classes"


def test_an_engine_is_told_the_sizes_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = llama.tiny()
    config = tiny_models.cut(llama, stock, tiny_models.random_plan(llama, stock, 3)).config
    assert not type(config)(**config.to_dict()).is_heterogeneous
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    told = type(config)(**config.to_dict()).per_layer_config
    for layer, shape in zip(told, llama.shape_of(config).layers, strict=True):
        assert layer.head_dim == 32 and layer.num_key_value_heads == shape.kv_heads
        assert layer.num_attention_heads == shape.query_heads


def test_without_an_engine_one_line_says_how_to_install_it(tmp_path: Any) -> None:
    done = CliRunner().invoke(app, ["verify", str(tmp_path), "--engine", "vllm"])
    assert isinstance(done.exception, HeadwiseError) and "pip install" in str(done.exception)
    with pytest.raises(HeadwiseError, match="--engine takes: vllm"):
        process.require("other")


@pytest.mark.parametrize(("portable", "dim", "told"), [(True, 24, "24"), (True, 32, ""), (False, 24, "")])
def test_heads_that_an_engine_does_not_take_are_told_with_the_command_that_makes_others(
    portable: bool, dim: int, told: str
) -> None:
    plan = planned()
    layers = tuple(replace(layer, qk_dim=dim, v_dim=dim) for layer in plan.target.layers)
    plan = replace(plan, target=plan.target.with_layers(layers), portable=portable)
    found = for_engine(Dossier(Settings("x", portable=portable), plan=plan, folder="runs/one"))
    assert (found is not None) == bool(told)
    if found is not None:
        assert "on a CPU" in found[0] and found[0].endswith(f"have {told}")
        assert "--portable" in found[1] and "--serve vllm --out runs/one-vllm" in found[1]


def test_a_budget_out_of_an_engines_reach_names_shared_rows() -> None:
    source = Settings("x", serve="vllm").legal(invent(1, WIDE).source)
    with pytest.raises(BudgetError, match="add --pool all"):
        check(source, parse_all(("kv=25%",), source), exact, ("qk", "v"))


def test_an_engine_that_dies_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process.KNOWN, "json", "")  # a package that is there, and no client for it
    with pytest.raises(ModelError, match="ended while it served folder: .*No such file"):
        process.Engine("json", "folder")


def test_a_head_size_that_an_engine_refuses_is_told_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = f"RuntimeError: {'x ' * 300} {process.ODD_SIZE}: head_dim=24 isa=1"
    (tmp_path / "json_client.py").write_text(f"input()\nprint({json.dumps(json.dumps({'error': error}))})")
    monkeypatch.setitem(process.KNOWN, "json", "")
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    with pytest.raises(ModelError, match="does not serve folder: .*heads of 32, 64.*add --serve vllm"):
        process.Engine("json", "folder")


def test_agreement_counts_ties_and_finds_the_first_other_token() -> None:
    model, prompts = llama.tiny().eval(), [[5, 6, 7], [8, 9, 10]]
    with torch.no_grad():
        rows = torch.tensor(prompts)
        tokens = model.generate(rows, max_new_tokens=4, do_sample=False)[:, 3:].tolist()
        logs = [
            model(torch.tensor([p + t])).logits[0, 2:-1].log_softmax(-1) for p, t in zip(prompts, tokens, strict=True)
        ]
    found: list[dict[str, Any]] = [
        {"tokens": t, "logprobs": row[range(4), t].tolist()} for t, row in zip(tokens, logs, strict=True)
    ]
    assert agreement(model, prompts, found)[:2] == (2, None)
    found[1]["tokens"][2] = int(logs[1][2].argmin())
    same, first, error = agreement(model, prompts, found)
    assert (same, first) == (1, 2) and error > 0.01


def test_what_an_engine_did_is_told_and_read_again() -> None:
    found = Served(
        "vllm", "1.0", 20, 64, 19, 3, 1e-4, 1e-3, Cache(128, 1024, 131_072, 8192.0), Cache(128, 512, 65_536, 16_384.0),
        1 << 30, (90.0, 120.0, 110.0), (100.0, 100.0, 100.0), "CPU", "2026-01-01",
    )  # fmt: skip
    assert not found.passed and found.room == 2.0 and found.speed == 1.1
    words = in_words(found)
    assert "19 of 20" in words and "number 4" in words and "2.00 times as many tokens" in words and "1.10" in words
    assert Served.from_json(found.to_json()) == found
    alone = replace(found, source_cache=None, source_tokens_per_second=(), not_measured="it cannot")
    assert "it cannot" in in_words(alone) and alone.room is None and alone.speed is None
