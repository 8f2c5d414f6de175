"""Fast inference on CUDA: every path agrees with plain attention, and replayed steps write the ordinary text."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from functools import partial

import coded_models
import pytest
import torch
from test_fast import DECODERS, prepared, prompts
from test_packed import held, matrix
from test_pooled import cut_of, pooled_of
from test_weights import ROWS, packed_folder

import headwise
from headwise.fast import packed_cuda, paths
from headwise.fast.model import optimise
from headwise.fast.paths import TILES, Seen, decode_paths, eager, prefill_paths, side_by_side

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_table"),
]
SIZES = [(128, 128), (96, 96), (80, 80), (72, 72), (64, 64), (56, 56), (48, 48), (40, 40), (16, 16), (8, 8)]
SIZES += [(64, 128), (128, 64), (96, 48), (48, 96), (56, 72), (56, 64), (120, 112), (50, 62), (36, 36), (256, 256)]
OFF = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 4e-2}


def drawn(rows, heads, groups, tokens, places, qk_dim, v_dim, dtype):
    """Queries, and keys and values side by side as in a cache."""
    torch.manual_seed(0)
    made = partial(torch.randn, device="cuda", dtype=dtype)
    return made(rows, heads, tokens, qk_dim), *side_by_side(made, rows, groups, places, qk_dim, v_dim)


def agrees(path, q, k, v, seen):
    """A refusal is fine, a wrong answer is not."""
    try:
        z = path(q, k, v, seen)
    except RuntimeError as error:
        pytest.skip(f"does not do this: {str(error)[:80]}")
    expected = eager(q.float(), k.float(), v.float(), replace(seen, masks={}))
    assert (z.float() - expected).abs().max() < OFF[q.dtype]


CASES = [(*size, torch.bfloat16, "padded") for size in SIZES]
CASES += [(64, 48, torch.bfloat16, kind) for kind in ("plain", "window", "capped")]
CASES += [(*size, dtype, "window") for size in ((72, 72), (64, 128)) for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize(("qk_dim", "v_dim", "dtype", "kind"), CASES, ids=str)
def test_our_kernel_reads_what_each_row_has(qk_dim, v_dim, dtype, kind):
    from triton.runtime.errors import OutOfResources

    q, k, v = drawn(3, 8, 2, 1, 778, qk_dim, v_dim, dtype)
    ends = torch.tensor([777, 501, 1], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 131 if kind == "padded" else 0, 0], dtype=torch.int32, device="cuda")
    window, cap = 99 if kind == "window" else None, 5.0 if kind == "capped" else None
    expected = []
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        start = start if window is None else max(start, end - window)
        here = [x[row : row + 1].float() for x in (q, k[:, :, start:end], v[:, :, start:end])]
        length = torch.tensor([end - start], device="cuda")
        expected.append(eager(*here, Seen(length, length * 0, end - start, scaling=qk_dim**-0.5, softcap=cap)))
    for x in (k, v):
        x[1, :, 501:] = float("nan")  # what nobody filled is never read
    seen = Seen(ends, starts, window=window, scaling=qk_dim**-0.5, softcap=cap)
    every, fitting = decode_paths(q.device, qk_dim, v_dim), 0
    for name in TILES:
        try:
            z = every[name](q, k, v, seen)
        except OutOfResources:  # rows too wide for so many places at a time
            continue
        fitting += 1
        assert (z.float() - torch.cat(expected)).abs().max() < OFF[dtype], name
    assert fitting


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 7), (24, 1), (14, 2)], ids=str)
def test_our_kernel_takes_any_sharing(heads):
    q, k, v = drawn(2, *heads, 1, 1024, 64, 48, torch.bfloat16)
    ends = torch.tensor([1000, 3], dtype=torch.int32, device="cuda")
    agrees(decode_paths(q.device, 64, 48)["split"], q, k, v, Seen(ends, ends * 0, scaling=0.125))


def test_our_kernel_refuses_what_does_not_lie_side_by_side():
    q, k, v = drawn(1, 4, 2, 1, 64, 32, 32, torch.bfloat16)
    ends = torch.full((1,), 64, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="must lie side by side"):
        decode_paths(q.device, 32, 32)["split"](q, k.contiguous(), v.contiguous(), Seen(ends, ends * 0))


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), SIZES)
def test_fused_decode(name, qk_dim, v_dim):
    q, k, v = drawn(3, 8, 2, 1, 512, qk_dim, v_dim, torch.bfloat16)
    ends = torch.tensor([512, 500, 9], dtype=torch.int32, device="cuda")
    agrees(decode_paths(q.device, qk_dim, v_dim)[name], q, k, v, Seen(ends, ends // 4, scaling=qk_dim**-0.5))


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), SIZES)
def test_prefill(qk_dim, v_dim, padded):
    q, k, v = drawn(2, 8, 2, 256, 256, qk_dim, v_dim, torch.bfloat16)
    if not padded:
        k, v = k.contiguous(), v.contiguous()  # a whole prompt reads no cache
    ends = torch.full((2,), 256, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 31 if padded else 0], dtype=torch.int32, device="cuda")
    done = []
    for name, path in prefill_paths(q.device, qk_dim, v_dim).items():
        seen = Seen(ends, starts, 256, padded, scaling=qk_dim**-0.5)
        try:
            z = path(q, k, v, seen)
        except RuntimeError:
            continue
        expected = eager(q.float(), k.float(), v.float(), replace(seen, masks={}))
        assert (z.float() - expected).abs().max() < OFF[q.dtype], name
        done.append(name)
    assert len(done) > 1, "eager is not the only one"


@pytest.mark.parametrize("cutting", [False, True], ids=["uncut", "cut"])
@pytest.mark.parametrize(("name", "kind", "changes"), DECODERS)
def test_replayed_steps_write_the_same_text(name, kind, changes, cutting, monkeypatch):
    monkeypatch.setattr(paths, "TILES", {"split": paths.TILES["split"]})  # there are many sizes to build kernels for
    model, _ = prepared(name, kind, changes, cutting)
    ordinary, fast = model.cuda(), optimise(copy.deepcopy(model).cuda())
    for rows in (1, 3):  # products of one row have kernels of their own
        ids, mask = (x.cuda() for x in prompts(rows))
        how = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, attention_mask=mask)
        want = ordinary.generate(ids, **how)
        for _ in range(2):  # the second replays what the first has captured
            got = fast.generate(ids, **how)
            assert (got == want).float().mean() > 0.95, "the same but where two tokens are as likely"
    step = fast.headwise_fast.pool.captured
    assert step.graph is not None
    sampled = fast.generate(ids, max_new_tokens=5, do_sample=True, num_return_sequences=2, pad_token_id=0)
    assert len(sampled) == 2 * len(ids)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("coded", [False, True], ids=["pooled", "coded"])
@pytest.mark.filterwarnings("ignore:the fast cache takes")  # of tiny models
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_on_rows_that_heads_share_say_what_ordinary_ones_do(kind, coded, rows):
    if coded:
        whole = (("use_sliding_window", False),) if kind == "qwen3" else ()  # kernels for rows in bits know no window
        family, _, _, model = coded_models.made(kind, 2, changes=whole)
        model = copy.deepcopy(model).float()
        for block in family.blocks(model):
            block.attention.k_gain_GK.mul_(2.0), block.attention.v_gain_GV.mul_(0.5)
    else:
        family, _, pooled = pooled_of(kind)
        model = cut_of(family, pooled, 24, 24)
    model = model.cuda()
    fast, ids = optimise(copy.deepcopy(model)), coded_models.drawn(rows, 80).cuda()
    cache = fast.headwise_fast.new_cache(96)
    with torch.no_grad():
        want = model(ids, use_cache=True, past_key_values=coded_models.fresh(model)).logits
        found = [fast(ids[:, :60], past_key_values=cache, use_cache=True).logits]
        found += [fast(ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(60, 80)]
    assert cache.captured.graph is not None
    assert (torch.cat(found, 1) - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3"])
@pytest.mark.parametrize("dtype", OFF, ids=str)
def test_small_kernels_round_as_the_models_do(kind, dtype):
    from headwise.fast.fused import _norm_kind
    from headwise.fast.small import rms_norm, silu_gate

    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    norm = next(getattr(module, name) for name in dir(module) if name.endswith("RMSNorm"))(72).to("cuda", dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 3, 72, device="cuda").to(dtype)
    close = dict(rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert torch.allclose(rms_norm(x, norm.weight, *_norm_kind(norm)), norm(x), **close)
    gate, up = x.chunk(2, -1)
    assert torch.allclose(silu_gate(x), torch.nn.functional.silu(gate) * up, **close)


def test_a_text_after_a_longer_one_replays_the_same_step():
    model, _ = prepared("llama", "llama", {}, True)
    fast = optimise(copy.deepcopy(model).cuda())
    model = model.cuda()
    for rows, tokens in ((2, 30), (2, 12), (2, 25)):
        ids, mask = (x.cuda() for x in prompts(rows, tokens))
        how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, attention_mask=mask)
        assert (fast.generate(ids, **how) == model.generate(ids, **how)).float().mean() > 0.95
        step = fast.headwise_fast.pool.captured
        assert step.graph is not None and step is getattr(fast, "first_step", step)
        fast.first_step = step


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", OFF, ids=str)
def test_products_with_few_bits_are_those_with_the_unpacked_matrix(bits, dtype):
    for columns, groups in ((20, 1), (96, 6), (172, 1), (2048, 32), (2304, 36)):
        part = matrix(columns, groups, bits)[0].to("cuda")
        part.like = part.like.to(dtype)
        part.bias.data = part.bias.data.to(dtype)
        ours = copy.deepcopy(part)
        ours.__class__ = packed_cuda._kind(type(part))
        with torch.no_grad():
            assert torch.allclose(ours.weight, part.weight, rtol=0, atol=1e-5)  # scales may be tiny for float16
            for rows in (1, 2, 5, 16, 40):
                x = torch.randn(rows, columns, device="cuda").to(dtype)
                want = torch.nn.functional.linear(x.double(), part.weight.double(), part.bias.double())
                assert (ours(x) - want).norm() < OFF[dtype] * want.norm(), (columns, rows)


@pytest.mark.parametrize("widths", [(8, 6, 5, 4, 3, 2, 8), (4,) * 7, (3,) + (16,) * 6], ids=["mixed", "same", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_models_write_the_same_text_and_stay_small(widths, dtype, tmp_path):
    packed_folder(tmp_path / "model", True, widths)
    plain = headwise.load(tmp_path / "model", "cuda", packed=True, dtype=dtype)
    fast = headwise.load(tmp_path / "model", "cuda", packed=True, optimise=True, dtype=dtype)
    plain.generation_config.eos_token_id = fast.generation_config.eos_token_id = None
    size = held(fast)
    for rows in (1, 3):
        ids = ROWS[:rows, :12].cuda()
        how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
        want, got = (model.generate(ids, **how) for model in (plain, fast))
        if dtype == torch.float32:
            assert (got == want).float().mean() > 0.95, "the same but where two tokens are as likely"
        cache = fast.headwise_fast.new_cache(16)
        with torch.no_grad():
            fast(ids[:, :11], past_key_values=cache, use_cache=True)
            found, wanted = fast(ids[:, 11:], past_key_values=cache, use_cache=True).logits, plain(ids).logits[:, -1:]
        assert cache.captured.graph is not None
        assert (found - wanted).norm() < OFF[dtype] * wanted.norm()
    assert held(fast) == size < 1.05 * held(plain), "nothing stays unpacked"
