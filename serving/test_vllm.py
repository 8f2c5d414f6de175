"""vLLM serves what we save: every family of decoders, every kind of cut. Run by `make serve-test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "benchmarks")]

import kinds  # noqa: E402
import tiny_models  # noqa: E402

from headwise import families  # noqa: E402
from headwise.cuts import save  # noqa: E402
from headwise.engines import compare  # noqa: E402
from headwise.errors import ModelError  # noqa: E402
from headwise.families._decoder import Decoder  # noqa: E402

NAMES = ("gqa", "plain", "window", "partial rotary", "longrope", "hard caps")
DECODERS = [
    pytest.param(family, kind, changes, id=f"{kind}-{name}")
    for family in tiny_models.HERE
    if isinstance(family, Decoder)
    for kind in family.model_types
    for name, changes in tiny_models.MORE.get(kind, {"plain": {}}).items()
    if name in NAMES
]


@pytest.mark.parametrize("family, kind, changes", DECODERS)
def test_every_decoder_is_served(family, kind, changes, tmp_path):
    torch.manual_seed(0)
    stock = family.tiny(kind, **changes)
    model = tiny_models.cut(family, stock, tiny_models.random_plan(family, stock, 3))
    saved = save(family, model, tiny_models.FakeTokenizer(), tmp_path / "model", portable=False).eval()
    length = min(32, family.longest(stock.config))
    prompts = torch.randint(3, saved.config.vocab_size, (3, length // 2)).tolist()
    settings = {"dtype": "float32", "cache_bytes": 1 << 28, "length": length, "batch": 3, "trust": True}
    with compare.Engine("vllm", str(tmp_path / "model"), **settings) as engine:
        found = engine.ask("written", prompts=prompts, tokens=length // 2)
    same, _, error = compare.agreement(saved, prompts, found)
    assert same == len(prompts) and error < 1e-4


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("cuts")


@pytest.fixture(scope="module")
def source():
    engine, why = compare.start_source("vllm", str(kinds.source("embedded")), torch.float32, False)
    assert engine is not None, why
    with engine:
        yield engine


@pytest.mark.parametrize("kind", [kind for kind in kinds.EVERY if kind != "coded"])
def test_every_kind_of_cut_is_served(kind, work, source):
    folder = kinds.made("embedded", kind, work)
    ours, _ = families.load(str(folder), "cpu")
    prompts = torch.randint(3, 4000, (4, 32)).tolist()
    found = compare.serve("vllm", str(folder), ours.eval(), prompts, source, trust=kind != "portable")
    assert found.passed and found.log_probability_error < 1e-3
    if "serve" in kind:
        assert found.room >= 1.9, "half the cache bytes hold twice the tokens"


def test_without_trust_the_plug_in_serves(work):
    folder = kinds.made("embedded", "per-head, --serve vllm", work)
    with compare.start("vllm", str(folder), torch.float32, trust=False) as engine:
        assert engine.facts["tokens"] == 131_072


def test_a_coded_cache_is_refused_with_what_to_type(work):
    folder = kinds.made("embedded", "coded", work)
    with pytest.raises(ModelError, match="--serve vllm"):
        compare.start("vllm", str(folder), torch.float32, trust=True)


def test_verify_shows_what_the_engine_does(work):
    folder = kinds.made("embedded", "pooled, --serve vllm", work).parent
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "verify", str(folder), "--engine", "vllm", "--json"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["same"] == told["prompts"] == compare.PROMPTS
    assert told["cache"]["tokens"] == 2 * told["source_cache"]["tokens"]
    assert json.loads((folder / "serving.json").read_text())["headwise"] == "Served"
