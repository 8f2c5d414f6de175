"""Pictures of the report: what is drawn is what was measured and planned."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_parts import make_dossier, make_plan

from headwise.cost import kv_bytes_per_token
from headwise.report import _data as data
from headwise.report import _pictures as pictures
from headwise.report import render
from headwise.report._model import dashes, draw_model, model_rows
from headwise.types import (
    GONE,
)


def test_the_picture_shows_sizes_and_heads() -> None:
    plan = make_plan(6, "m")
    rows = model_rows(plan)
    assert [row.new.qk_dim for row in rows] == [64, 48, 64, 32, 64, 64]
    assert rows[4].heads == tuple(h for h in range(16) if h % 4 != 1) and rows[5].heads == tuple(range(4, 16))
    table = draw_model(rows)
    third = table.split("<tr data-layer=")[3]
    assert "48<small>/64" not in third and "32<small>/64" in third and "512/1024" in third
    lines = re.findall(r'class="(\w+)" d="([^"]*)" stroke-width="([^"]*)"', table.split("<tr data-layer=")[2])
    assert [(name, width) for name, _, width in lines] == [
        ("q", "1"), ("v", "1"), ("pq", "1"), ("pv", "1"), ("wide", "1"), ("q", "0.75"), ("v", "1")
    ], "before; what was; computed at full width, cached at three quarters"  # fmt: skip
    gone = replace(plan, target=plan.target.with_layers((GONE, *plan.target.layers[1:])))
    assert model_rows(gone)[0].heads == () and draw_model(model_rows(gone)).count('class="removed"') == 1


def test_heads_are_drawn_by_group() -> None:
    assert dashes((0, 1, 2, 3), 2, 0.0, 1.0) == "M0 0.5h1.42M2.4 0.5h1.42", "groups stand apart"
    assert dashes((0, 2), 4, 0.0, 0.5) == "M0 0.75h0.42M2 0.75h0.42", "a lost head leaves its place empty"
    assert dashes((), 4, 0.0, 0.5) == ""


def test_damage_is_that_of_the_chosen_sizes() -> None:
    dossier = make_dossier()
    assert dossier.readings is not None and dossier.plan is not None
    rows = data.damage_rows(dossier.readings, dossier.plan)
    assert rows[0].parts == {} and rows[0].total == 0
    assert rows[1].parts == {"qk": pytest.approx(2 * 7e-5)}
    assert rows[2].parts == {"v": pytest.approx(3 * 3e-5 * 63), "mlp": pytest.approx(3 * 4e-5 * 63)}, (
        "the later probe is believed"
    )
    assert rows[3].parts["qk"] == pytest.approx(4 * 3e-5 * 63), "dropped pairs are priced by their own curve"
    assert set(rows[4].parts) == {"heads"} and set(rows[5].parts) == {"kv_heads"}


def test_curves_describe_themselves() -> None:
    dossier = make_dossier()
    assert dossier.readings is not None
    sets = {group.kind: group for group in data.curve_sets(dossier.readings, dossier.plan)}
    assert sets["damage.v"].reading.probe == "swap" and sets["damage.v"].earlier_probe == "sensitivity"
    assert sets["damage.v"].curves[2].chosen == pytest.approx((32, 3 * 3e-5 * 63))
    assert (
        sets["damage.qk_projected"].curves[1].chosen is not None
        and sets["damage.qk_projected"].curves[3].chosen is None
    )
    assert sets["damage.qk_pairs"].curves[3].chosen is not None and sets["damage.qk_pairs"].curves[1].chosen is None
    assert not sets["spectrum.entropy"].used and "Spectrum entropy by direction" in render(dossier)
    assert "damage.v by" not in render(dossier) and "Damage with value directions dropped" in render(dossier)
    low, high = sets["damage.v"].values
    assert 0 < low < high and sets["damage.v"].log


def test_the_frontier_has_its_marks() -> None:
    dossier = make_dossier()
    found = pictures.frontier(dossier)
    assert found is not None and dossier.plan is not None and found.x.label == "share of KV cache"
    line, chosen, *others = found.series
    assert len(line.points) == 11 and (chosen.style, chosen.name) == ("diamond", "this run")
    share = kv_bytes_per_token(dossier.plan.target) / kv_bytes_per_token(dossier.plan.source)
    assert chosen.points[0] == pytest.approx((share, 0.0123))
    assert [one.name for one in others] == ["portable", "uniform"]
    assert chosen.parts[0].points[0][1] == 0.0286 and chosen.parts[0].intervals == ((0.0156, 0.0417),)
    assert pictures.frontier(replace(dossier, plan=replace(dossier.plan, budgets=()))) is None
