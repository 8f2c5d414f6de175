"""Weight quantisers, peft and lm-eval, each on models as Headwise saves them.

Needs the packages of serving/weights.txt. The models are the embedded one, cut without any probing.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import zero_shot
from serving_weights import ENGINES, WORK
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

from headwise import families
from headwise.cuts import blind_moments, reshape, save
from headwise.families.llama import FAMILY as llama
from headwise.types import LayerKeep, Plan

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n" * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Half of the cache: rows per head, and rows that heads share."""
    stock, tokenizer = families.load("embedded")
    made = {}
    for kind, pool in (("per-head", 1), ("pooled", 4)):
        whole = llama.tailor(stock, pool)
        shape = llama.shape_of(whole.config)
        half = tuple(replace(layer, qk_dim=layer.qk_dim // 2, v_dim=layer.v_dim // 2) for layer in shape.layers)
        keep = (LayerKeep(),) * len(half)
        plan = Plan("embedded", shape, shape.with_layers(half), keep, "", (), {}, 0.0, 0)
        cut = reshape(llama, whole, plan, blind_moments(llama, whole))
        made[kind] = tmp_path_factory.mktemp(kind) / "model"
        with families.quietly():
            save(llama, cut, tokenizer, made[kind], False, beside=lambda new: families.accompany("embedded", new))
    return made


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32, **options).eval()


def loss(model: Any, folder: Path) -> float:
    ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.mark.parametrize("kind", ["per-head", "pooled"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("engine", WORK)
def test_weights_in_few_bits_answer_nearly_as_whole_ones(
    folders: dict[str, Path], kind: str, engine: str, bits: int
) -> None:
    folder = folders[kind]
    model = loaded(folder, quantization_config=ENGINES[engine](bits))
    assert loss(model, folder) < loss(loaded(folder), folder) + {8: 0.1, 4: 0.5}[bits]


@pytest.mark.parametrize("kind", ["per-head", "pooled"])
def test_a_quantised_cache_of_transformers_holds_our_rows(folders: dict[str, Path], kind: str) -> None:
    model = loaded(folders[kind])
    ids = torch.randint(5, 4000, (1, 48), generator=torch.Generator().manual_seed(0))
    few = {"backend": "hqq", "nbits": 8, "q_group_size": 32, "residual_length": 16, "axis_key": 1, "axis_value": 1}
    cache = QuantizedCache(config=model.config, **few)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), wanted)
    assert cache.layers[0]._quantized_keys is not None, "most tokens lie in few bits"


def test_peft_adapts_without_being_told_where_and_merges(folders: dict[str, Path]) -> None:
    import peft

    model = peft.get_peft_model(loaded(folders["pooled"]), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    ids = torch.randint(5, 4000, (2, 32), generator=torch.Generator().manual_seed(0))
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(4):
        found = model(ids, labels=ids).loss
        found.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(found))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        wanted = model(ids).logits
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, wanted, rtol=1e-3, atol=1e-3)


def test_lm_eval_reads_a_saved_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"text": f"x = {n}\ny = x +", "choices": [" 1", " import"], "gold": 0} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: text\n"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\nmetric_list:\n  - metric: acc\n'
    )
    asked = f"pretrained={folders['per-head']},trust_remote_code=True,dtype=float32"
    words = ["--model", "hf", "--model_args", asked, "--tasks", "own", "--include_path", str(tmp_path)]
    words += ["--device", "cpu", "--batch_size", "4", "--output_path", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "lm_eval", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(found.read_text())["results"]["own"]["acc,none"] <= 1


def test_zero_shot_scores_of_the_benchmarks_are_those_of_lm_eval() -> None:
    tokenizer = AutoTokenizer.from_pretrained(families.locate("embedded")[0])
    torch.manual_seed(3)
    model = llama.tiny(vocab_size=4096)
    model.lm_head.weight.data *= 30
    words = ["return x", "import os", "pass", "def main():", "class A:", "yield from y "]
    draw = random.Random(0)
    choices = [zero_shot.Item(draw.choice(words), tuple(draw.sample(words, 3)), 1) for _ in range(20)]
    last = [zero_shot.Item(draw.choice(words), (draw.choice(words),), 0) for _ in range(20)]
    exams = {"choices": zero_shot.Exam(tokenizer, choices), "last": zero_shot.Exam(tokenizer, last)}
    ours, theirs = zero_shot.all_tasks(model, exams)[1], zero_shot.by_lm_eval(model, tokenizer, exams)
    for task, name in (("choices", "acc"), ("choices", "acc_norm"), ("last", "acc")):
        assert ours[task][name] == pytest.approx(theirs[task][name])
