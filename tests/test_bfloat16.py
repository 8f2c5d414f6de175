"""Models that stay in bfloat16: prices near those of float32, healing, and no tensor in memory twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import sharp_folder

from headwise import api, families, heal, pipeline, strategies
from headwise.budgets import parse_all
from headwise.checks import exactness
from headwise.cuts import save
from headwise.errors import HeadwiseError
from headwise.families import set_format
from headwise.families.llama import FAMILY as llama
from headwise.probes import _backward
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.tasks.causal import Causal
from headwise.types import Readings

SMALL: dict[str, Any] = dict(tokens=2048, eval_tokens=512, swap_tokens=128, length=64, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16 that attends sharply, with the embedded model's tokens, and a small text."""
    return sharp_folder(tmp_path_factory.mktemp("source") / "tiny", 6_000, torch.bfloat16)


def settings(folder: Path, *budgets: str, **more: Any) -> Settings:
    given = {**SMALL, "model": str(folder), "data": str(folder.parent / "text.txt"), **more}
    return Settings(budgets=budgets, **given)


@pytest.fixture(scope="module")
def probed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Probings of the same model in both formats, with prices of everything; measured ones would add rounding."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = tmp_path_factory.mktemp("runs") / dtype
        asked = settings(folder, dtype=dtype, heal="none", swap_tokens=0)
        with pipeline.claimed(asked, RunFolder(found[dtype]), "probe", False):
            pipeline.measure(asked, RunFolder(found[dtype]), ())
    return found


# What is held, and how often.


def places(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def test_a_tailored_model_has_the_tensors_of_the_stock_one() -> None:
    stock = llama.tiny()
    ours = llama.tailor(stock)
    assert set(places(ours).values()) <= set(places(stock).values()), "nothing is copied"
    assert places(llama.tailor(ours, share="all")) == places(ours)
    assert not set(places(llama.tailor(ours)).values()) & set(places(ours).values())
    copy, kept = places(llama.tailor(ours, share="ends")), places(ours)
    same = {name for name in copy if copy[name] == kept[name]}
    assert same == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}, "layers may be changed"


def test_a_cut_model_shares_what_was_not_cut_and_its_folder_is_whole(folder: Path, tmp_path: Path) -> None:
    asked = settings(folder, "kv=40%", heal="none", dtype="bfloat16")
    source = pipeline.load_source(asked)
    fitted = pipeline.fit(asked, source)
    before, after = places(source.model), places(fitted.model)
    shared = {name for name in after if after[name] == before.get(name)}
    kinds = {name.split(".")[-2] for name in shared}
    assert {"embed_tokens", "lm_head", "gate_proj", "up_proj", "down_proj", "input_layernorm", "q_proj"} <= kinds
    known = [tensor.clone() for tensor in source.model.state_dict().values()]
    saved = save(llama, fitted.model, source.tokenizer, tmp_path / "model", False)
    again = api.load(tmp_path / "model", dtype="auto")
    assert again.dtype == saved.dtype == torch.bfloat16
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in saved.state_dict().items())
    pairs = zip(known, source.model.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the source is as it was"


@pytest.mark.parametrize("method", ("refit", "blockwise", "distill"))
def test_healing_leaves_both_models_as_they_were_and_keeps_the_format(folder: Path, method: str) -> None:
    asked = settings(folder, "kv=30%", dtype="bfloat16", heal="none")
    source = pipeline.load_source(asked)
    cut = pipeline.fit(asked, source).model
    known = [tensor.clone() for model in (source.model, cut) for tensor in model.state_dict().values()]
    options = () if method == "refit" else ("steps=8", "batch=256", *(("rate=0.003",) if method == "distill" else ()))
    healed, record = heal.healed(method, source.job(replace(asked, heal_options=options), cut))
    assert {tensor.dtype for tensor in healed.parameters()} == {torch.bfloat16}
    now = [tensor for model in (source.model, cut) for tensor in model.state_dict().values()]
    assert all(torch.equal(*pair) for pair in zip(known, now, strict=True))
    changed = [not torch.equal(a, b) for a, b in zip(cut.parameters(), healed.parameters(), strict=True)]
    assert record.tokens and any(changed)


# Numbers.


@pytest.mark.parametrize("at_once", (1, 2**30))
def test_the_loss_of_some_rows_at_a_time_has_the_gradient_of_the_whole(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backward, "LOGITS", at_once)
    model, task = llama.tailor(llama.tiny()).requires_grad_(False), Causal()
    batch = task.prepare(torch.randint(3, 90, (5, 12), generator=torch.Generator().manual_seed(0)), 0)
    seen: list[int] = []

    def labels(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        seen.append(len(outputs))
        return outputs.detach().argmin(-1)

    for chosen in (None, labels):
        end = llama.last_stream(model, batch.inputs).requires_grad_()
        outputs = task.outputs_from(llama, model, end, batch)
        wanted = batch.labels if chosen is None else outputs.detach().argmin(-1)
        (whole,) = torch.autograd.grad(task.loss(outputs, wanted), end)
        found = _backward.gradient_of_loss(llama, model, task, batch, end.detach(), chosen)
        assert torch.allclose(found, whole, rtol=1e-4, atol=1e-6)
    assert seen == ([1] * 5 if at_once == 1 else [5])


def test_answers_are_sums_in_float32() -> None:
    model = llama.tailor(llama.tiny())
    set_format(model, torch.bfloat16)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = Causal().outputs(llama, model, Causal().prepare(ids, 0))
        stream = model.model.norm(llama.last_stream(model, ids))
        exact = (stream.double() @ model.lm_head.weight.double().mT).log_softmax(-1)
        rounded = model(ids).logits
    assert torch.allclose(found.double(), exact, atol=1e-4)
    assert rounded.dtype == torch.bfloat16, "outside of probes and checks a model is as it was"


def test_predicted_prices_and_plans_from_them_are_near_those_of_float32(probed: dict[str, Path]) -> None:
    exact, rounded = (Readings.read(out / "readings.json") for out in probed.values())
    for kind in ("damage.k_bits", "damage.v_bits", "damage.v", "damage.qk_projected", "damage.mlp"):
        curves = exact.curve(kind), rounded.curve(kind)
        for layer, ticks in enumerate(curves[0].ticks):
            last = curves[0].values[layer][-1], curves[1].values[layer][-1]
            assert last[1] == pytest.approx(last[0], rel=0.3), (kind, layer, ticks[-1])
    for budgets, allow in ((("kv=30%",), ("qk", "v", "mlp", "bits")), (("params=95%",), ("qk", "v", "mlp"))):
        wanted, found = (strategies.allocate(r, parse_all(budgets, r.source), allow=allow) for r in (exact, rounded))
        assert found.predicted_damage == pytest.approx(wanted.predicted_damage, rel=0.2)


def test_a_run_in_bfloat16_is_verified_and_its_proof_may_be_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "LARGE", 0)  # as if the model were too large to be loaded in float32
    found = pipeline.run(settings(folder, "kv=40%", dtype="bfloat16", heal="none"), tmp_path / "run").verdict
    assert found is not None and all(check.passed for check in found.checks)
    (reload,) = [check for check in found.checks if check.name == exactness.RELOADS]
    assert reload.expected == "at most 3e-02"
    assert found.quality["kl"].after.value < 0.05


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="dtype is 'int4'; give auto, float32, bfloat16"):
        Settings("embedded", dtype="int4")


def test_float32_is_computed_on_a_cpu_and_the_files_format_on_a_gpu(folder: Path) -> None:
    config = families.configuration(str(folder))
    found = [families.computed_dtype(config, asked, device) for asked, device in WAYS]
    assert found == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    config.dtype = torch.float16
    assert families.computed_dtype(config, "auto", "cuda") == torch.float32, "gradients need its range"


WAYS = (("auto", "cpu"), ("auto", "cuda"), ("bfloat16", "cpu"), ("float32", "cuda"))
