"""The coder of cached rows: what a row takes, how far it errs, and that every token is coded by itself."""

from __future__ import annotations

import random

import pytest
import torch

from headwise.runtime import cache_headwise, coder_headwise
from headwise.runtime.coder_headwise import FEW_STEPS, RowCoder
from headwise.types import BITS, code_bytes, codes


def test_constants_are_those_that_costs_are_counted_with() -> None:
    assert cache_headwise.WHOLE == codes.WHOLE_TOKENS
    assert cache_headwise.NEAR == codes.NEAR_TOKENS
    assert coder_headwise.GROUP == codes.CODE_GROUP


def some_codes() -> list[dict[str, int]]:
    draw = random.Random(0)
    alone = [{str(bits): size} for bits in BITS for size in (1, 7, 64, 65)]
    mixed = [{str(b): draw.choice((1, 5, 8, 40)) for b in draw.sample(BITS, draw.randint(2, 8))} for _ in range(24)]
    return [*alone, *mixed]


@pytest.mark.parametrize("counts", some_codes(), ids=str)
def test_a_row_takes_the_counted_bytes_and_errs_by_half_a_step_at_most(counts: dict[str, int]) -> None:
    code = tuple(counts.get(str(bits), 0) for bits in BITS)
    coder = RowCoder(counts, sum(code))
    spread = torch.logspace(-3, 3, 11)[None, None, :, None]
    x = spread * torch.randn(2, 3, 11, sum(code), generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 0.0
    rows = coder.encode(x)
    assert rows.dtype == torch.uint8 and rows.shape == (2, 3, 11, coder.bytes)
    assert coder.bytes == code_bytes(code, sum(code)) - codes.beside_bytes(code, sum(code))
    found = coder.decode(rows, x.dtype)
    bits = torch.tensor([b for b, count in zip(BITS, code, strict=True) for _ in range(count)])
    half = 1 - torch.where(bits <= 2, FEW_STEPS, 1.0) * (1 - 0.5**bits)  # few steps do not reach the largest numbers
    for group in torch.arange(sum(code)).split(-(-sum(code) // coder.groups)):
        most = x[..., group].abs().amax(-1, keepdim=True).clamp_min(2.0**-15) * 2 ** (1 / coder_headwise.OCTAVE)
        assert ((found - x)[..., group].abs() <= most * half[group] * (1 + 1e-4)).all()


def test_what_becomes_of_a_token_does_not_depend_on_others() -> None:
    coder = RowCoder({"7": 20, "3": 70, "1": 9}, 104)
    x = torch.randn(2, 2, 6, 99, generator=torch.Generator().manual_seed(0))
    x[1, :, 2] *= 1e4
    rows = coder.encode(x)
    for text in range(2):
        for token in range(6):
            alone = x[text : text + 1, :, token : token + 1]
            assert torch.equal(coder.encode(alone)[0, :, 0], rows[text, :, token])
    one, all_of_them = coder.decode(rows[1:, :, 2:3], x.dtype), coder.decode(rows, x.dtype)
    assert torch.allclose(one[0, :, 0], all_of_them[1, :, 2])


@pytest.mark.parametrize("counts, size", (({"12": 30, "9": 50, "8": 40, "5": 9, "3": 64}, 200), ({"2": 7, "1": 6}, 16)))
def test_products_with_bytes_are_those_with_what_the_bytes_stand_for(counts: dict[str, int], size: int) -> None:
    coder, draw = RowCoder(counts, size), torch.Generator().manual_seed(0)
    rows = coder.encode(torch.randn(2, 3, 11, size, generator=draw))
    found = coder.decode(rows, torch.float64)
    q, weights = (torch.randn(2, 3, 4, n, generator=draw, dtype=torch.float64) for n in (size, 11))
    assert torch.allclose(coder.scores(q, rows), q @ found.mT, atol=1e-4)
    assert torch.allclose(coder.mixed(weights, rows), weights @ found, atol=1e-4)


def test_coders_side_by_side_code_as_each_alone_and_say_what_their_bytes_stand_for() -> None:
    keys, values = RowCoder({"7": 20, "3": 70, "1": 9}, 104), RowCoder({"10": 33}, 33)
    x = torch.randn(2, 2, 300, 137, generator=torch.Generator().manual_seed(0))
    rows, numbers = keys.beside(values).encode(x)
    apart = ((keys, x[..., :104]), (values, x[..., 104:]), (keys.fine, x[..., :104]), (values.fine, x[..., 104:]))
    for (coder, own), row, number in zip(apart, rows, numbers, strict=True):
        assert torch.equal(row, coder.encode(own))
        assert torch.equal(number, coder.decode(row, x.dtype)) and torch.equal(number, coder.rounded(own))


def test_no_outlier_is_cut_off_and_halves_are_coded_as_floats() -> None:
    coder, x = RowCoder({"8": 8}, 8), torch.tensor([1.0, -2.0, 3e4, 0.5, 7.0, -9.0, 2.0, 0.0])
    assert abs(float(coder.rounded(x)[2]) / 3e4 - 1) < 0.01
    small = torch.randn(40, 8)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = coder.rounded(small.to(dtype))
        assert found.dtype == dtype and torch.allclose(found.float(), small, atol=0.05)
