"""Models and inputs that nobody thinks of first: dead heads, tiny contexts, few words, layers that nothing names."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_keeping import run, world  # noqa: F401
from tiny_models import cut, random_plan

from headwise import budgets, families, linalg, preflight, tasks
from headwise.checks import exactness, speed
from headwise.cuts import save
from headwise.data import overlap
from headwise.errors import BudgetError, DataError, HeadwiseError, ModelError
from headwise.families.llama import FAMILY as llama
from headwise.heal.refit import refit
from headwise.probes import fisher, gram, sensitivity
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings

DEAD = {
    "a key head": ("self_attn.k_proj", slice(0, 16)),
    "a value head": ("self_attn.v_proj", slice(0, 16)),
    "all queries": ("self_attn.q_proj", slice(None)),
    "all keys": ("self_attn.k_proj", slice(None)),
    "attention": ("self_attn", slice(None)),
    "the MLP": ("mlp", slice(None)),
}


@pytest.mark.parametrize("part", DEAD)
def test_parts_whose_weights_are_zero_are_priced_cut_and_healed(part: str) -> None:
    name, rows = DEAD[part]
    torch.manual_seed(0)
    stock = llama.tiny()
    for key, parameter in stock.named_parameters():
        if f"layers.1.{name}" in key:
            parameter.data[rows] = 0
    model, ids = llama.tailor(stock), llama.example(stock.config, 4, 20)
    moments = gram.collect(llama, model, ids, mlp=True)
    curves, _ = sensitivity.measure(llama, model, ids, moments, True, 0, task=tasks.of(model, None))
    assert all(torch.tensor(curve.values).isfinite().all() for curve in curves)
    found = fisher.collect(llama, model, ids, 0)
    assert all(tensor.isfinite().all() for layer in found for tensor in layer.values())
    small = cut(llama, stock, random_plan(llama, stock, 1))
    refit(llama, model, small, ids)
    assert llama.run(small, ids).isfinite().all()


def test_zero_matrices_have_sane_roots_and_systems_without_one_solution_are_solved() -> None:
    zero, some = torch.zeros(2, 4, 4), torch.eye(4).repeat(2, 1, 1)
    p_q, p_k, values = linalg.balanced(some, zero)
    assert values.max() < 1e-3 and max(p_q.abs().max(), p_k.abs().max()) < 1e6
    assert torch.allclose(p_q @ p_k.mT, some.double(), atol=1e-6), "all directions give the product back"
    start = torch.randn(2, 4, 3)
    assert torch.allclose(linalg.ridge(zero, torch.zeros(2, 4, 3), start, 1e-3), start.double()), "the start stays"
    singular = torch.diag(torch.tensor([2.0, 0.0])).double()
    assert linalg.least_solution(singular, torch.tensor([[2.0], [0.0]]).double()).tolist() == [[1.0], [0.0]]
    with pytest.raises(HeadwiseError, match="cannot be decomposed"):
        linalg.least_solution(torch.diag(torch.tensor([torch.inf, 0.0])), torch.zeros(2, 1))


@pytest.mark.parametrize("changes", [{"max_position_embeddings": 8}, {"vocab_size": 5}, {"vocab_size": 2}], ids=str)
def test_models_of_tiny_sizes_are_timed(changes: dict[str, int]) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    model = llama.tailor(llama.tiny(**changes, **ends))
    found = speed.measure(model, model, prompt=16, steps=24, repeats=1)
    assert found["decode_ms_per_token_after"] > 0
    assert found["prompt_tokens"] + found["decoded_tokens"] <= model.config.max_position_embeddings


@pytest.mark.parametrize(("after", "passed"), [(0.0, True), (1e-3, False), (torch.nan, False)])
def test_answers_that_are_all_zero_can_be_compared(after: float, passed: bool, tmp_path: Path) -> None:
    process = SimpleNamespace(communicate=lambda given: ("", ""), returncode=0)
    save_file({"logits": torch.full((2, 3), after)}, tmp_path / "logits.safetensors")
    fresh: Any = SimpleNamespace(scratch=SimpleNamespace(name=tmp_path), process=process)
    how = ("eager", "float32", "cpu")
    assert exactness._reloaded(fresh, tmp_path, tmp_path, False, how, torch.zeros(2, 3)).passed == passed


def test_layers_that_the_configuration_does_not_name_are_told(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers - 1}))
    with caplog.at_level(logging.WARNING, "headwise"):
        families.load(str(tmp_path / "model"))
    assert f"first model.layers.{layers - 1}." in caplog.text and "are not read" in caplog.text
    caplog.clear()
    families.load(str(tiny_folder))
    assert not caplog.text


def test_a_cut_that_went_wrong_is_not_written(tmp_path: Path) -> None:
    model: Any = llama.tailor(llama.tiny())
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"values from nan to nan in .*up_proj\.weight; nothing was written"):
        save(llama, model, None, tmp_path / "new", False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["kv=12.5%,params=90%", "kv=12.5% params=90%", "kv=12.5%; params=90%"])
def test_two_limits_in_one_word_are_told_apart(text: str) -> None:
    shape = llama.shape_of(llama.tiny().config)
    with pytest.raises(BudgetError, match="holds 2 limits; .*--budget kv=12.5% --budget params=90%"):
        budgets.parse(text, shape)
    assert budgets.parse("memory=40%@8k,b8", shape).batch == 8, "a comma behind an @ is no second limit"


@pytest.mark.parametrize("found", [False, True], ids=["no result", "readings"])
def test_an_impossible_run_without_a_result_leaves_nothing(
    world: Settings,  # noqa: F811
    tmp_path: Path,
    found: bool,
) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(DataError), folder.held("run", new=True):
        folder.claim(world, world.model)
        with folder.replacing():
            if found:
                folder.readings_file.write_text("{}")
            raise DataError("the text is empty.")
    assert folder.settings_file.exists() == folder.path.exists() == found
    if not found:
        run(folder, replace(world, budgets=("kv=50%",)))  # so that another command finds the place free


def test_a_text_that_repeats_itself_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    few = {"tokens": 512, "eval_tokens": 256, "swap_tokens": 64, "length": 32, "device": "cpu"}
    (tmp_path / "same.txt").write_text("this line is the same as all others of the text\n" * 2000)
    (tmp_path / "new.txt").write_text("\n".join(f"this line is number {n} of all of the text" for n in range(2000)))
    found = []
    for name in ("same.txt", "new.txt"):
        settings = Settings(str(tiny_folder), ("kv=75%",), data=str(tmp_path / name), **few)
        found.append(" ".join(preflight.check(settings, tmp_path / "run")))
    assert "100% of the lines of" in found[0] and "give another text with --eval" in found[0]
    assert "occur more than once" not in found[1]
    assert overlap.repeated("self", 100) is None
