"""Exported models in the engines themselves: llama.cpp, onnxruntime and OpenVINO. Run by `make serve-test`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import exported_models as tiny  # noqa: E402
from exported_models import PLAIN  # noqa: E402

import headwise  # noqa: E402
from headwise.types.codes import BITS  # noqa: E402

POOLED = PLAIN.pooling(2)
CODE = tuple(16 * (width == 4) for width in BITS)
CARRIED = {
    "llama": (PLAIN, PLAIN),
    "deci": (PLAIN, replace(PLAIN, query_heads=2, kv_heads=1, mlp_width=32), replace(PLAIN, kv_heads=4)),
    "llama with pairs of each head": (replace(PLAIN, qk_dim=8, qk_width=8),) * 2,
    "mimo2": (replace(PLAIN, v_dim=8), replace(PLAIN, v_dim=4, kv_heads=1)),
}
GRAPHS = {
    "per-head": (replace(PLAIN, qk_dim=8, v_dim=12), replace(PLAIN, qk_dim=8, qk_width=8)),
    "pooled": (replace(POOLED, qk_dim=12, v_dim=20),),
    "coded": (replace(POOLED, qk_dim=24, v_dim=24, k_code=CODE, v_code=CODE),),
}


@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("biases", [False, True])
def test_llama_cpp_gives_our_answers(tmp_path: Path, kind: str, biases: bool) -> None:
    tiny.saved(tmp_path / "m", *CARRIED[kind], attention_bias=biases, mlp_bias=biases)
    found = headwise.export(tmp_path / "m", "gguf")
    assert found["architecture"] == kind.split()[0] or (biases and kind == "mimo2"), "which has no biases"
    assert found["checked"]["largest_difference"] < 1e-3


def test_llama_cpp_gives_our_answers_with_weights_in_8_bits(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "m", PLAIN)
    checked = headwise.export(tmp_path / "m", "gguf", type="q8_0")["checked"]
    assert checked["nats_in_engine"] == pytest.approx(checked["nats"], abs=0.05)


def test_llama_cpp_takes_numbers_where_it_has_no_rule_for_text(tmp_path: Path) -> None:
    tiny.saved(tmp_path / "m", PLAIN, split=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    found = headwise.export(tmp_path / "m", "gguf", tokenizer="ids")
    assert found["checked"]["largest_difference"] < 1e-3


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_graphs_give_our_answers_with_and_without_a_past(tmp_path: Path, kind: str, to: str) -> None:
    tiny.saved(tmp_path / "m", *GRAPHS[kind])
    assert headwise.export(tmp_path / "m", to)["checked"]["largest_difference"] < 1e-4
