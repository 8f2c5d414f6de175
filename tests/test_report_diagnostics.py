"""What the report and the terminal make of readings that are no damage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_parts import HOSTILE, check_page
from test_diagnostics import KINDS, bench_of, by_kind, sharp

from headwise import pipeline
from headwise.cli.show import show_record
from headwise.report import render
from headwise.report._data import CurveSet
from headwise.report._diagnostics import StripSet, diagnostics
from headwise.report._html import prose
from headwise.runs.dossier import Dossier
from headwise.runs.settings import Settings
from headwise.types import Reading, Readings


@pytest.fixture(scope="module")
def probed() -> Readings:
    settings, bench = bench_of(sharp())
    return pipeline.probe(settings, bench)[0]


def dossier_of(probed: Readings) -> Dossier:
    return Dossier(Settings("tiny", ("kv=75%",)), probed)


def section_of(page: str, name: str) -> str:
    return page[page.index(f'id="{name}"') :].split('<details class="part"')[0]


def test_the_report_draws_them_apart_from_damage(probed):
    page = render(dossier_of(probed))
    check_page(page)
    assert (
        page.index('id="advanced"') < page.index('id="damage"') < page.index('id="layers"') < page.index('id="healing"')
    )
    damage, layers = section_of(page, "damage"), section_of(page, "layers")
    assert "Damage with value directions dropped" in damage and not any(kind in damage for kind in KINDS)
    assert "damage.v" not in layers and "Slope of every head" in layers
    for reading in probed.curves:
        if reading.kind in KINDS:
            assert prose(reading.meaning) in layers, f"{reading.kind} says what it means"
    assert "Of 12 heads" in layers and "1/L, as with even attention" in layers


def test_topics_hold_the_readings_numbers(probed):
    found, shape = by_kind(probed.curves), probed.source
    topics = {topic.sets[0].kind.partition(".")[0]: topic for topic in diagnostics(probed, None)}
    sharpness, directions, reach, condition = (topics[n] for n in ("saturation", "spectrum", "lags", "conditioning"))
    assert [group.kind for group in sharpness.sets][0] == "saturation.slope", "slopes first"
    slope = sharpness.sets[0]
    assert isinstance(slope, StripSet) and slope.marks == (-1.0, 0.0) and slope.values[0] <= -1
    assert tuple(strip.values for strip in slope.strips) == found["saturation.slope"].values
    rank = directions.sets[0]
    assert isinstance(rank, StripSet) and [strip.full for strip in rank.strips] == [16.0] * len(shape.layers)
    (lag,) = reach.sets
    assert isinstance(lag, CurveSet) and lag.log and lag.reading.axis == "lag" and lag.curves[0].points[0][0] == 0
    assert {t for t, _ in lag.curves[0].points} >= {0, 1, 2, 3, 63}, "near lags are not thinned away"
    assert {group.kind for group in condition.sets} == {"conditioning.outputs"}
    assert "For 64 tokens the condition number of a layer's head outputs is" in condition.answer
    saturates = replace(found["saturation.slope"], values=((-1.1, -0.9, -0.5, 0.0),) * 3)
    (topic,) = diagnostics(replace(probed, curves=(saturates,)), None)
    assert "Of 12 heads, 6 saturate (slope below -0.75) and 3 stay sharp" in topic.answer


def test_readings_from_before_say_so(probed):
    old = replace(probed, curves=tuple(r for r in probed.curves if r.kind.startswith("damage.")))
    page = render(dossier_of(old))
    check_page(page)
    assert "hold damages only" in section_of(page, "layers")
    assert "headwise probe tiny" in section_of(render(replace(dossier_of(old), readings=None)), "layers")


def test_odd_diagnostics_stay_text_and_finite(probed):
    nan = float("nan")
    for reading in probed.curves:
        if reading.kind not in KINDS:
            continue
        hostile = replace(reading, meaning=HOSTILE, unit=HOSTILE, probe=HOSTILE)
        broken = replace(reading, values=tuple((nan,) * len(row) for row in reading.values))
        empty = replace(reading, ticks=((),) * 3, values=((),) * 3, standard_error=None)
        unknown = replace(reading, kind=HOSTILE, axis=HOSTILE)
        for curves in ((hostile,), (broken,), (empty,), (unknown,), (replace(unknown, axis="kv_head"),)):
            page = render(dossier_of(replace(probed, curves=curves, shape=None)))
            check_page(page)


def test_many_layers_and_heads_stay_small(probed):
    found = by_kind(probed.curves)

    def deep(reading: Reading, columns: int) -> Reading:
        row, ticks = tuple(-0.01 * i for i in range(columns)), tuple(range(columns))
        return replace(reading, ticks=(ticks,) * 80, values=(row,) * 80, standard_error=(row,) * 80)

    slope, lag = deep(found["saturation.slope"], 64), deep(found["lags.contribution"], 64)
    page = render(dossier_of(replace(probed, curves=(slope, lag), shape=None)))
    check_page(page)
    assert len(page.encode()) < 300_000


def test_the_terminal_shows_them(probed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_record(probed)
    out = capsys.readouterr().out
    assert out.index("damage.v by v_dim") < out.index("saturation.slope by query_head")
    assert "…" not in out and max(map(len, out.splitlines())) <= 80, "every number fits a terminal"
    table = out[out.index("lags.contribution") :].splitlines()
    assert any(line.split()[:4] == ["layer", "0", "1", "2"] and line.split()[-1] == "63" for line in table)
