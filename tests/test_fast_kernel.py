"""Our kernels without a device: Triton's interpreter runs them on a CPU, where Triton is installed.

Kernels are made when their module is imported, so this happens in a process of its own: this file, run as a script.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_agree_with_plain_code():
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def check_decode():
    """All that is seen and nothing else, however the kernel is built; what nobody filled is not even read."""
    from headwise.fast.flash_decode import Tile, flash_decode

    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=4)
    sizes = [(56, 72), (72, 72), (64, 64), (48, 24), (50, 62), (6, 9), (120, 120)]
    tiles = [Tile(), Tile(places=32, cut=False), Tile(places=128, programs=2)]
    kinds = [{}, {"window": 19}, {"cap": 5.0}, {"start": 31}]
    for at, ((qk_dim, v_dim), tile) in enumerate(product(sizes, tiles)):
        agrees(flash_decode, (1, 2, 4, 5, 8)[at % 5], qk_dim, v_dim, tile, **kinds[(at + at // 3) % 4])


def check_rows():
    """The same for wide rows of pooled heads; more than 32 query heads take several programs."""
    from headwise.fast.flash_decode import Tile
    from headwise.fast.row_decode import row_decode

    tiles = [Tile(places=32, programs=4), Tile(places=16, cut=False, programs=1)]
    agrees(row_decode, 5, 136, 120, tiles[0])
    agrees(row_decode, 40, 48, 200, tiles[1], window=19)
    agrees(row_decode, 8, 264, 72, tiles[0], cap=5.0, start=31)


def check_codes():
    """New rows in bits lie where they should, and rows in bits are read as what they stand for."""
    import code_reference as plain

    from headwise.fast import code_beside
    from headwise.fast.code_beside import CodeDecode
    from headwise.fast.code_decode import CodeTile
    from headwise.fast.code_layout import CodeLayout
    from headwise.fast.coded import CodedSide
    from headwise.runtime.coder_headwise import RowCoder

    torch.manual_seed(0)
    both = ({"12": 3, "9": 2, "8": 5, "7": 2, "6": 9, "3": 9, "2": 2, "1": 1}, 33), ({"5": 9, "4": 30, "2": 40}, 96)
    layouts, starts = [CodeLayout(RowCoder(*one)) for one in both], torch.tensor([0, 3], dtype=torch.int32)
    ends, sides = torch.tensor([125, 125], dtype=torch.int32), []
    for keys, layout in zip((True, False), layouts, strict=True):
        x = torch.randn(2, 1, 3, layout.size)
        made, want = (CodedSide(layout, keys, 2, 1, 128, x) for _ in range(2))
        made.write(x[:, :, :2], starts, 2)
        made.write(x[:, :, 2:], starts, torch.tensor([4]))
        plain.place_codes(layout, want, x, starts, 2, keys)
        for got, wanted in zip(made.buffers(), want.buffers(), strict=True):
            assert torch.allclose(got.float(), wanted.float(), atol=1e-6, rtol=1e-6)
        made.words.random_(-(2**15), 2**15), made.side.normal_(), made.scales.view(torch.float16).uniform_(2, 16)
        sides.append(made)
    few = CodeTile(places=64, programs=2, sum_programs=1)  # one program sums what several scored
    more = CodeTile(fields=8, held=False)
    for tile, size, heads, outputs in ((few, 1, 3, 2048), (few, 40, 3, 2048), (more, 1, 35, 1)):
        code_beside.FEW = outputs
        q = size * torch.randn(2, heads, 33)
        want = plain.CodeDecode()(q, *sides, ends, starts, 0.1)
        got = CodeDecode(*layouts, 4, 32, tile)(q, *sides, ends, starts, 0.1)
        assert (got - want).norm() < 2e-3 * want.norm(), (tile, size, heads)


def check_ahead():
    """Kernels with products under way give the same numbers, whether copies arrive late or at once."""
    import code_reference as plain
    import gluon_plain

    with gluon_plain.standing_in():
        from headwise.fast import code_ahead, code_beside, code_decode
    from headwise.fast.code_layout import CodeLayout
    from headwise.fast.coded import CodedSide
    from headwise.runtime.coder_headwise import RowCoder

    code_ahead._scaled = lambda words, scale, kind: code_decode._scaled(words, scale, kind, False)
    code_beside._ahead = lambda device, layout: code_ahead
    torch.manual_seed(0)
    ends, starts = torch.tensor([509, 509], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)
    for parts, rings in (({"8": 128, "4": 256, "3": 60, "2": 68}, (2, 3)), ({"8": 70, "2": 130}, (2, 4))):
        layout, sides = CodeLayout(RowCoder(parts, 512)), []
        assert layout.segment == code_ahead.SEGMENT
        for keys in (True, False):
            side = CodedSide(layout, keys, 2, 1, 512, torch.randn(1))
            side.words.random_(-(2**15), 2**15), side.side.normal_()
            side.scales.view(torch.float16).uniform_(2, 16)
            sides.append(side)
        q = torch.randn(2, 20, 512)
        want = plain.CodeDecode()(q, *sides, ends, starts, 0.1)
        for ring, late, depth in zip(rings, (True, False), (2, 3), strict=True):
            gluon_plain.LATE[0] = late
            tile = code_decode.CodeTile(places=64 * (depth - 1), ahead=ring, sum_ahead=depth, fields=3, sum_programs=8)
            got = code_beside.CodeDecode(layout, layout, 4, 32, tile)(q, *sides, ends, starts, 0.1)
            assert (got - want).norm() < 2e-3 * want.norm(), (parts, tile)


def check_thin():
    """A product of one row with a norm before it, a gate, a bias and a sum, each with and without, at any width."""
    from headwise.fast.fused import Before
    from headwise.fast.thin import thin

    torch.manual_seed(0)
    for (K, N), normed, gated, added in product(((96, 41), (2200, 50)), *[(False, True)] * 3):
        x, weight, gain = torch.randn(1, 1, K), torch.randn(2 * N if gated else N, K) * K**-0.5, torch.rand(K)
        bias, add = None if gated else torch.randn(N), torch.randn(1, 1, N) if added else None
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain if normed else x
        want = torch.nn.functional.linear(h, weight, bias)
        want = torch.nn.functional.silu(want[..., :N]) * want[..., N:] if gated else want
        want = want if add is None else add + want
        got = thin(x, weight, bias, before=Before(gain, 1e-5, False) if normed else None, gated=gated, add=add)
        assert torch.allclose(got, want, atol=1e-5), (K, N, normed, gated, added)


def check_heads_of_row():
    """The heads of a single text in one kernel are what a product and the kernel for several texts give."""
    from headwise.fast.fused import Before
    from headwise.fast.small import place_heads
    from headwise.fast.thin import heads_of_row, thin

    torch.manual_seed(0)
    H, G, W, V, L, place = 6, 2, 12, 10, 8, torch.tensor([5])
    x, gain = torch.randn(1, 1, 48), torch.rand(48)
    weight, bias = torch.randn((H + G) * W + G * V, 48), torch.randn((H + G) * W + G * V)
    before, cos, sin = Before(gain, 1e-5, False), torch.randn(1, 1, 20), torch.randn(1, 1, 20)
    pairs = torch.randint(20, (G, W // 2))
    for turned, kept, own, aside in (
        (W, None, bias, False),
        (8, None, None, True),
        (0, None, None, False),
        (W, pairs, bias, True),
    ):
        want, found = ((torch.zeros(1, G, 1 if aside else L, W), torch.zeros(1, G, L, V)) for _ in range(2))
        here = cos, sin, kept, turned
        q = heads_of_row(x, weight, own, before, here, *found, place, aside, H)
        qkv = thin(x, weight, own, before=before)
        right = place_heads(qkv, cos, sin, kept, None, *want, place, 0.0, False, turned, aside, H, W)
        assert torch.allclose(q, right, atol=1e-5), (turned, aside)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, want, strict=True)), (turned, aside)


def check_projections():
    """One token's queries and keys as rows have them, and what heads read of rows, as plain products give them."""
    from headwise.fast.project import from_rows, to_rows

    torch.manual_seed(0)
    for B, G, pooled, share, W, K, V, centred in (
        (1, 1, 4, 2, 24, 40, 72, True),
        (3, 2, 2, 3, 16, 136, 24, False),
        (70, 2, 1, 1, 16, 8, 8, True),
    ):
        N = G * pooled
        q, k, down = torch.randn(B, N * share, 1, W), torch.randn(B, N, 1, W), torch.randn(2, G, pooled * W, K)
        mean, gain = torch.randn(G, K) if centred else None, 2.0 ** torch.randint(-2, 3, (G, K)) if centred else None
        want_q = torch.einsum("bnsw,nwk->bnsk", q.view(B, N, share, W), down[0].view(N, W, K)).reshape(
            B, N * share, 1, K
        )
        want_k = torch.einsum("bgw,gwk->bgk", k.view(B, G, pooled * W), down[1])
        if centred:
            want_q = want_q / gain.repeat_interleave(pooled * share, 0).unsqueeze(1)
            want_k = (want_k - mean) * gain
        buffer, place = torch.zeros(B, G, 8, K), torch.tensor([5])
        for keys in (None, buffer):
            got_q, got_k = to_rows(q, k, tuple(down), mean, gain, keys, place)
            assert torch.allclose(got_q, want_q, atol=1e-4)
            assert torch.allclose(got_k[:, :, 0 if keys is None else 5], want_k, atol=1e-4)
        assert buffer.count_nonzero() == B * G * K
        z, up = torch.randn(B, 1, N * share, V), torch.randn(N, V, 20)
        by = (
            torch.ones(N, 1)
            if gain is None
            else (gain := 2.0 ** torch.randint(-2, 3, (G, V))).repeat_interleave(pooled, 0)
        )
        want = torch.einsum("bnsv,nvo->bnso", z.view(B, N, share, V) / by.unsqueeze(1), up).reshape(B, 1, -1)
        assert torch.allclose(from_rows(z, up, gain), want, atol=1e-4)


def check_likeliest():
    """The first of the largest logits, as many as there are."""
    from headwise.fast.small import likeliest

    for width in (33, 2048, 5000):
        logits = torch.randn(3, width).mul(4).round()  # several are equal
        want = [(row == row.max()).nonzero()[0, 0] for row in logits]
        assert likeliest(logits)[:, 0].tolist() == want
        assert 0 <= likeliest(logits * float("nan")).max() < width, "a token that exists"


def check_other_ways():
    """Where the fastest kernels do not work, others are taken: on first use, and for a later layer of the same size."""
    from headwise.fast import code_beside
    from headwise.fast.code_decode import AHEAD, PLAIN, SMALL

    def works_with(*tiles, wrong=()):
        def work(tile):
            if tile not in tiles:
                raise SyntaxError("not in this version")
            return torch.tensor([3.0 if tile in wrong else 2.0])

        return work

    code_beside._ms = lambda work, tile: 1 if tile == AHEAD else 2
    torch.cuda.is_current_stream_capturing = lambda: False
    key = (1, torch.device("cuda"))
    failures = {}
    assert code_beside._quickest(works_with(AHEAD, PLAIN), key, failures) == AHEAD
    assert code_beside._quickest(works_with(), key, failures) == AHEAD, "what was built is not tried again"
    assert code_beside._quickest(works_with(PLAIN), key, {}) == PLAIN
    assert code_beside._quickest(works_with(SMALL[1]), key, {}) == SMALL[1]
    assert code_beside._quickest(works_with(PLAIN), (2, torch.device("cuda")), {}) == PLAIN
    wrong = works_with(AHEAD, PLAIN, wrong=(AHEAD,))
    assert code_beside._quickest(wrong, (3, torch.device("cuda")), {}) == PLAIN, "fast and wrong is not taken"
    with pytest.raises(RuntimeError, match="without optimise=True.*SyntaxError: not in this version"):
        code_beside._quickest(works_with(), key, {})


def check_other_versions():
    """Kernels in Gluon are not asked for where the device is another, or where Triton has none that fits."""
    from headwise.fast import code_beside

    for index, capability in enumerate((8, 9, 10)):
        torch.cuda.get_device_capability = lambda device, found=capability: (found, 0)
        sys.modules["headwise.fast.code_ahead"] = None  # importing it fails
        assert code_beside._gluon(torch.device("cuda", index)) is None
    del sys.modules["headwise.fast.code_ahead"]


def check_packed():
    """Products with few bits are those with the unpacked matrix, of any bits, groups, columns and count of rows."""
    from test_packed import matrix

    from headwise.fast.joined import FEW
    from headwise.fast.packed_cuts import cut_of, layout_of
    from headwise.fast.packed_rows import few_times, unpacked_rows

    one = [(1, torch.float32), (1, torch.float16), (1, torch.bfloat16)]
    more = [(3, torch.float16), (FEW, torch.float16)]
    sizes = [((columns, groups), one + more) for columns, groups in ((20, 1), (96, 6), (172, 1))]
    sizes += [((2048, 32), [one[1], one[2], more[1]]), ((2304, 36), [one[1], more[0]])]  # whole blocks, and not
    sizes += [((2048, 1), [one[1], more[0]])]  # one scale for whole blocks
    off = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
    for bits, (size, kinds) in product((2, 3, 4, 5, 6, 8), sizes):
        part, made = matrix(*size, bits)
        words, scale, dense = part.weight_packed.detach()[:9], part.weight_scale[:9], made.dense()[:9]
        assert torch.equal(unpacked_rows(words, scale, bits, size[0], torch.float32), dense)
        for (rows, dtype), bias in zip(kinds, (None, part.bias.detach()[:9]) * 3, strict=False):
            cut = cut_of(layout_of(bits, *size), rows, len(words), size[0], dtype == torch.float32)
            if cut.S and dtype == torch.bfloat16:
                continue  # the interpreter cannot compute these
            x, bias = torch.randn(rows, size[0]).to(dtype), bias if bias is None else bias.to(dtype)
            want = torch.nn.functional.linear(x.float(), dense, bias if bias is None else bias.float())
            got = few_times(x, words, scale, bits, bias)
            assert got.dtype == dtype and (got - want).norm() < off[dtype] * want.norm(), (bits, size, rows, dtype)


def check_packed_steps():
    """Decode steps of models with packed weights, joined or not, say what their ordinary code does."""
    from test_weights import packed_folder

    kinds = {"mixed": ((8, 6, 5, 4, 3, 2, 8), (3,)), "same": ((4,) * 7, (1, 3)), "one": ((3,) + (16,) * 6, (1,))}
    with tempfile.TemporaryDirectory() as folder:
        for name, (widths, texts) in kinds.items():
            packed_folder(Path(folder, name), True, widths)
            check_packed_step(Path(folder, name), name == "same", texts)
        check_wrong_packed(Path(folder, "same"))


def check_packed_step(folder, joins, texts):
    import headwise
    from headwise.fast import packed_cuda
    from headwise.fast.joined import PackedJoint
    from headwise.fast.model import decode_step

    plain, is_cuda = headwise.load(folder, packed=True), torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(lambda self: True)  # for all that asks where to compute
    try:
        fast = headwise.load(folder, packed=True, optimise=True)
        assert type(fast.lm_head) is packed_cuda._kind(type(plain.lm_head))
        layer = fast.model.layers[0]
        assert layer.self_attn.apart and isinstance(getattr(layer.mlp, "joint", None), PackedJoint) == joins
        for rows in texts:
            ids, cache = torch.randint(3, 90, (rows, 9)), fast.headwise_fast.new_cache(32)
            with torch.no_grad():
                fast(ids[:, :8], past_key_values=cache, use_cache=True)
                step = decode_step(fast, cache)
                step.capture, fast.headwise_fast.switch.cache = False, cache
                step.set(ids[:, 8:], torch.full((rows, 1), 8))
                got, want = step.run(), plain(ids).logits[:, -1:]
            assert torch.allclose(got, want, atol=1e-4), (folder, rows, (got - want).abs().max())
    finally:
        torch.Tensor.is_cuda = is_cuda


def check_wrong_packed(folder):
    """Kernels that compute something else are told of, and not used."""
    import headwise
    from headwise.fast import packed_cuda, packed_rows
    from headwise.runtime.packed_headwise import PackedLinear

    model, right = headwise.load(folder, packed=True), packed_rows.few_times
    is_cuda = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(lambda self: True)
    packed_rows.few_times = lambda *given: 2 * right(*given)
    try:
        with warnings.catch_warnings(record=True) as told:
            packed_cuda.attach(model)
    finally:
        torch.Tensor.is_cuda, packed_rows.few_times = is_cuda, right
    assert any("plain code is used" in str(one.message) for one in told)
    assert type(model.model.layers[0].self_attn.q_proj) is PackedLinear


def nothing(*size):
    return torch.full(size, float("nan"))


def agrees(flash_decode, share, qk_dim, v_dim, tile, window=None, cap=None, start=0):
    from headwise.fast.paths import Seen, eager, side_by_side

    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 2 * share, 1, qk_dim), side_by_side(nothing, 3, 2, 100, qk_dim, v_dim)
    k.normal_(), v.normal_()
    ends, starts = torch.tensor([100, 67, 1], dtype=torch.int32), torch.tensor([0, start, 0], dtype=torch.int32)
    want = []
    for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        seen = slice(max(first, end - (window or end)), end)
        length = torch.tensor([end - seen.start])
        here = (q[row : row + 1], k[row : row + 1, :, seen], v[row : row + 1, :, seen])
        want.append(eager(*here, Seen(length, length * 0, int(length), scaling=0.2, softcap=cap)))
        k[row, :, end:] = v[row, :, end:] = float("nan")
    got = flash_decode(q[:, :, 0], k, v, ends, starts, 0.2, cap, window, tile)
    off = (got[:, None] - torch.cat(want)).abs().max().item()
    assert off < 1e-5, (share, qk_dim, v_dim, tile, window, cap, start, off)


def check_heads():
    """Normed and turned heads go to their place beside values, and nowhere else; pooled ones have fewer values."""
    from headwise.fast.small import place_heads

    H, G, W, V, L = 6, 2, 12, 10, 8
    qkv, both = torch.randn(3, 1, (H + G) * W + G * V), torch.zeros(3, G, L, W + V)
    norms, place = torch.randn(2, W), torch.tensor([5])
    cos, sin = (torch.randn(3, 1, W // 2).repeat(1, 1, 2) for _ in range(2))
    keys, values = both[..., :W], both[..., W:]
    got = place_heads(qkv, cos, sin, None, norms, keys, values, place, 1e-6, False, W, False, H, W)
    x = qkv[..., : (H + G) * W].view(3, H + G, W)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norms.repeat_interleave(torch.tensor([H, G]), 0)
    x = x * cos + torch.cat((-x[..., W // 2 :], x[..., : W // 2]), -1) * sin
    want = torch.zeros_like(both)
    want[:, :, 5] = torch.cat((x[:, H:], qkv[:, 0, (H + G) * W :].view(3, G, V)), -1)
    assert torch.allclose(got[:, :, 0], x[:, :H], atol=1e-5) and torch.allclose(both, want, atol=1e-5)
    aside, row = torch.zeros(3, G, 1, W), torch.zeros(3, 1, L, G * V)
    place_heads(qkv, cos, sin, None, norms, aside, row, place, 1e-6, False, W, True, H, W)
    assert torch.allclose(aside[:, :, 0], x[:, H:], atol=1e-5)
    assert torch.equal(row[:, 0, 5], qkv[:, 0, (H + G) * W :]) and row.count_nonzero() == 3 * G * V


def as_numbers():
    """Loops over what a kernel has computed: numpy makes no number of an array with one entry any more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *given):
        patch(tensor, *given)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    as_numbers()
    check_decode()
    check_rows()
    check_codes()
    check_other_versions()
    check_ahead()
    check_other_ways()
    check_heads()
    check_thin()
    check_heads_of_row()
    check_projections()
    check_likeliest()
    if importlib.util.find_spec("compressed_tensors"):
        check_packed()
        check_packed_steps()
