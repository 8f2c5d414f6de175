"""Calibration sees every position that will be served, so that a cut holds beyond the length of its rows."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from headwise import families, pipeline, strategies
from headwise.budgets import parse
from headwise.checks import quality
from headwise.cuts import reshape
from headwise.errors import HeadwiseError
from headwise.families import repeated
from headwise.runs.settings import Settings

ROTARY = [(family, kind) for family in families.known() if family.relative for kind in family.model_types]
LEARNED = ("gpt2", "opt", "bert", "t5", "bart")
CONTEXT = 100
LLAMA = families.family_of(LlamaConfig())
ROWS = torch.randint(3, 90, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "kind"), ROTARY, ids=[kind for _, kind in ROTARY])
@torch.no_grad()
def test_answers_stay_the_same_wherever_rows_begin(family, kind):
    model = family.tailor(family.tiny(kind))
    reader = family.offset(CONTEXT, seed=1)
    assert len(set(reader.positions(ROWS)["position_ids"][:, 0].tolist())) > 1, "rows begin at positions of their own"
    plain, moved = family.run(model, ROWS), reader.run(model, ROWS)
    torch.testing.assert_close(moved, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), ROTARY, ids=[kind for _, kind in ROTARY])
@torch.no_grad()
def test_layers_alone_are_told_the_same_positions_as_the_model(family, kind):
    model = family.tailor(family.tiny(kind))
    reader = family.offset(CONTEXT, seed=1)
    stream = reader.embed(model, ROWS)
    for index, context in enumerate(reader.contexts(model, [ROWS])[0]):
        stream = reader.run_layer(model, index, stream, context)
    torch.testing.assert_close(reader.logits(model, stream), reader.run(model, ROWS), atol=1e-5, rtol=1e-5)


def test_a_row_begins_where_its_tokens_say_whatever_is_beside_it():
    reader = LLAMA.offset(CONTEXT, seed=1)
    together, alone = reader.positions(ROWS)["position_ids"], reader.positions(ROWS[1:2])["position_ids"]
    assert torch.equal(together[1:2], alone)
    assert torch.equal(together - together[:, :1], torch.arange(24).expand(3, -1)), "its tokens follow one another"
    other = reader.offset(CONTEXT, seed=2).positions(ROWS)["position_ids"]
    assert not torch.equal(together, other), "another random seed, other positions"


def test_rows_begin_all_over_the_context_and_end_within_it():
    reader = LLAMA.offset(1000)
    rows = torch.randint(0, 50_000, (2000, 100), generator=torch.Generator().manual_seed(0))
    places = reader.positions(rows)["position_ids"]
    assert places.min() >= 0 and places.max() < 1000
    counts = torch.histc(places[:, 0].float(), bins=9, min=0, max=900)
    assert counts.min() > 2000 / 9 * 0.7, "no part of the context is left out"


def test_rows_as_long_as_the_context_begin_at_its_start():
    reader = LLAMA.offset(ROWS.shape[1])
    assert reader.positions(ROWS) == {}


@pytest.mark.parametrize("kind", LEARNED)
def test_models_that_know_positions_by_heart_read_rows_of_the_whole_context(kind):
    family = next(family for family in families.known() if kind in family.model_types)
    assert family.row_length(512, served=1024) == 1024
    assert family.offset(1024) is family, "their rows cannot begin elsewhere"


def test_rotary_models_keep_their_row_length_whatever_is_served():
    family = next(family for family in families.known() if "llama" in family.model_types)
    assert family.row_length(512, served=32_768) == 512
    assert family.row_length(512, served=256) == 256


def test_the_served_context_is_the_models_own_unless_asked():
    assert Settings(model="x").served(8192) == 8192
    assert Settings(model="x").served(131_072) == 32_768, "at most 32k unless asked"
    assert Settings(model="x", context=131_072).served(131_072) == 131_072
    with pytest.raises(HeadwiseError, match="the model takes 8,192; lower --context"):
        Settings(model="x", context=9000).served(8192)


def test_copies_of_rows_are_handed_copies_of_their_positions():
    table = torch.arange(6.0).view(2, 3, 1)
    found = repeated({"position_embeddings": (table, -table), "attention_mask": None}, 2)
    assert torch.equal(found["position_embeddings"][0], torch.cat((table, table)))
    shared = {"position_embeddings": (table[:1], table[:1])}
    assert repeated(shared, 2) is shared, "one position for all rows serves copies too"


@pytest.mark.parametrize("pool", ["none", "all"])
def test_a_cut_calibrated_on_short_rows_holds_at_the_full_context(pool):
    settings = Settings("embedded", ("kv=75%",), length=128, tokens=2048, eval_tokens=2048, swap_tokens=0, pool=pool)
    bench = pipeline.load_source(settings)
    readings, moments = pipeline.probe(settings, bench, diagnose=False)
    shape = bench.family.shape_of(bench.model.config)
    plan = strategies.allocate(readings, (parse("kv=75%", shape, ()),))
    assert plan.context == readings.context == 1024
    cut = reshape(bench.family, bench.model, plan, moments)
    text = bench.evaluation.flatten()
    short, long = (
        quality.compare(bench.family, bench.model, cut, text.view(-1, length)).damage()["measured"]
        for length in (128, 1024)
    )
    assert long <= 1.25 * short + 0.03, f"{short:.3f} nats at 128 tokens, {long:.3f} at 1,024"
