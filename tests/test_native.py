"""Decoding with a cache in bits on a CPU by the compiled library: as torch does it, and without it where it fails."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import coded_models as coded
import pytest
import torch

from headwise.fast import native, native_build, products
from headwise.fast.model import optimise
from headwise.runtime.coder_headwise import RowCoder, _scale

needs_compiler = pytest.mark.skipif(isinstance(native_build.library(), str), reason="this machine has no C compiler")
LOAD = "from headwise.fast.native_build import library as b; print(b() if isinstance(b(), str) else 'ok')"


def both(kind="llama", pool=1, kept=0.75, gains=False):
    """A coded model in single precision, and the same optimised."""
    model = copy.deepcopy(coded.made(kind, pool, kept)[3]).float()
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = None
    drawn = torch.Generator().manual_seed(0)
    for name, gain in model.named_buffers():
        if gains and "_gain_" in name:
            gain.copy_(2.0 ** torch.randint(-3, 4, gain.shape, generator=drawn))
    return model, optimise(copy.deepcopy(model))


def layers_of(model):
    return [module for module in model.modules() if getattr(module, "coders", None) is not None]


@pytest.fixture
def counted(monkeypatch):
    """How many tokens were read by the library, layer by layer."""
    found = []
    token = native._token

    def counting(attention, hidden, mask, positions, layer):
        out = token(attention, hidden, mask, positions, layer)
        if out is not None:
            found.append(layer.keys.shape[2])
        return out

    monkeypatch.setattr(native, "_token", counting)
    return found


@needs_compiler
@pytest.mark.parametrize(("kind", "pool", "kept", "gains", "texts", "padding", "tokens"), [
    ("llama", 1, 0.75, False, 1, 0, 60),
    ("llama", 2, 0.75, True, 1, 0, 1_100),
    ("llama", 2, 1.0, False, 3, 9, 100),
    ("llama", 1, 0.3, True, 3, 20, 70),
    ("gpt_neox", 1, 0.75, True, 1, 0, 90),
    ("qwen3", 1, 0.75, False, 1, 0, 80),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_writes_the_same_bytes_and_reads_the_same(
    kind, pool, kept, gains, texts, padding, tokens, threads, counted, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # as many read in C; torch computes as before
    model, fast = both(kind, pool, kept, gains)
    ids = coded.drawn(texts, tokens + 4)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = coded.fresh(model)
    place = (mask.cumsum(1) - 1).clamp(min=0)
    coded.said(model, ids[:, :tokens], cache, attention_mask=mask[:, :tokens], position_ids=place[:, :tokens])
    for at in range(tokens, tokens + 4):
        own = copy.deepcopy(cache)
        given = dict(attention_mask=mask[:, : at + 1], position_ids=place[:, at : at + 1])
        got = coded.said(fast, ids[:, at : at + 1], own, **given)
        want = coded.said(model, ids[:, at : at + 1], cache, **given)
        assert (got - want).norm() < 1e-5 * want.norm()
        first, other = cache.layers[0], own.layers[0]
        assert torch.equal(first.keys, other.keys) and torch.equal(first.values, other.values)
        assert all(map(torch.equal, first.newest, other.newest))
    covered = [layer for layer in layers_of(model) if layer.attend.sliding_window is None]
    assert covered and counted == [at + 1 for at in range(tokens, tokens + 4) for _ in covered]


@needs_compiler
@pytest.mark.parametrize(("kind", "pool"), [("llama", 1), ("llama", 2), ("gpt_neox", 1)])
def test_a_prompt_is_read_the_same(kind, pool):
    model, fast = both(kind, pool, gains=True)
    ids = coded.drawn(2, 200)
    want, got = (coded.said(one, ids, coded.fresh(one)) for one in (model, fast))
    assert (got - want).norm() < 1e-3 * want.norm(), "a code on the edge of a step may differ"


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 16, 203])
@pytest.mark.parametrize("counts", [({"8": 5, "6": 7, "3": 20, "1": 9}, {"12": 3, "5": 30, "2": 60}), ({"8": 64}, {})])
def test_many_rows_are_coded_as_torch_codes_them(tokens, counts):
    keys, values = (RowCoder(count, size) for count, size in zip(counts, (64, 130), strict=True))
    plain = keys.beside(values)
    k, v = (
        torch.randn(2, 3, tokens, size, generator=torch.Generator().manual_seed(size)) * torch.logspace(2, -3, size)
        for size in (64, 130)
    )
    k[0, 1, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    (want, numbers), (rows, found) = plain.encode(k, v), native.NativeJoint(plain.coders, plain.firsts).encode(k, v)
    assert len(rows) == len(found) == 4
    for one, other in zip(rows, want, strict=True):
        assert one.shape == other.shape and (one != other).float().mean() < 1e-3, "a number on the edge of a step"
    for one, other in zip(found, numbers, strict=True):
        one, other = (x.clamp(-1e6, 1e6).nan_to_num() for x in (one, other))
        assert (one - other).norm() <= 1e-3 * other.norm()


def test_scales_are_those_of_torch_beside_every_edge():
    edges, factors = native._scales()
    near = torch.cat([edges.nextafter(torch.tensor(to)) for to in (0.0, torch.inf)] + [edges, factors]).clamp_min(0)
    assert torch.equal((near[:, None] > edges).sum(1), _scale(near).long())


@needs_compiler
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_the_same_texts_are_generated(how, counted):
    model, fast = both(pool=2)
    ids = coded.drawn(2, 50)
    given = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids), **how)
    assert torch.equal(fast.generate(ids, **given), model.generate(ids, **given))
    assert counted, "the library was used"


@needs_compiler
def test_the_plain_runtime_reads_on_after_steps_of_the_library(counted):
    model, fast = both(pool=2)
    ids = coded.drawn(1, 70)
    caches = coded.fresh(model), coded.fresh(model)
    want = coded.in_parts(model, ids, [60, *[1] * 10], caches[0])
    coded.in_parts(fast, ids[:, :65], [60, *[1] * 5], caches[1])
    got = coded.in_parts(model, ids[:, 65:], [1] * 5, caches[1])
    assert (got - want[:, 65:]).norm() < 1e-4 * want.norm(), "a code on the edge of a step may differ"
    for cache in caches:
        cache.crop(-2)
    want, got = (
        coded.in_parts(one, ids[:, :4], [1] * 4, cache) for one, cache in zip((model, fast), caches, strict=True)
    )
    assert (got - want).norm() < 1e-4 * want.norm()
    assert counted


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_any_number_of_rows_are_those_of_torch(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # as many compute in C
    for columns, rows, bias in ((64, 48, True), (37, 5, False), (256, 1, True)):
        want = torch.nn.Linear(columns, rows, bias=bias)
        got = copy.deepcopy(want)
        got.__class__ = products.Linear
        for shape in ((columns,), (1, 1, columns), (4, columns), (5, columns), (2, 40, columns), (0, columns)):
            x = torch.randn(shape)
            with torch.no_grad():
                torch.testing.assert_close(got(x), want(x), rtol=1e-5, atol=1e-5)
            assert got(x).requires_grad, "what learns is left to torch"
        with pytest.raises(RuntimeError, match="cannot be multiplied"), torch.no_grad():
            got(torch.randn(2, columns - 1))
        assert pickle.loads(pickle.dumps(got)).weight.equal(want.weight)


@needs_compiler
def test_weights_of_attention_are_still_given():
    model, fast = both(pool=2)
    model.config._attn_implementation = fast.config._attn_implementation = "eager"
    ids = coded.drawn(1, 64)
    want, got = (coded.in_parts(one, ids, [60, 1, 1, 1, 1]) for one in (model, fast))
    assert (got - want).norm() < 1e-4 * want.norm()


def test_without_a_compiler_models_stay_as_they_are(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    native_build.library.cache_clear()
    try:
        with caplog.at_level("DEBUG", "headwise"):
            model, same = both()
        assert [type(layer) for layer in layers_of(same)] == [type(layer) for layer in layers_of(model)]
        assert "no C compiler was found" in caplog.text
    finally:
        native_build.library.cache_clear()


def started(folder):
    env = os.environ | {"HEADWISE_CACHE": str(folder)}
    return subprocess.Popen([sys.executable, "-c", LOAD], env=env, stdout=subprocess.PIPE, text=True)


@needs_compiler
def test_two_processes_build_at_once_and_a_damaged_library_is_built_again(tmp_path):
    for process in [started(tmp_path), started(tmp_path)]:
        assert process.communicate(timeout=120)[0] == "ok\n"
    files = sorted(tmp_path.iterdir())
    assert files and all(file.suffix == ".so" for file in files)
    content = files[0].read_bytes()
    for file in files:
        file.write_bytes(content[: len(content) // 2])
    assert started(tmp_path).communicate(timeout=120)[0] == "ok\n"
    assert any(file.read_bytes() == content for file in tmp_path.iterdir())


@needs_compiler
def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert started(tmp_path / "file").communicate(timeout=120)[0] == "ok\n"
