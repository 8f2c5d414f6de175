"""What a saved model's folder holds, and what other libraries do with a model that was loaded from it."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import drawn, fresh, made, said
from tiny_models import random_plan
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from headwise import families, runtime
from headwise.cuts import balance, reshape, save
from headwise.families.bert import FAMILY as bert
from headwise.families.llama import FAMILY as llama
from headwise.files.card import facts_of
from headwise.files.tensors import header
from headwise.probes import gram
from headwise.report import model_card
from headwise.runs import fingerprint
from headwise.runs.dossier import Dossier
from headwise.runs.settings import Settings

COPIED = {"LICENSE": b"do what you like", "NOTICE.txt": b"by somebody", "tokenizer.model": b"\0pieces"}
ROWS = torch.arange(24).view(2, 12) + 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose file is in bfloat16 and whose configuration says float32, with licences and a card."""
    folder = tmp_path_factory.mktemp("source") / "acme"
    model = llama.tiny(vocab_size=4096)
    families.set_format(model, torch.bfloat16)
    with families.quietly():
        model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, folder / name)
    for name, content in COPIED.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: acme/large\ntags: [a]\n---\nText.\n")
    return folder


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a cut model, and the model as it was before it was saved, in the format of its file."""
    stock, tokenizer = families.load(str(source))
    whole = llama.tailor(stock)
    plan = random_plan(llama, whole, 3)
    cut = reshape(llama, whole, plan, gram.collect(llama, whole, ROWS, True))
    folder = tmp_path_factory.mktemp("saved") / "model"
    dtype = families.saved_dtype(str(source), whole.config)
    before = llama.tailor(cut)
    families.set_format(before, dtype)
    with families.quietly():
        save(llama, cut, tokenizer, folder, False, dtype, lambda new: families.accompany(str(source), new))
    return folder, before.float()


def test_files_of_the_source_come_along_as_they_are(source: Path, saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    for name in (*COPIED, "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    theirs, ours = (json.loads((where / "tokenizer_config.json").read_text()) for where in (source, folder))
    assert ours.pop("tokenizer_class") and theirs.pop("tokenizer_class") and ours == theirs, "no is_local"
    told, asked = (AutoTokenizer.from_pretrained(where)("def f(x): return 1") for where in (folder, source))
    assert told["input_ids"] == asked["input_ids"]


def test_a_file_stays_in_the_format_of_the_source_and_the_model_in_that_of_its_configuration(
    saved: tuple[Path, Any],
) -> None:
    kinds = {entry.dtype for entry in header(saved[0] / "model.safetensors").values()}
    assert "BF16" in kinds and "F32" not in kinds
    assert json.loads((saved[0] / "config.json").read_text())["dtype"] == "float32"


def test_a_saved_model_is_balanced_and_answers_as_before_to_the_last_bit(saved: tuple[Path, Any]) -> None:
    folder, before = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(model(ROWS).logits, before(ROWS).logits)
    for block in llama.blocks(model):
        if block.attention.query_heads:
            values, output = (w.detach().square().mean() for w in (block.attention.v_proj.weight, block.output.weight))
            assert 0.2 < float(values / output) < 5


@pytest.mark.parametrize("pool", [1, 2])
def test_balancing_changes_no_coded_answer(pool: int) -> None:
    family, _, _, model = made("llama", pool)
    model, rows = family.tailor(model), drawn(2, 50)
    before = said(model, rows), said(model, rows, fresh(model))
    balance.balance(family.blocks(model))
    assert torch.equal(said(model, rows), before[0]) and torch.equal(said(model, rows, fresh(model)), before[1])
    gains = torch.cat([block.attention.k_gain_GK.flatten() for block in family.blocks(model)])
    assert (gains != 1).any() and torch.equal(gains.log2(), gains.log2().round())


def test_the_card_has_the_licence_and_no_path(source: Path, saved: tuple[Path, Any]) -> None:
    assert facts_of(saved[0] / "README.md") == {"license": "mit"}, "the source's own base is not that of the cut model"
    card = model_card(Dossier(settings=Settings(model=str(source))), facts_of(saved[0] / "README.md"))
    assert 'license: "mit"' in card and "base_model" not in card
    for text in ("", "---", "---\n: [\n---\n", "---\nlicense: 3\n---\n", "---\n- a\n---"):
        (source / "odd.md").write_text(text)
        assert facts_of(source / "odd.md") == {}, "damage is no error"


def test_a_card_may_be_edited_and_nothing_else(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0], tmp_path / "model"))
    before = fingerprint.of_path(folder)
    (folder / "README.md").write_text("mine")
    assert fingerprint.of_path(folder) == before
    (folder / "LICENSE").write_text("mine")
    assert fingerprint.of_path(folder) != before


def test_a_loaded_model_saves_its_code_and_can_be_pickled(saved: tuple[Path, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    model.config.auto_map = {auto: f"acme/model--{text}" for auto, text in model.config.auto_map.items()}
    model.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == set(runtime.FILES)
    assert runtime.foreign_code(tmp_path / "again") is None
    remote = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.no_grad():
        wanted = model(ROWS).logits
        for same in (remote, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found = same(ROWS, output_attentions=True)
            assert torch.equal(found.logits, wanted) and found.attentions is not None


def test_a_model_without_a_head_is_saved_and_loaded_again(tmp_path: Path) -> None:
    model = bert.tailor(bert.tiny("bert", "AutoModel"))
    assert type(model).__name__ == "HeadwiseBertModel"
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ROWS)[0], model(ROWS)[0]) and type(again) is type(model)
        assert torch.equal(pickle.loads(pickle.dumps(again))(ROWS)[0], model(ROWS)[0])


def test_peft_finds_what_to_adapt_and_merges(saved: tuple[Path, Any]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(saved[0]), peft.LoraConfig(r=2))
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(3):
        loss = model(ROWS, labels=ROWS).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        wanted = model(ROWS).logits
        torch.testing.assert_close(model.merge_and_unload()(ROWS).logits, wanted, rtol=1e-4, atol=1e-4)
