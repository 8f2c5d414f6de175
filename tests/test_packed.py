"""Weights that stay in few bits in memory: the same numbers, no more bytes after a run, and products in C."""

from __future__ import annotations

import copy
import ctypes
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weights import ROWS, packed_folder
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import headwise
from headwise.checks.exactness import stored_bytes
from headwise.errors import HeadwiseError
from headwise.fast import native_build, packed
from headwise.linalg import Rounded
from headwise.runtime.packed_headwise import PackedEmbedding, PackedLinear, unpacked
from headwise.types.weights import WIDTHS

needs_compiler = pytest.mark.skipif(isinstance(native_build.library(), str), reason="this machine has no C compiler")
SIZES = ((20, 1), (64, 1), (96, 3), (48, 3), (172, 1), (576, 9))  # columns, and groups that have scales


def held(model: Any) -> int:
    """Bytes of all tensors, each counted once."""
    return sum({x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}.values())


def matrix(columns: int, groups: int, bits: int) -> tuple[PackedLinear, Rounded]:
    """A product with a drawn matrix in few bits, and that matrix."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(bits * columns)
    half = 1 << (bits - 1)
    made = Rounded(
        torch.randint(-half, half, (37, columns), dtype=torch.int8), torch.randn(37, groups).bfloat16(), bits
    )
    part: Any = nn.Linear(columns, 37)
    del part.weight
    part.weight_packed = nn.Parameter(helpers.pack_to_int32(made.whole, bits), requires_grad=False)
    part.register_buffer("weight_scale", made.scale)
    part.register_buffer("like", torch.empty(0), persistent=False)
    part.bits, part.sizes, part.__class__ = bits, (37, columns), PackedLinear
    return part, made


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_are_those_that_were_packed(bits: int) -> None:
    for columns, groups in SIZES:
        part, made = matrix(columns, groups, bits)
        assert torch.equal(unpacked(part.weight_packed, bits, columns), made.whole)
        assert torch.equal(part.weight, made.dense())


@needs_compiler
@pytest.mark.parametrize("bits", WIDTHS[1:])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_in_c_are_those_of_torch(bits: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # as many compute in C
    for columns, groups in SIZES:
        part, made = matrix(columns, groups, bits)
        fast = copy.deepcopy(part)
        packed.attach(nn.Sequential(fast))
        with torch.no_grad():
            assert torch.equal(fast.weight, made.dense()), "many rows are multiplied with these"
            for shape in ((columns,), (1, 1, columns), (3, 1, columns), (9, columns)):
                x = torch.randn(shape)
                torch.testing.assert_close(fast(x), part(x), rtol=1e-4, atol=1e-4 * columns)
                assert torch.equal(fast(x.bfloat16()), part(x.bfloat16())), "other precisions are torch's"
        assert fast(torch.randn(2, columns).requires_grad_()).requires_grad, "and so are gradients"


@needs_compiler
def test_few_rows_are_multiplied_with_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = matrix(64, 1, 4)
    packed.attach(nn.Sequential(part))
    with torch.no_grad():
        want = part(torch.ones(1, 64))
        part.weight_packed.zero_()  # every number is the lowest
        calls: list[int] = []
        library: Any = native_build.library()
        monkeypatch.setattr(packed, "library", lambda: _Counting(library, calls))
        got = part(torch.ones(1, 64))
    assert calls == [1] and not torch.equal(got, want)
    torch.testing.assert_close(got, part.weight_scale.float().mT * -8 * 64 + part.bias)


class _Counting:
    def __init__(self, library: ctypes.CDLL, calls: list[int]) -> None:
        self.library, self.calls = library, calls

    def headwise_packed(self, *given: Any) -> None:
        self.calls.append(int(given[3]))
        self.library.headwise_packed(*given)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_takes_no_more_memory_after_a_run_and_says_the_same(
    tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    packed_folder(folder, tied)
    how: dict[str, Any] = dict(trust_remote_code=True, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, **how)
    asked = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="quantization_config"):
        whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, **how)
    with torch.no_grad():
        before, want, got, after = held(model), whole(ROWS).logits, model(ROWS).logits, held(model)
    assert torch.equal(got, want) and model.dtype == dtype
    assert before == after < held(whole) / 2
    if dtype == torch.bfloat16:
        stored = {x.data_ptr(): x.nbytes for x in model.state_dict().values()}
        assert sum(stored.values()) == stored_bytes(folder), "memory is what the file takes"
    kinds = {type(module) for module in model.modules()}
    assert {PackedLinear.__name__, PackedEmbedding.__name__} <= {kind.__name__ for kind in kinds}
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", **how)
    with torch.no_grad():
        for same in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(same(ROWS).logits, want) and held(same) == after
    assert torch.equal(model.generate(ROWS, max_new_tokens=3), whole.generate(ROWS, max_new_tokens=3))


def test_load_keeps_weights_packed_where_that_is_asked_for_or_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    packed_folder(folder, True)
    plain, kept = headwise.load(folder), headwise.load(folder, packed=True)
    fast = headwise.load(folder, packed=True, optimise=True)
    usual = held(headwise.load(folder, optimise=True))
    assert usual == held(kept if native_build.runs() else plain), "what is fastest here"
    monkeypatch.setattr(native_build, "runs", lambda: False)
    assert held(headwise.load(folder, optimise=True)) == held(plain) != held(kept)
    with torch.no_grad():
        want = plain(ROWS).logits
        assert torch.equal(kept(ROWS).logits, want) and held(kept) < held(plain) / 3
        torch.testing.assert_close(fast(ROWS).logits, want, rtol=1e-4, atol=1e-4)
        texts = [model.generate(ROWS[:1], max_new_tokens=5) for model in (plain, kept, fast)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]) and held(fast) == held(kept)


@pytest.mark.parametrize("part", ["weight_shape", "weight_packed", "weight_scale"])
def test_parts_that_do_not_fit_together_are_refused(part: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    packed_folder(folder, False)
    found = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    found[name] = found[name] * 2 if part == "weight_shape" else found[name][:, :-1].contiguous()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    for packed_too in (False, True):
        with pytest.raises(HeadwiseError, match="model.layers.1.mlp.up_proj does not have the sizes"):
            headwise.load(folder, packed=packed_too)


def test_an_adapter_on_packed_weights_learns(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "model"
    packed_folder(folder, False)
    model = peft.get_peft_model(headwise.load(folder, packed=True), peft.LoraConfig(r=2))
    model(ROWS, labels=ROWS).loss.backward()
    found = [x.grad for x in model.parameters() if x.requires_grad]
    assert found and all(grad is not None and torch.isfinite(grad).all() for grad in found)
    with pytest.raises(RuntimeError, match=r"no adapter can be merged into them; load the model with"):
        model.merge_and_unload()  # which writes into weights: they would stay as they are
