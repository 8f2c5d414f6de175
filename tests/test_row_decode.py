"""Decode of shared rows without a device: Triton's interpreter runs the kernels on a CPU, where Triton is installed.

Kernels are made when their module is imported, so this happens in a process of its own: this file, run as a script.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headwise.fast.row_packing import Packing, fields, packing, repacked
from headwise.runtime.cache_headwise import RowCoder

TEXTS, PLACES = 2, 256
ENDS, STARTS = (150, 67), (0, 5)
CODES = (
    {"8": 16, "6": 10, "5": 20, "3": 40, "2": 30, "1": 24},
    {"7": 5, "4": 60, "3": 10, "2": 64},
    {"4": 64},
    {"5": 3, "1": 2},
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_agree_with_plain_attention():
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def coder_of(counts: dict[str, int]) -> RowCoder:
    return RowCoder(dict(counts), sum(counts.values()) if isinstance(counts, dict) else sum(n for _, n in counts))


@pytest.mark.parametrize("counts", CODES)
def test_every_coefficient_has_a_field_that_holds_its_code(counts):
    packed = Packing(coder_of(counts))
    held = {}
    for column in packed.columns:
        for word, one in enumerate(column.coefficients):
            if one >= 0:
                assert packed.bits[one] <= column.field.bits and one not in held
                held[one] = (column.block, word, column.field.start)
    assert len(held) == packed.size == len(set(held.values()))
    assert all(sum(field.bits for field in block.fields) <= 16 for block in packed.blocks)


def test_a_realistic_row_is_not_much_larger_than_that_of_the_coder():
    for counts in ({"8": 128, "4": 512, "2": 384}, {"8": 64, "6": 128, "4": 192, "3": 192, "2": 128}):
        packed = packing(tuple(counts.items()))
        assert packed.bytes <= 1.025 * packed.coder.bytes
        assert packed is packing(tuple(counts.items())), "found once"


@pytest.mark.parametrize("widths", [(8, 8), (7, 7, 2), (6, 6, 4), (5, 5, 5, 1), (4, 4, 4, 4), (2,) * 8, (1,) * 16])
def test_a_masked_word_is_its_code_as_a_tiny_number(widths):
    words = np.arange(1 << 16, dtype=np.uint16)
    for field in fields(widths):
        code = (words >> field.start) & ((1 << field.bits) - 1)
        number = ((words >> field.shift) & field.mask).astype(np.uint16).view(np.float16)
        assert np.array_equal(number.astype(np.float64), code * 2.0 ** (field.place - 24))


@pytest.mark.parametrize("counts", CODES)
def test_packed_rows_say_what_the_coder_says(counts):
    coder = coder_of(counts)
    packed, x = Packing(coder), torch.randn(2, 1, 64, coder.size, generator=torch.Generator().manual_seed(0))
    rows = coder.encode(x)
    words, scales = repacked(packed, rows)
    assert torch.equal(read(packed, words, scales), coder.decode(rows, torch.float32))


def read(packed: Packing, words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed rows as numbers, the plain way."""
    found = torch.zeros(*words.shape[:-1], packed.size)
    for column in packed.columns:
        block, field = packed.blocks[column.block], column.field
        for word, one in enumerate(column.coefficients):
            if one >= 0:
                code = (words[..., block.offset + word].int() >> field.start) & ((1 << field.bits) - 1)
                byte = scales[..., packed.group(one), :].flatten(-2).float()
                value = (code - packed.raised(one, field) + 0.5) * (2.0 / (1 << packed.bits[one])) - 1
                span = packed.step(one) * (1 << packed.bits[one]) / 2
                found[..., one] = value * span * torch.exp2((byte - 128) / 8)
    return found


def plain(q, k, v, scaling, softcap=None, window=None):
    """Softmax attention in double precision, text by text."""
    out = []
    for text, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        seen = slice(max(start, end - (window or end)), end)
        share = q.shape[1] // k.shape[1]
        keys, values = (x[text, :, seen].repeat_interleave(share, 0).double() for x in (k, v))
        scores = (q[text].double().unsqueeze(1) @ keys.transpose(1, 2)) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out.append((scores.softmax(-1) @ values)[:, 0])
    return torch.stack(out)


KINDS = ({}, {"window": 19}, {"softcap": 5.0})


def check_whole_rows(rows):
    """Rows of 16 bits (here 32), however the kernel is built; what nobody filled is not even read."""
    sizes = [(1, 6, 24, 40), (2, 8, 72, 16), (1, 40, 16, 8), (1, 4, 136, 120)]
    for number, (groups, heads, K, V) in enumerate(sizes):
        q, kv = torch.randn(TEXTS, heads, K), torch.randn(TEXTS, groups, PLACES, K + V)
        k, v, kind = kv[..., :K], kv[..., K:], KINDS[number % 3]
        want = plain(q, k, v, 0.2, **kind)
        for text, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
            kv[text, :, end:] = kv[text, :, :start] = float("nan")
        for tile in (rows.Tile(32, 4, 2, 1), rows.Tile(64, 4, 2, 1, swap=True)):
            got = rows.row_decode(q, k, v, *limits(), 0.2, tile=tile, **kind)
            close(got, want, 1e-5)


def limits():
    return torch.tensor(ENDS, dtype=torch.int32), torch.tensor(STARTS, dtype=torch.int32)


def close(got, want, limit):
    off = (got - want).abs().max().item()
    assert off < limit, off


def check_coded_rows(rows):
    """Codes from a RowCoder, and the same from our own writing of them; with and without whole tokens."""
    for number, (groups, heads) in enumerate(((1, 6), (2, 4))):
        coders = [coder_of(counts) for counts in CODES[number : number + 2]]
        packed = [Packing(coder) for coder in coders]
        given = [torch.randn(TEXTS, groups, PLACES, coder.size) for coder in coders]
        known = rows.coded_rows(*packed, TEXTS, groups, PLACES, "cpu")
        for at, (coder, x) in enumerate(zip(coders, given, strict=True)):
            words, scales = repacked(packed[at], coder.encode(x))
            room = known[2 + 2 * at : 4 + 2 * at]
            for places in (torch.tensor([60, 66, 3]), torch.tensor([PLACES - 1])):  # many tokens at first, then one
                rows.write_rows(packed[at], x[:, :, places], *room, places)
                written = room[1][:, :, places // 64, :, places % 64], scales[:, :, places // 64, :, places % 64]
                assert torch.equal(*written) and torch.equal(room[0][:, :, places], words[:, :, places])
            room[0].copy_(words), room[1].copy_(scales)
        read = [coder.decode(coder.encode(x), torch.float32) for coder, x in zip(coders, given, strict=True)]
        q = torch.randn(TEXTS, heads, coders[0].size)
        whole = newest_and_first(rows, given, read)
        for kind, tokens in ((KINDS[number], None), (KINDS[2 - number], whole)):
            keys, values = read if tokens is None else whole_in(given, read)
            want = plain(q, keys, values, 0.2, **kind)
            tile = rows.Tile(64, 4, 2, 1, columns=3)
            tiles = {"score_tile": tile._replace(places=128), "sum_tile": tile}
            close(rows.coded_decode(q, known, *limits(), 0.2, whole=tokens, **tiles, **kind), want, 1e-4)
        half = rows.coded_decode(q.half(), known, *limits(), 0.2, **tiles, **KINDS[number])
        close(half, plain(q, *read, 0.2, **KINDS[number]), 2e-2)


FIRST, NEWEST = 4, 8


def newest_and_first(rows, given, read):
    """The tokens that are also there whole, as a cache holds them."""
    both = torch.cat(given, -1)
    first = torch.stack([both[text, :, start : start + FIRST] for text, start in enumerate(STARTS)])
    newest = torch.empty_like(both[:, :, :NEWEST])
    for text, end in enumerate(ENDS):
        for place in range(end - NEWEST, end):
            newest[text, :, place % NEWEST] = both[text, :, place]
    return rows.Whole(first, newest)


def whole_in(given, read):
    """Coded numbers with those tokens as they were."""
    mixed = [x.clone() for x in read]
    for x, y in zip(mixed, given, strict=True):
        for text, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
            for seen in (slice(start, start + FIRST), slice(end - NEWEST, end)):
                x[text, :, seen] = y[text, :, seen]
    return mixed


def check_whole_tokens_beside_rows(rows):
    q, kv = torch.randn(TEXTS, 4, 24), torch.randn(TEXTS, 1, PLACES, 24 + 16)
    given = (kv[..., :24].clone(), kv[..., 24:].clone())
    whole = newest_and_first(rows, given, given)
    want = plain(q, *given, 0.3)
    for text, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        kv[text, :, : start + FIRST] = kv[text, :, end - NEWEST :] = float("nan")  # not read there
    got = rows.row_decode(q, kv[..., :24], kv[..., 24:], *limits(), 0.3, whole=whole, tile=rows.Tile(32, 4, 2, 1))
    close(got, want, 1e-5)


if __name__ == "__main__":
    from test_fast_kernel import as_numbers

    from headwise.fast import row_decode

    as_numbers()
    torch.manual_seed(0)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=4)
    check_whole_rows(row_decode)
    check_whole_tokens_beside_rows(row_decode)
    check_coded_rows(row_decode)
