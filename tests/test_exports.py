"""Exports without their engines: what a GGUF file holds, what is refused, and graphs for any number of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import exported_models as tiny
import pytest
import torch
from exported_models import HEAD, PLAIN
from tokenizers import Regex, pre_tokenizers

import headwise
from headwise import families
from headwise.cuts import save
from headwise.errors import HeadwiseError, ModelError, OutputError
from headwise.exports import _graph, _llama_layout
from headwise.types import BITS, LayerShape

POOLED = PLAIN.pooling(2)
CODE = tuple(16 * (width == 4) for width in BITS)
KINDS = {
    "plain": (PLAIN,),
    "per-head": (replace(PLAIN, qk_dim=8, v_dim=12), replace(PLAIN, qk_dim=8, qk_width=8)),
    "pooled": (replace(POOLED, qk_dim=12, v_dim=20), POOLED),
    "coded": (replace(POOLED, qk_dim=24, v_dim=24, k_code=CODE, v_code=CODE),),
}


def test_a_gguf_file_holds_the_layers_with_zeros_where_they_are_shorter(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    small = replace(PLAIN, query_heads=2, kv_heads=1, qk_dim=8, qk_width=8, v_dim=12, mlp_width=32)
    tiny.saved(tmp_path / "m", PLAIN, small)
    found = headwise.export(tmp_path / "m", "gguf", check=False)
    assert found["architecture"] == "deci" and found["out"] == str(tmp_path / "m.gguf")
    assert found["cache_filling_bytes_per_token"] == 2 * (HEAD - 8 + HEAD - 12), "is told to the user"
    read = gguf.GGUFReader(found["out"])
    assert read.fields["deci.attention.head_count_kv"].contents() == [2, 1]
    assert read.fields["deci.feed_forward_length"].contents() == [64, 32]
    tensors = {tensor.name: tensor for tensor in read.tensors}
    keys = torch.tensor(tensors["blk.1.attn_k.weight"].data)
    assert keys.shape == (HEAD, 32) and int((keys.abs().sum(1) > 0).sum()) == 8
    model = families.load(str(tmp_path / "m"))[0]
    kept = model.model.layers[1].self_attn.pairs_GP[0]
    turning = keys.view(HEAD // 2, 2, -1)[kept].transpose(0, 1).flatten(0, 1)  # neighbours to halves
    assert torch.equal(turning, model.model.layers[1].self_attn.k_proj.weight)
    assert read.fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def test_shorter_values_alone_choose_the_carrier_that_needs_less_memory() -> None:
    model = tiny.tailored((replace(PLAIN, v_dim=8), replace(PLAIN, v_dim=4)))
    family = families.family_of(model.config)
    way = _llama_layout.layouts(model, family.blocks(model), family.shape_of(model.config).layers)[0]
    assert (way.arch, way.k_dim, way.v_dim) == ("mimo2", HEAD, 8)


@pytest.mark.parametrize("kind", ["per-head", "pooled", "coded"])
def test_what_llama_cpp_cannot_compute_is_refused_with_what_to_type(kind: str) -> None:
    with pytest.raises(ModelError, match="--portable"):
        _llama_layout.refuse_model(tiny.tailored(KINDS[kind]))


def test_a_tokenizer_without_a_rule_is_refused_but_numbers_are_not(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[a-z_]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tiny.saved(tmp_path / "m", PLAIN, split=own)
    with pytest.raises(ModelError, match="--tokenizer ids"):
        headwise.export(tmp_path / "m", "gguf", check=False)
    assert not (tmp_path / "m.gguf").exists(), "nothing half written"
    assert headwise.export(tmp_path / "m", "gguf", check=False, tokenizer="ids")["tokenizer"] == "ids"


def test_nothing_is_written_over_and_nothing_into_the_source(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tiny.saved(tmp_path / "m", PLAIN)
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(OutputError, match="--overwrite"):
        headwise.export(tmp_path / "m", "gguf")
    with pytest.raises(OutputError, match="never written"):
        headwise.export(tmp_path / "m", "gguf", out=tmp_path / "m" / "x.gguf")
    with pytest.raises(HeadwiseError, match="llama-quantize"):
        headwise.export(tmp_path / "m", "gguf", type="q4_k")
    assert (tmp_path / "m.gguf").read_text() == "mine"


def test_a_number_that_no_file_holds_is_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tiny.saved(tmp_path / "m", PLAIN)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["rms_norm_eps"] = 1e300
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a number that no GGUF file holds"):
        headwise.export(tmp_path / "m", "gguf", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def _graph_of(layers: tuple[LayerShape, ...]) -> tuple[Any, Any, Any]:
    model = tiny.tailored(layers)
    graph, family = _graph.decoder(model)
    return model, graph, family


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_exported_graph_serves_any_number_of_tokens(kind: str) -> None:
    model, graph, family = _graph_of(KINDS[kind])
    given = _graph.example(model, family)
    exported = torch.export.export(graph, (), given, dynamic_shapes=_graph.moving(len(given["past"])), strict=False)
    for sizes in ((1, 2 * HEAD + 3, 0), (3, 1, 7)):  # more tokens than pooled heads are wide, and a step
        given = _graph.example(model, family, sizes, seed=1)
        torch.testing.assert_close(exported.module()(**given)[0], graph(**given)[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_coded_graph_without_a_cache_serves_any_number_of_tokens() -> None:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.tailored(KINDS["coded"])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(ids, use_cache=False).logits
            return found

    whole, moving = Logits(), torch.export.Dim("tokens", min=2, max=128)
    graph = torch.export.export(whole, (torch.ones(2, 9).long(),), dynamic_shapes=({1: moving},), strict=False)
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    torch.testing.assert_close(graph.module()(ids), whole(ids), rtol=0, atol=1e-3)


def test_a_portable_model_is_told_to_older_readers_or_refused_by_them(tmp_path: Path) -> None:
    model = tiny.tailored((replace(PLAIN, qk_dim=12, qk_width=12, v_dim=12),))
    model.model.layers[0].self_attn.pairs_GP.copy_(torch.tensor([0, 1, 2, 4, 5, 7]))
    own = save(families.family_of(model.config), model, tiny.tokenizer(), tmp_path / "m", portable=True)
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    assert settings["rope_scaling"] == settings["rope_parameters"], "where transformers 4 looks for it"
    assert (tmp_path / "m" / "model-rotary.safetensors").is_file(), "at which llama.cpp's converter stops"
    again = families.load(str(tmp_path / "m"))[0]
    rows = torch.arange(3, 12)[None]
    torch.testing.assert_close(again(rows).logits, own(rows).logits, rtol=0, atol=1e-4)
