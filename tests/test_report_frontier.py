"""The frontier around a plan: dense, exact, solved once, and what the page's slider is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Invented, invent
from report_parts import (
    check_page,
    data_of,
)

from headwise import strategies
from headwise.budgets import parse
from headwise.cost import parameters
from headwise.report import render
from headwise.report._explore import explorer
from headwise.report._sizes import sizes_of
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import frontier
from headwise.stages.allocate import allocate_in
from headwise.stages.report import write_report
from headwise.types import GONE, LayerShape, Plan, Readings, Sweep

ALLOW = ("qk", "v", "mlp", "heads", "depth")


@pytest.fixture(scope="module")
def solved() -> tuple[Readings, Plan, Sweep]:
    """Invented readings, a plan for them and the frontier around it."""
    readings = invent(5, Invented(layers=3, dim=16, sizes=4))
    shape = readings.source
    plan = strategies.allocate(readings, (parse("kv=70%", shape),), "exact", ALLOW)
    sweep = frontier.solve(readings, plan, ALLOW)
    assert sweep is not None
    return readings, plan, sweep


def dossier_of(readings: Readings, plan: Plan, sweep: Sweep | None) -> Dossier:
    return Dossier(Settings("invented"), readings, plan, sweep=sweep)


def test_the_frontier_is_dense_exact_and_falls(solved: tuple[Readings, Plan, Sweep]) -> None:
    readings, plan, sweep = solved
    assert len(sweep.answers) >= 40 and sweep.done and sweep.budget == "kv"
    damages = [answer.damage for answer in sweep.answers]
    assert damages == sorted(damages) and damages[0] == 0, "less room, more damage"
    assert len(sweep.shapes) == len(set(sweep.shapes)) < len(sweep.answers) * 4 / 3, "every shape is written once"
    for answer in sweep.answers[:: len(sweep.answers) // 4]:
        asked = strategies.allocate(readings, (parse(answer.text, plan.source),), "exact", ALLOW)
        assert sweep.target(answer) == asked.target.layers and answer.damage == pytest.approx(asked.predicted_damage)
    own = next(answer for answer in sweep.answers if answer.text == "kv=70%")
    assert sweep.target(own) == plan.target.layers


def test_other_budgets_stay_and_absolute_limits_have_their_place() -> None:
    readings = invent(5, Invented(layers=3, dim=16, sizes=4))
    shape = readings.source
    texts = ("params=40k", "kv=80%@1k")
    budgets = tuple(parse(text, shape) for text in texts)
    assert budgets[0].limit < parameters(shape)
    plan = strategies.allocate(readings, budgets, "exact", ALLOW)
    sweep = frontier.solve(readings, plan, ALLOW)
    assert sweep is not None and sweep.others == ("kv=80%@1k",)
    assert any(answer.text == "params=40k" for answer in sweep.answers), "the run's own limit is one of the points"
    found = explorer(dossier_of(readings, plan, sweep))
    assert found is not None and found["answers"][found["at"]]["text"] == "params=40k"
    assert "--budget kv=80%@1k --allow qk,v,mlp,heads,depth" in found["answers"][0]["command"]
    kv = [size.budget.name for size in sizes_of(plan)].index("kv")
    assert all(float(a["costs"][kv][1].rstrip("%")) <= 80 for a in found["answers"]), (
        "the other budget holds everywhere"
    )


def test_time_runs_out_evenly_and_the_rest_is_solved_later(
    solved: tuple[Readings, Plan, Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, plan, whole = solved
    monkeypatch.setattr(frontier, "LEAST", 40)
    few = frontier.solve(readings, plan, ALLOW, seconds=-1.0)
    assert few is not None and not few.done and [a.text for a in few.answers] == [whole.answers[0].text]
    clock = iter([0.0, *[1.0] * 9, *[99.0] * 900])  # nine exact solves, then it is late; rough ones are let through
    monkeypatch.setattr(frontier, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rough = frontier.solve(readings, plan, ALLOW, seconds=5.0)
    monkeypatch.undo()
    assert rough is not None and not rough.done and [a.text for a in rough.answers] == [a.text for a in whole.answers]
    assert sum(not answer.rough for answer in rough.answers) == 10
    for answer, exact in zip(rough.answers, whole.answers, strict=True):
        assert exact.damage <= answer.damage <= exact.damage * 1.002 + 1e-12, "near the best, never below it"
    page = render(dossier_of(readings, plan, rough))
    assert f"of {whole.wanted} (headwise report DIR solves more)" in page and "to within 0.1%" in page
    later = frontier.solve(readings, plan, ALLOW, rough)
    assert later is not None and later.done
    layers = [later.target(answer) for answer in later.answers]
    assert layers == [whole.target(answer) for answer in whole.answers], "resumes with the same result"


@pytest.fixture
def few_limits() -> Iterator[None]:
    """A coarser frontier: what is solved again does not depend on how fine it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "LEAST", 8)
        yield


def test_reports_reuse_a_frontier_that_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_limits: None
) -> None:
    folder = RunFolder(tmp_path / "run")
    Settings(model="invented", budgets=("kv=70%",), allow=("qk", "v")).save(folder.settings_file)
    invent(5, Invented(layers=2, dim=16, sizes=4)).save(folder.readings_file)
    allocate_in(folder.path, ("kv=70%",), "exact", ("qk", "v"), False, 0)
    write_report(folder)
    first = folder.frontier_file.read_bytes()
    monkeypatch.setattr("headwise.strategies.exact.answers", lambda *_: pytest.fail("solved again"))
    write_report(folder)
    assert folder.frontier_file.read_bytes() == first and data_of(folder.report_file.read_text())["explorer"]
    allocate_in(folder.path, ("kv=75%",), "exact", ("qk", "v"), False, 0)
    write_report(folder)
    assert folder.frontier_file.read_bytes() == first, "another limit was answered already"
    monkeypatch.undo()
    allocate_in(folder.path, ("kv=72.345%",), "exact", ("qk", "v"), False, 0)
    write_report(folder)
    found = data_of(folder.report_file.read_text())["explorer"]
    assert found["answers"][found["at"]]["text"] == "kv=72.345%", "a limit between the others is solved beside them"
    allocate_in(folder.path, ("params=80%",), "exact", ("qk", "v"), False, 0)
    assert folder.dossier().sweep is None, "another unit is another question"
    folder.frontier_file.write_text("{")
    write_report(folder)
    assert json.loads(folder.frontier_file.read_text())["headwise"] == "Sweep", "a broken file is solved anew"
    folder.readings_file.unlink()
    write_report(folder)
    assert "There is no slider here" in folder.report_file.read_text()


def test_the_page_names_gone_layers_and_prices_every_answer(solved: tuple[Readings, Plan, Sweep]) -> None:
    readings, plan, sweep = solved
    dossier = dossier_of(readings, plan, sweep)
    page = render(dossier)
    check_page(page)
    found = data_of(page)["explorer"]
    assert [answer["share"] for answer in found["answers"]] == sorted(a.share for a in sweep.answers)
    shapes = [LayerShape(*(tuple(x) if isinstance(x, list) else x for x in shape)) for shape in found["shapes"]]
    assert [shapes[place] for place in found["own"]] == list(plan.target.layers)
    kept = [a for a in found["answers"] if all(shapes[p] != GONE for p in a["layers"])]
    for answer in kept[::10]:
        summed = sum(found["damage"][layer][str(place)] for layer, place in enumerate(answer["layers"]))
        assert summed == pytest.approx(answer["damage"], rel=1e-3, abs=1e-6), "layers' prices add up to the answer's"
