"""Fast inference: the same texts as the ordinary way, and kernels that agree with plain attention."""

from __future__ import annotations

import copy

import pytest
import torch
from test_families import cut, random_plan, tiny

from headwise import families
from headwise.fast import choice
from headwise.fast.model import optimise

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


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    """No test sees or changes what the user's machine measured."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    choice.forget()
    yield tmp_path / "cache" / "kernels.json"
    choice.forget()


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
