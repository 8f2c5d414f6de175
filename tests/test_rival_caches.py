"""Rival caches: what they give back, the bytes they take, and the benchmark that compares them with ours."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from test_pipeline import folder  # noqa: F401
from transformers import DynamicCache

from headwise.checks._lengths import last_stream
from headwise.families import family_of_type
from headwise.runtime import cache_headwise
from headwise.runtime.cache_headwise import Rows
from headwise.strategies import exact
from headwise.types import LayerShape

ROOT = Path(__file__).parents[1]
LAYERS = (LayerShape(8, 2, 64, 64, 16, 64), LayerShape(4, 4, 48, 64, 16, 64))
NUMBERS = 2 * (64 + 64) + 4 * (48 + 64)  # of a token


def module(name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


caches = module("rival_caches")


@pytest.fixture(scope="module")
def tiny():
    family = family_of_type("llama")
    model = family.tailor(family.tiny())
    return family, model, torch.arange(90).reshape(2, 45) % 80 + 3


def error(coder, x):
    return float((coder.rounded(x) - x).square().mean() / x.square().mean())


@pytest.mark.parametrize("make", [lambda b: caches.Integers(b), lambda b: caches.Integers(b, 1024, 0.95, True)])
def test_integers_lose_less_with_more_bits(make):
    x = torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(0))
    errors = [error(make(bits), x) for bits in (8, 4, 3, 2)]
    assert errors == sorted(errors) and errors[0] < 1e-2 < 0.1 < errors[-1] < 0.4


def test_integers_are_within_half_a_step_of_their_group_and_exact_at_its_ends():
    x = torch.tensor([-1.0, 0.4, 2.0, 0.1, 10.0, 10.0, 10.0, 10.0]).view(1, 1, 1, 8)
    found = caches.Integers(2, 4).rounded(x)
    assert torch.allclose(found, torch.tensor([-1.0, 0.0, 2.0, 0.0, 10.0, 10.0, 10.0, 10.0]), atol=2e-3)


def test_turboquant_has_the_error_of_the_best_levels_for_normal_numbers():
    x = 3 * torch.randn(1, 2, 2000, 64, generator=torch.Generator().manual_seed(0))
    for bits, expected in ((1, 0.363), (2, 0.1175), (3, 0.0345), (4, 0.0095)):
        assert error(caches.Turbo(bits), x) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("size", [2, 12, 64, 80])
def test_rotations_are_orthogonal(size):
    for turn in (caches.hadamard(size), caches.rotation(size)):
        assert torch.allclose(turn @ turn.mT, torch.eye(size), atol=1e-5)


def test_a_token_depends_on_itself_alone():
    x = torch.randn(1, 2, 9, 16)
    for coder in (caches.Integers(3, 8), caches.Integers(3, 64, 0.95, True), caches.Turbo(3)):
        assert torch.allclose(coder.rounded(x)[:, :, 4:5], coder.rounded(x[:, :, 4:5]), atol=1e-5)


def test_bytes_count_codes_scales_and_zero_points():
    share = {name: rival.stored_bytes(LAYERS[:1], 1024) for name, rival in caches.rivals().items()}
    whole = caches.whole_bytes(LAYERS[:1], 1024)
    assert whole == 1024 * 2 * (64 + 64) * 2
    assert share["int8 by token"] / whole == (8 + 32 / 64) / 16
    assert share["int3 by token, groups of 32"] / whole == (3 + 32 / 32) / 16
    assert share["QuaRot int4"] / whole == (4 + 32 / 64) / 16
    assert share["TurboQuant 2 bits"] / whole == (2 + 16 / 64) / 16
    helped = share["int4 by token, first 4 and newest 32 whole"] - share["int4 by token"]
    assert helped == 36 * 2 * (64 + 64) * (2 - 36 / 64)
    assert caches.Integers(4).row_bytes(80) == 40 + 2 * 4, "a last group may be smaller"


@pytest.mark.parametrize("first", [0, 4])
def test_bytes_of_kivi_are_those_of_a_cache_that_grows_token_by_token(first):
    rival = caches.Kivi("", caches.Integers(2, 8), whole=first, newest=16)
    sizes, length = [], 0
    whole_keys = whole_values = coded_keys = coded_values = 0
    for length in range(1, 101):
        whole_keys, whole_values = whole_keys + 1, whole_values + 1
        if whole_keys - first == 16:
            whole_keys, coded_keys = first, coded_keys + 16
        if whole_values - first > 16:
            whole_values, coded_values = whole_values - 1, coded_values + 1
        total = 2 * 2 * (64 * whole_keys + 64 * whole_values)  # two heads
        total += 2 * (coded_keys * 64 * 2 / 8 + coded_keys / 8 * 64 * 4)
        total += 2 * coded_values * (64 * 2 / 8 + 64 / 8 * 4)
        sizes.append(total)
        assert rival._at(LAYERS[:1], length) == total
    mean = sum(size * 100 / at for at, size in zip(range(85, 101), sizes[-16:], strict=True)) / 16
    assert rival.stored_bytes(LAYERS[:1], 100) == pytest.approx(mean)


def test_the_first_tokens_stay_whole_where_a_rival_is_helped():
    k, v = torch.randn(2, 1, 2, 10, 16).unbind()
    name = "int2 by token, first 4 and newest 32 whole"
    rows = caches.rivals()[name].remembered(k, v)
    for found, near, x in zip((rows.k, rows.v), rows.near, (k, v), strict=True):
        assert torch.equal(found[:, :, :4], x[:, :, :4]) and not torch.equal(found[:, :, 4:], x[:, :, 4:])
        assert torch.equal(near, x), "what near tokens read"


@pytest.mark.parametrize("name", ["int2 by token", "QuaRot int2", "TurboQuant 2 bits", "KIVI int2, newest 32"])
def test_rivals_change_what_is_read_see_no_later_token_and_leave_no_trace(tiny, name):
    family, model, ids = tiny
    before = last_stream(family, model, ids)
    changed = ids.clone()
    changed[:, -1] += 1
    with caches.rivals()[name].acting(family.blocks(model)):
        read, other = (last_stream(family, model, x) for x in (ids, changed))
    assert not torch.allclose(read, before, atol=1e-4)
    assert torch.allclose(read[:, :-1], other[:, :-1], atol=1e-5)
    assert torch.equal(last_stream(family, model, ids), before)


def test_kivi_with_a_long_window_changes_nothing(tiny):
    family, model, ids = tiny
    with caches.Kivi("", caches.Integers(2, 8), newest=64).acting(family.blocks(model)):
        read = last_stream(family, model, ids)
    assert torch.allclose(read, last_stream(family, model, ids), atol=1e-4)


@pytest.mark.parametrize("first", [0, 4])
def test_kivi_attends_as_token_by_token(tiny, first):
    family, model, _ = tiny
    attend = family.blocks(model)[0].attention.attend
    groups, size = 2, 16
    q = torch.randn(1, groups * attend.num_key_value_groups, 30, size)
    k, v = torch.randn(2, 1, groups, 30, size).unbind()
    rival = caches.Kivi("", caches.Integers(2, 4), whole=first, newest=8)
    found, _ = rival.attended(attend, q, Rows(k, v), None)
    for at in range(30):
        coded = max(0, at - first) // 8 * 8  # keys
        keys = [k[:, :, :first]]
        for start in range(first, first + coded, 4):
            keys.append(caches.whole_numbers(k[:, :, start : start + 4], 2, 2))
        keys = torch.cat((*keys, k[:, :, first + coded :]), 2)[:, :, : at + 1]
        values = v[:, :, : at + 1].clone()
        old = slice(first, max(first, at - 8))
        values[:, :, old] = caches.Integers(2, 4).rounded(values[:, :, old])
        expected, _ = attend(q[:, :, at : at + 1], keys, values, None)
        assert torch.allclose(found[:, at], expected[:, 0].flatten(1), atol=1e-5)


ASKED = ["--data", "stdlib", "--tokens", "512", "--swap-tokens", "0", "--row-length", "32", "--device", "cpu"]
ASKED += ["--length", "32", "--rows", "4", "--share", "50%", "--rival", "int4 by token", "--heal", "none"]


def test_the_benchmark_measures_every_group_once(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    bits, out = module("bits"), tmp_path / "bits-tiny.json"
    monkeypatch.setattr(cache_headwise, "NEAR", 2)  # of few tokens
    monkeypatch.setattr(exact, "FRONTIER_POINTS", 2)
    monkeypatch.setattr(sys, "argv", ["bits.py", "--model", str(folder), *ASKED, "--out", str(out)])
    bits.main()
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert {row["group"] for row in rows} == set(bits.GROUPS) and str(folder.parent) not in out.read_text()
    (int4,) = [row for row in rows if row["method"] == "int4 by token"]
    match = next(row for row in rows if row["group"] == "match" and row["asked"] == "int4 by token")
    assert match["bytes"] <= int4["bytes"] and match["measured_low"] <= match["measured"] <= match["measured_high"]
    capsys.readouterr()
    bits.main()
    assert json.loads(out.read_text()) == found and not capsys.readouterr().err, "nothing is measured again"
    page = module("bits_page")
    assert "int4 per token" in page.filled((ROOT / "docs" / "BITS.md").read_text(), tmp_path)


def test_our_bytes_are_those_of_the_real_cache(folder, tmp_path, monkeypatch):  # noqa: F811
    bits, plans = module("bits"), module("bits_plans")
    monkeypatch.setattr(exact, "FRONTIER_POINTS", 2)
    asked = bits.arguments().parse_args(["--model", str(folder), *ASKED, "--out", str(tmp_path / "x.json")])
    bench = bits.Methods(asked, bits.settings_of(asked)).benches["pooled"]
    model = bench.fitted(bench.plan("50%")).model
    cache, ids = DynamicCache(), torch.arange(20)[None] + 3
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    held += sum(2 * start.numel() for layer in cache.layers for start in layer.starts)
    held += sum(newest.nbytes for layer in cache.layers for newest in layer.newest)
    assert held == plans.stored_bytes(bench.family.shape_of(model.config).layers, 20)


def test_the_pages_are_what_the_results_say(tmp_path):
    page = module("bits_page")
    assert page.filled(page.PAGE.read_text()) == page.PAGE.read_text()
    lengths = module("lengths_page")
    assert lengths.page() == lengths.PAGE.read_text(), "benchmarks/lengths.py --print"
    memory, copy = ROOT / "docs" / "MEMORY.md", tmp_path / "MEMORY.md"
    copy.write_text(memory.read_text())
    module("memory_page").write_page(copy)
    assert copy.read_text() == memory.read_text()
