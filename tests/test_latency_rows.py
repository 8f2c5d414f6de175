"""Limits on time where heads share rows of the cache, and where rows are coded in bits. Most clocks are fake."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import curve
from test_latency import GRAIN, LAYER, MODEL, WORK, FakeClock, own_cache, table_of  # noqa: F401  # a fixture
from test_latency_devices import TINY, here  # noqa: F401  # a fixture
from test_pipeline import SMALL, call, folder, refused  # noqa: F401  # a fixture

from headwise import budgets, pipeline, strategies
from headwise.checks import exactness, speed
from headwise.errors import BudgetError, PlanError
from headwise.families.llama import FAMILY as llama
from headwise.fast.code_layout import FIELDS
from headwise.latency import lattice, measured, measuring
from headwise.latency.stacks import Stacks, as_it_came
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import frontier, sharing
from headwise.types import (
    BITS,
    Check,
    LatencyTable,
    LayerShape,
    ModelShape,
    Readings,
    Workload,
    code_bytes,
    under_time,
)
from headwise.types.codes import FIELD_BITS, MIXTURES, mixture, read_bits

POOLED = MODEL.with_layers(tuple(layer.pooling(2) for layer in MODEL.layers))
ROW = POOLED.layers[0]
TEXT = f"latency={{}}%@{WORK}"


def rows_ms(layer: LayerShape) -> float:
    """A time that depends on what is read of a row; reading many wide rows together takes longer than apart."""
    numbers = [(layer.k_code, layer.qk_dim), (layer.v_code, layer.v_dim)]
    read = sum(read_bits(code) if code else 16 * size for code, size in numbers)
    return layer.kv_heads * read / 64 * (1.5 if layer.pooled > 1 else 1.0) + layer.mlp_width / 256


CODES = tuple(mixture(128, mean) for mean in (8, 4, 2)) + ((0,) * 8 + (16, 16, 16, 8), (0,) * 10 + (16, 0))


def readings_of(shape: ModelShape, seed: int = 0, coded: bool = False) -> Readings:
    """Invented prices of every size of a model, or of codes of its rows."""
    draw, layer, count = random.Random(seed), shape.layers[0], len(shape.layers)
    sizes = {"mlp": shape.grain.mlp_sizes(layer.mlp_width)[::8]}
    order = {"mlp": (tuple(range(layer.mlp_width)),)}
    if coded:
        codes = sorted(CODES, key=lambda code: -code_bytes(code, 128))
        sizes |= {name: (256, *(code_bytes(code, 128) for code in codes)) for name in ("k_bits", "v_bits")}
        order |= {"k_bits": tuple(codes), "v_bits": tuple(codes)}
    else:
        sizes |= {"qk_projected": shape.grain.qk_sizes(layer.qk_width), "v": shape.grain.v_sizes(layer.v_dim)}
        if shape.grain.rotary:
            sizes["qk_pairs"] = sizes["qk_projected"]
            order["qk_pairs"] = (tuple(range(layer.qk_width // 2)),) * layer.kv_heads
    curves = tuple(curve(draw, kind, ticks, count) for kind, ticks in sizes.items())
    return Readings("invented", shape, curves, (order,) * count, 1, seed)


# Heads that share rows.


def test_a_share_is_of_the_time_before_heads_were_pooled():
    assert POOLED.apart == replace(MODEL, grain=POOLED.grain) and MODEL.apart is MODEL
    cut = POOLED.with_layers((replace(ROW, v_dim=64), *POOLED.layers[1:]))
    assert cut.apart is cut, "a model that came with pooled rows"
    table = table_of(rows_ms, POOLED, ("qk", "v"))
    before, after = (2.0 + 6 * rows_ms(layer) for layer in (LAYER, ROW))
    assert table.base == LAYER and table.model_ms(POOLED.apart) == pytest.approx(before) and after > 1.3 * before
    limit = budgets.parse(TEXT.format(80), POOLED, (table,))
    assert limit.limit == pytest.approx(0.8 * before) and budgets.source_price(limit, POOLED) == pytest.approx(before)
    for qk, v in itertools.product((24, 128), (16, 56, 128)):
        layer = replace(ROW, qk_dim=qk, v_dim=v)
        assert table.layer_ms(layer) == pytest.approx(rows_ms(layer)), "rows of every width are priced"


@pytest.mark.parametrize("share", [100, 80, 60])
def test_a_pooled_model_meets_its_limit_by_the_table(share):
    readings = readings_of(POOLED)
    table = table_of(rows_ms, POOLED, ("qk", "v", "mlp"))
    limit = budgets.parse(TEXT.format(share), POOLED, (table,))
    plan = strategies.allocate(readings, (limit,), allow=("qk", "v", "mlp"))
    took = 2.0 + sum(map(rows_ms, plan.target.layers))
    assert took <= share / 100 * (2.0 + 6 * rows_ms(LAYER)) * (1 + 1e-6)
    assert all(layer.pooled == 2 for layer in plan.target.layers) and plan.predicted_damage > 0, "pooling costs time"
    sweep = frontier.solve(readings, plan, ("qk", "v", "mlp"))
    assert all(answer.text == TEXT.format(f"{answer.share * 100:g}") for answer in sweep.answers)


def test_a_pooled_plan_is_timed_beside_the_source_as_it_came():
    readings = readings_of(POOLED)
    limit = budgets.parse(TEXT.format(80), POOLED, (table_of(rows_ms, POOLED, ("qk", "v", "mlp")),))
    asked = []

    def clock(stacks):
        asked.extend(stacks)
        return [[1.05 * (2.0 + sum(map(rows_ms, stack)))] * 3 for stack in stacks]

    plan = measured.confirmed(
        lambda limits: strategies.allocate(readings, limits), (limit,), POOLED, lambda work: clock
    )
    whole = [stack for stack in asked if stack == MODEL.layers]
    assert whole and plan.target.layers in asked and (ROW,) * 6 not in asked


def test_rows_outside_the_table_are_refused_with_what_to_type():
    apart = table_of(rows_ms, MODEL, ("qk", "v", "mlp"))
    assert not measured.covers(apart, POOLED, ("qk", "v"))
    assert measured.covers(table_of(rows_ms, POOLED, ("qk", "v")), POOLED, ("qk", "v"))
    limit = budgets.parse(TEXT.format(80), POOLED, (apart,))
    with pytest.raises(BudgetError) as caught:
        strategies.allocate(readings_of(POOLED), (limit,), allow=("qk", "v", "mlp"))
    assert "attention of 4 heads on 1 rows of 2 pooled heads, qk 128 of 128" in str(caught.value)
    assert f"headwise probe MODEL --latency {WORK} --allow UNITS --out FOLDER" in str(caught.value)


def test_tables_of_rows_survive_their_files(tmp_path):
    table = table_of(rows_ms, POOLED, ("mlp", "bits"))
    table.save(tmp_path / "t.json")
    assert LatencyTable.read(tmp_path / "t.json") == table and table.codes
    with pytest.raises(BudgetError, match="measure again"):
        replace(table.codes[0], bits=(2, 3))
    data = table_of(rows_ms).to_json()
    assert "codes" not in data and "pooled" not in data["lattices"][0], "as older versions wrote them"


# Rows in bits.


def test_codes_that_are_timed_have_the_bits_they_say_and_fields_are_those_of_the_kernels():
    assert tuple(FIELDS) == FIELD_BITS
    for size, mean in itertools.product((1, 2, 8, 100, 512), MIXTURES):
        code = mixture(size, mean)
        assert len(code) == len(BITS) and 0 < sum(code) <= size and min(code) >= 0
    assert [sum(b * n for b, n in zip(BITS, mixture(512, mean), strict=True)) / 512 for mean in MIXTURES] == [2, 4, 8]
    for size in (1, 2, 8, 100, 512):
        assert read_bits(mixture(size, 2)) < read_bits(mixture(size, 4)) < read_bits(mixture(size, 8))


def test_codes_are_priced_by_what_is_read_between_those_that_were_timed():
    clock = FakeClock(rows_ms)
    table = lattice.measure(clock, POOLED, WORK, ("mlp", "bits"), 4)
    coded = {stack[0] for stack in clock.asked if stack[0].coded and len(set(stack)) == 1}
    assert len(coded) == len(MIXTURES) ** 2 and table.error < 1e-9
    for keys, values in itertools.product(CODES, repeat=2):
        layer = replace(ROW, k_code=keys, v_code=values, mlp_width=512)
        assert table.layer_ms(layer) >= rows_ms(layer) * (1 - 1e-9), "codes below those that were timed are no faster"
    between = replace(ROW, k_code=(0,) * 4 + (40,) + (0,) * 3 + (30, 0, 20, 0), v_code=mixture(128, 4))
    assert read_bits(mixture(128, 2)) < read_bits(between.k_code) < read_bits(mixture(128, 8))
    finer = replace(between, v_code=(64, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0))
    for layer in (between, finer):
        assert layer not in {time.shape for time in table.times}
        assert table.layer_ms(layer) == pytest.approx(rows_ms(layer)), "between, and above"
    assert not table_of(rows_ms, POOLED, ("qk", "bits")).codes, "sizes are cut, or rows are coded"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [95, 70, 50])
def test_the_exact_strategy_chooses_codes_and_rows_that_stay(seed, share):
    source = POOLED.with_layers(POOLED.layers[:2])
    readings = readings_of(source, seed, coded=True)
    table = table_of(rows_ms, source, ("bits",))
    limit = budgets.parse(TEXT.format(share), source, (table,))
    plan = strategies.allocate(readings, (limit,), allow=("bits",))
    assert budgets.price(limit, plan.target) <= limit.limit * (1 + 1e-9)
    options = []
    for index, shape in enumerate(source.layers):
        sides = [
            zip(readings.orders[index][name], readings.curve(f"damage.{name}").values[index][1:], strict=True)
            for name in ("k_bits", "v_bits")
        ]
        pairs = itertools.product(*map(list, sides))
        rows = [(table.layer_ms(replace(shape, k_code=k, v_code=v)), x + y) for (k, x), (v, y) in pairs]
        options.append([(table.layer_ms(shape), 0.0), *rows])
    best = min(
        sum(damage for _, damage in pick)
        for pick in itertools.product(*options)
        if table.rest_ms + sum(ms for ms, _ in pick) <= limit.limit * (1 - 1e-9)
    )
    assert plan.predicted_damage == pytest.approx(best) and any(layer.coded for layer in plan.target.layers)


def test_a_limit_on_time_and_one_on_the_cache_are_both_met_by_codes():
    readings = readings_of(POOLED, coded=True)
    table = table_of(rows_ms, POOLED, ("bits",))
    limits = budgets.parse_all([TEXT.format(90), "kv=25%"], POOLED, (table,))
    plan = strategies.allocate(readings, limits, allow=("bits",))
    assert all(plan.spent[limit.key] <= limit.limit * (1 + 1e-9) for limit in limits)
    assert all(layer.coded for layer in plan.target.layers)


def test_bits_that_were_not_timed_or_not_priced_are_refused_with_what_to_type():
    table = table_of(rows_ms, POOLED, ("mlp",))
    assert not measured.covers(table, POOLED, ("bits",)) and measured.covers(table, POOLED, ("mlp",))
    limit = budgets.parse(TEXT.format(80), POOLED, (table,))
    with pytest.raises(BudgetError, match=f"a cache in bits is outside .* --latency {WORK} --allow bits --out FOLDER"):
        strategies.allocate(readings_of(POOLED, coded=True), (limit,), allow=("bits",))
    with pytest.raises(PlanError, match="needs prices of bits of the cache, and this probing has none; probe again"):
        strategies.allocate(readings_of(POOLED), (limit,), allow=("bits",))


@pytest.mark.parametrize(
    ("budgets_", "allow", "coded"),
    [
        (("latency=60%@decode",), ("bits",), True),
        (("latency=60%@decode", "kv=25%"), ("mlp", "bits"), True),
        (("latency=60%@decode",), ("qk", "v", "mlp", "bits", "weights"), False),
        (("latency=60%@decode", "kv=25%"), ("v", "bits"), False),
        (("kv=25%",), ("qk", "v", "bits"), True),
    ],
)
def test_under_a_limit_on_time_bits_are_chosen_where_no_sizes_of_attention_are(budgets_, allow, coded):
    settings = Settings("embedded", budgets=budgets_, allow=allow)
    assert settings.may_code is coded and not settings.may_pack
    assert "kv=25%" in budgets_ or ("bits" in under_time(allow)) is coded


# What is run.


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_stacks_of_rows_that_heads_share_and_of_rows_in_bits_run_on_a_cpu(phase):
    model = llama.tailor(llama.tiny(), 2)
    clock = Stacks(llama, model, Workload(phase, 48, 2), repeats=1)
    row = clock.shape.layers[0]
    coded = replace(row, k_code=mixture(row.qk_dim, 2), v_code=mixture(row.v_dim, 8))
    narrow = replace(row, qk_dim=8, v_dim=16)
    times = clock([clock.shape.apart.layers, (row,) * 2, (narrow, row), (coded,) * 2, (coded, row)])
    assert all(time > 0 for stack in times for time in stack)
    came = as_it_came(model, llama, clock.work)
    assert llama.shape_of(came.config).layers == llama.shape_of(llama.tiny().config).layers
    plain = llama.tailor(llama.tiny())
    assert as_it_came(plain, llama, clock.work) is plain
    took = speed.side_by_side(model, clock.model((coded, narrow)), clock.work, repeats=1)
    assert took["before"] > 0 and took["after"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:the fast cache takes")  # of tiny models
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_stacks_of_such_rows_are_replayed_on_cuda(phase):
    stock = llama.tiny(head_dim=64).to("cuda", torch.bfloat16)
    stock.config.dtype = torch.bfloat16
    clock = Stacks(llama, llama.tailor(stock, 2), Workload(phase, 200, 2), repeats=2)
    row = clock.shape.layers[0]
    coded = [replace(row, k_code=mixture(row.qk_dim, k), v_code=mixture(row.v_dim, v)) for k, v in ((2, 8), (4, 4))]
    clock.ahead([row, *coded])
    times = clock([clock.shape.apart.layers, (row,) * 2, (replace(row, qk_dim=64), row), tuple(coded), (coded[0], row)])
    assert all(time > 0 for stack in times for time in stack) and clock.captured == (phase == "decode")


@torch.no_grad()
def test_a_step_on_rows_in_bits_repeats_the_same_work():
    row = llama.shape_of(llama.tailor(llama.tiny(), 2).config).layers[0]
    coded = replace(row, k_code=mixture(row.qk_dim, 4), v_code=mixture(row.v_dim, 8))
    model = Stacks(llama, llama.tailor(llama.tiny(), 2), TINY).model((coded, coded))
    step = measuring.prepare(llama, model, TINY)
    first = step.run().logits
    for _ in range(3):
        torch.testing.assert_close(step.run().logits, first)
    assert step.runtime == measuring.PLAIN, "kernels for rows in bits need CUDA"


# The command line.


@pytest.fixture
def quick(here, monkeypatch):  # noqa: F811
    """Runs whose clock is fake and whose models are not timed."""
    here[1].ms = lambda layer: 100 * rows_ms(layer)
    monkeypatch.setattr(speed, "side_by_side", lambda source, cut, work: {"before": 10.0, "after": 6.0})
    monkeypatch.setattr(exactness, "reload_check", lambda *given: Check(exactness.RELOADS, True, "", ""))


def test_a_run_of_pooled_heads_under_a_limit_on_time(quick, folder, tmp_path, capsys):  # noqa: F811
    out, limit = tmp_path / "run", f"latency=80%@{TINY}"
    given = ["--pool", 2, "--allow", "qk,v", "--data", "stdlib", *SMALL, "--out", out]
    assert call("run", folder, "--budget", limit, *given) == 0
    plan, run = json.loads((out / "plan.json").read_text()), RunFolder(out)
    table = run.table(TINY)
    source = run.read_plan().source
    assert plan["budgets"][0]["limit"] == pytest.approx(0.8 * table.model_ms(source.apart))
    assert table.model_ms(source.apart) < table.model_ms(source)
    assert plan["spent"][f"latency@{TINY}"] <= plan["budgets"][0]["limit"]
    run.table_file(TINY).rename(tmp_path / "table.json")
    assert f"probe MODEL --latency {TINY}" in refused(capsys, "allocate", out, "--budget", limit, "--allow", "qk,v")
    assert call("probe", folder, "--latency", TINY, "--allow", "qk,v", "--device", "cpu", "--out", out) == 0
    assert call("allocate", out, "--budget", f"latency=90%@{TINY}", "--allow", "qk,v") == 0


def test_a_run_with_bits_of_the_cache_under_a_limit_on_time(quick, folder, tmp_path, capsys):  # noqa: F811
    out, limit = tmp_path / "run", f"latency=60%@{TINY}"
    assert call("run", folder, "--budget", limit, "--allow", "bits", "--data", "stdlib", *SMALL, "--out", out) == 0
    plan = RunFolder(out).read_plan()
    assert any(layer.coded for layer in plan.target.layers) and plan.source.layers[0].pooled > 1
    both = ["--budget", f"latency=90%@{TINY}", "--budget", "kv=25%", "--allow", "bits"]
    assert call("allocate", out, *both) == 0
    cached, small = tmp_path / "cached", ["--data", "stdlib", *SMALL[:2], *SMALL[4:]]
    assert call("probe", folder, "--budget", "kv=25%", *small, "--out", cached) == 0
    assert "was not yet" in refused(capsys, "allocate", cached, *both)
    assert call("probe", folder, "--latency", TINY, "--allow", "bits", "--device", "cpu", "--out", cached) == 0
    assert call("allocate", cached, *both) == 0


# How many heads share rows, where the run chooses.


@pytest.fixture
def choosing(quick, here, folder, tmp_path, monkeypatch):  # noqa: F811
    """Runs the tiny model under a limit on time; pooled rows take so many times as long. Also counts trials."""
    trials = []
    real = sharing.probe
    monkeypatch.setattr(sharing, "probe", lambda *given, **more: trials.append(1) or real(*given, **more))

    def run(pooled: float, *more, share: int = 70) -> int:
        ms = lambda layer: 100 * rows_ms(replace(layer, pooled=1)) * (pooled if layer.pooled > 1 else 1)  # noqa: E731
        monkeypatch.setattr(here[1], "ms", ms)
        given = ["--budget", f"latency={share}%@{TINY}", "--allow", "qk,v", "--data", "stdlib", *SMALL, *more]
        return call("run", folder, *given, "--out", tmp_path / "run")

    return run, trials, RunFolder(tmp_path / "run")


@pytest.mark.parametrize(("pooled", "heads", "told"), [(0.8, 2, "2 key/value heads share"), (9.0, 1, "no heads share")])
def test_a_run_under_a_limit_on_time_chooses_how_many_heads_share_rows(choosing, caplog, pooled, heads, told):
    run, trials, out = choosing
    assert run(pooled) == 0
    assert {layer.pooled for layer in out.read_plan().source.layers} == {heads} and len(trials) == 2
    note = next(line for line in caplog.messages if line.startswith("note: latency"))
    assert told in note and "--pool sets it" in note


def test_the_choice_outlives_a_kill_and_later_commands_find_it(choosing, monkeypatch):
    run, trials, out = choosing
    real = pipeline.build

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "build", killed)
    assert run(0.8) != 0 and len(trials) == 2 and not out.finished("probe")
    monkeypatch.setattr(pipeline, "build", real)
    assert run(0.8) == 0 and len(trials) == 2, "ways are not tried again"
    limit = ["--budget", f"latency=90%@{TINY}", "--allow", "qk,v"]
    assert call("allocate", out.path, *limit) == 0
    assert call("reshape", out.path) == 0 and call("verify", out.path) == 0
    assert all(layer.pooled == 2 for layer in out.read_plan().target.layers)


def test_with_pool_given_nothing_is_tried(choosing):
    run, trials, out = choosing
    assert run(0.8, "--pool", "none") == 0 and not trials
    assert all(layer.pooled == 1 for layer in out.read_plan().source.layers)


def test_a_limit_that_no_way_meets_is_refused_before_the_model_is_probed(choosing, capsys):
    run, trials, out = choosing
    assert run(0.8, share=1) != 0 and len(trials) == 2
    assert "13.9% remains" in capsys.readouterr().err and not out.finished("probe")
