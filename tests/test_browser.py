"""The report in a real browser: it works, it fetches nothing, and what it shows is what the solver answers.

Needs Chromium (`make browser`) and the extra `browser`; skipped where they are not.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import Visit, barriers, lines, planned, sizes, wide
from conftest import Invented, invent
from report_parts import HOSTILE, make_dossier, make_verdict

from headwise.report import compare, render
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import frontier
from headwise.stages.allocate import allocate_in
from headwise.stages.report import write_report
from headwise.types import BeforeAfter, Measure, Plan

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install headwise[browser]"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium was found: make browser installs it")
UNFOLD = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
ALLOW = ("qk", "v", "mlp", "heads", "kv_heads", "depth")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder as the stages leave it, of a model that does not exist: every unit may go, whole layers too."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "run")
    settings = Settings(model="invented", budgets=("params=80%",), allow=ALLOW)
    settings.save(folder.settings_file)
    invent(3, Invented(layers=5, kv_heads=2, queries_per_group=2, dim=16, mlp_width=64, sizes=4)).save(
        folder.readings_file
    )
    plan = allocate_in(folder.path, ("params=80%",), "exact", ALLOW, False, 0)
    gains = {"attention": {"error_before": 0.2, "error_after": 0.1}, "mlp": {"error_before": 0.3, "error_after": 0.2}}
    folder.write_json(
        folder.heal_file,
        {"method": "refit", "layers": [gains] * 4, "curve": [{"step": step, "loss": 3.0 / step} for step in (1, 2, 3)]},
    )
    folder.record_model(settings, ("heal.json",))
    folder.record_verdict(make_verdict(plan))
    write_report(folder)
    return folder


def test_the_slider_shows_the_solvers_own_answers(browser: Any, run: RunFolder, tmp_path: Path) -> None:
    again = RunFolder(shutil.copytree(run.path, tmp_path / "again"))
    with Visit(browser, run.report_file) as page:
        slider = page.locator("#budget")
        assert sizes(page) == planned(Plan.read(run.plan_file)) and page.inner_text("#budget-state") == "this run"
        seen = set()
        for key in ("End", "ArrowLeft", *["PageDown"] * 4, "Home"):
            slider.press(key)
            copy, line, *_ = page.inner_text("#budget-command").splitlines()
            command, (_, _, own, new) = shlex.split(line), shlex.split(copy)
            assert command[:3] == ["headwise", "allocate", new] and own == str(run.path) != new, "into a new folder"
            assert page.inner_text("#budget-text") == page.inner_text("#preview-text") == command[4]
            plan = allocate_in(again.path, (command[4],), "exact", tuple(command[6].split(",")), False, 0)
            assert sizes(page) == planned(plan), f"{command[4]}: as headwise allocate decides"
            kept = sum(len(re.findall("M", d)) for d, _ in lines(page)) > 0
            removed = page.locator("#model tr.removed").count()
            assert kept and removed == sum(layer.gone for layer in plan.target.layers)
            damage = float(re.search(r"([\d.e-]+) nats", page.inner_text("#budget-damage")).group(1))  # type: ignore[union-attr]
            assert damage == pytest.approx(plan.predicted_damage, rel=6e-3, abs=1e-9)
            spent = page.inner_text("#costs tbody tr:first-child td:nth-child(3)").replace(",", "")
            assert float(spent) == pytest.approx(plan.spent["params"], rel=1e-3)
            seen.add(str(sizes(page)))
        assert len(seen) > 4, "the allocation changes as the slider moves"
        page.click("#own")
        assert sizes(page) == planned(Plan.read(run.plan_file)) and page.locator("#own").is_hidden()


def bars(page: Any) -> list[tuple[float, float]]:
    """Damage of every layer on the screen: the number, and the width of its bar."""
    script = """rows => rows.map(row => [row.querySelector(".c-damage").innerText,
        parseFloat(row.querySelector(".b-dmg").style.width)])"""
    return [(float(words), width) for words, width in page.eval_on_selector_all("#model tbody tr", script)]


def test_a_preview_is_marked_keeps_its_scale_and_has_an_address(browser: Any, run: RunFolder) -> None:
    with Visit(browser, run.report_file) as page:
        own = bars(page)
        assert "#" not in page.url and page.locator("#preview").is_hidden()
        page.locator("#budget").press("Home")
        assert "Preview, not built" in page.inner_text("#preview") and page.inner_text("#model .c-after") == "preview"
        assert page.inner_text("#budget-whose") == "Preview"
        assert page.inner_text("#own-measured").startswith("This run, measured after healing: +2.9% perplexity")
        every = sorted({*own, *bars(page)})
        assert all(a[1] <= b[1] for a, b in zip(every, every[1:], strict=False) if a[0] < b[0]), "one scale for both"
        assert bars(page) != own
        address = page.url
        assert "#budget=" in address
        again = page.context.new_page()
        again.goto(address)
        assert again.inner_text("#budget-text") == page.inner_text("#budget-text") and sizes(again) == sizes(page)
        again.evaluate("location.hash = '#damage'")
        again.wait_for_function("document.getElementById('damage').open")
        page.click("#own")
        assert "#" not in page.url and bars(page) == own


def test_kept_heads_are_the_plans(browser: Any, run: RunFolder, tmp_path: Path) -> None:
    """The script works out which heads stay; it must draw what a page for that plan would be written with."""
    again = RunFolder(shutil.copytree(run.path, tmp_path / "again"))
    with Visit(browser, run.report_file) as page:
        before = run.report_file.read_text().split('id="model"')[1].split("</table>")[0]
        written = re.findall(r' d="([^"]*)" stroke-width="([^"]*)"', before)
        assert lines(page) == written, "what the script draws for this run is what the page was written with"
        sweep = frontier.stored(run.frontier_file, json.loads(run.frontier_file.read_text())["key"])
        assert sweep is not None
        with_fewer = next(a for a in sweep.answers if any(0 < s.query_heads < 4 for s in sweep.target(a)))
        page.locator("#budget").fill(str(len(sweep.answers) - 1 - sweep.answers.index(with_fewer)))
        assert page.inner_text("#budget-text") == with_fewer.text
        drawn = lines(page)
    allocate_in(again.path, (with_fewer.text,), "exact", ALLOW, False, 0)
    write_report(again)
    table = again.report_file.read_text().split('id="model"')[1].split("</table>")[0]
    assert drawn == re.findall(r' d="([^"]*)" stroke-width="([^"]*)"', table)


def test_a_layer_chosen_anywhere_is_chosen_everywhere(browser: Any, run: RunFolder) -> None:
    chosen = "parts => [...new Set(parts.map(part => part.dataset.layer))]"
    with Visit(browser, run.report_file) as page:
        page.evaluate(UNFOLD)
        page.locator("#model tbody tr").nth(2).click()
        assert page.eval_on_selector_all(".on[data-layer]", chosen) == ["2"] and page.input_value("#layer") == "2"
        assert page.locator("#damage svg .on").count() > 3 and page.locator("#healing svg .on").count() == 2
        assert page.locator(".heat .ring").first.is_visible() and "Layer 2" in page.inner_text("#inspect")
        page.locator("#damage .pickable").first.press("ArrowDown")
        assert page.input_value("#layer") == "3" and page.locator("#model tr.on th").inner_text() == "3"
        page.keyboard.press("Escape")
        assert page.locator(".on[data-layer]").count() == 0 and page.locator("#inspect").is_hidden()
        page.locator("#layer-after").press("Enter")
        assert page.input_value("#layer") == "0"
        page.locator("#damage svg.lines g[data-layer='1'] polyline").first.dispatch_event("click")
        assert page.eval_on_selector_all(".on[data-layer]", chosen) == ["1"]
        page.select_option("#layer", "4")
        assert page.locator("#model tr.on th").inner_text() == "4"


def test_heat_maps_read_out_their_values(browser: Any, run: RunFolder) -> None:
    readings = json.loads(run.readings_file.read_text())
    values = next(r for r in readings["curves"] if r["kind"] == "damage.v")
    with Visit(browser, run.report_file) as page:
        page.evaluate(UNFOLD)
        box = page.locator(".reading", has=page.locator("summary", has_text="value directions dropped")).first
        canvas = box.locator("canvas")
        canvas.press("ArrowDown")
        canvas.press("ArrowRight")
        words = box.locator(".read").inner_text()
        at = int(re.search(r" (\d+): ", words).group(1))  # type: ignore[union-attr]
        exact = values["values"][1][values["ticks"][1].index(at)]
        assert words.startswith("layer 1, ") and page.input_value("#layer") == "1"
        assert float(re.search(r": ([\d.e+-]+)", words).group(1)) == pytest.approx(exact, rel=1e-3)  # type: ignore[union-attr]
        canvas.hover(position={"x": 3, "y": 3})
        assert box.locator(".read").inner_text().startswith("layer 0, ")
        assert box.locator("details.table tbody tr").count() == 5, "the same numbers as a table"


def test_tables_sort_and_leave_as_csv(browser: Any, run: RunFolder, tmp_path: Path) -> None:
    with Visit(browser, run.report_file) as page:
        page.evaluate(UNFOLD)
        table = page.locator("table[data-name='damage by layer']")
        table.locator("th button").last.click()
        totals = [float(words) for words in table.locator("tbody td:last-child").all_inner_texts()]
        assert totals == sorted(totals) and table.locator("th").last.get_attribute("aria-sort") == "ascending"
        table.locator("th button").last.press("Enter")
        assert [float(w) for w in table.locator("tbody td:last-child").all_inner_texts()] == totals[::-1]
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Download damage by layer as CSV").click()
        waiting.value.save_as(tmp_path / "table.csv")
        rows = (tmp_path / "table.csv").read_text().splitlines()
        assert rows[0].startswith("layer,") and len(rows) == 6 and float(rows[1].split(",")[-1]) == max(totals)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_switch(browser: Any, run: RunFolder, scheme: str) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    with Visit(browser, run.report_file, color_scheme=scheme) as page:
        first = page.evaluate(ground)
        assert (first > 128) == (scheme == "light")
        page.locator("#theme").press("Enter")
        assert (page.evaluate(ground) > 128) == (scheme == "dark"), "the switch overrules the system"


def test_a_finger_moves_the_slider(browser: Any, run: RunFolder) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with Visit(browser, run.report_file, **phone) as page:
        page.locator("#budget").scroll_into_view_if_needed()
        before, box = sizes(page), page.locator("#budget").bounding_box()
        page.touchscreen.tap(box["x"] + 12, box["y"] + box["height"] / 2)
        assert sizes(page) != before and page.inner_text("#budget-state") != "this run"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    path.write_text(render(make_dossier(model=f"evil {HOSTILE}", text=HOSTILE)))
    return path


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty layers, with a frontier."""
    dossier = make_dossier(80)
    assert dossier.readings is not None and dossier.plan is not None
    sweep = frontier.solve(dossier.readings, dossier.plan, ("v",), seconds=3.0)
    path = tmp_path_factory.mktemp("deep") / "report.html"
    path.write_text(render(replace(dossier, sweep=sweep)))
    return path


def test_narrow_screens_scroll_one_way_only(browser: Any, run: RunFolder, hostile: Path, deep: Path) -> None:
    for path in (run.report_file, hostile, deep):
        with Visit(browser, path, viewport={"width": 360, "height": 740}) as page:
            assert wide(page) == 0
            page.evaluate(UNFOLD)
            assert wide(page) == 0, "nor when everything is unfolded"


def test_hostile_text_is_shown_as_text(browser: Any, hostile: Path) -> None:
    with Visit(browser, hostile) as page:
        assert "<img src=x onerror=alert(1)>" in page.inner_text("h1")
        assert "<img src=x onerror=alert(1)>" in page.inner_text("#samples")
        assert page.locator("img, iframe, object, main script, header script").count() == 0
        assert "<img src=x" in page.title()


def test_a_deep_model_stays_light_and_works(browser: Any, deep: Path) -> None:
    assert deep.stat().st_size < 3_000_000
    with Visit(browser, deep) as page:
        assert page.locator("#model tbody tr").count() == 80
        page.locator("#budget").press("Home")
        assert page.inner_text("#budget-state") == "preview, not built"


def test_paper_takes_four_pages_at_most(browser: Any, run: RunFolder, deep: Path) -> None:
    for path in (run.report_file, deep):
        with Visit(browser, path) as page:
            paper = page.pdf(format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "1.5cm"))
            assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 4


def test_a_narrow_screen_has_a_menu(browser: Any, run: RunFolder) -> None:
    with Visit(browser, run.report_file, viewport={"width": 360, "height": 740}) as page:
        link = page.locator("#links a", has_text="Verified")
        assert link.is_hidden()
        page.locator("#menu").press("Enter")
        assert link.is_visible() and page.locator("#menu").get_attribute("aria-expanded") == "true"
        link.click()
        assert link.is_hidden() and page.url.endswith("#certificate")


def test_several_runs_open_on_one_page(browser: Any, run: RunFolder, tmp_path: Path) -> None:
    page_file = tmp_path / "compare.html"
    links = {"one": "one/report.html"}
    page_file.write_text(compare([("one", run.dossier()), (f"evil {HOSTILE}", run.dossier())], links))
    with Visit(browser, page_file, viewport={"width": 360, "height": 740}) as page:
        assert page.locator("#runs table").first.locator("tbody tr").count() == 2 and wide(page) == 0
        assert page.locator("#runs a").first.get_attribute("href") == "one/report.html"
        page.locator("#runs th button", has_text="run").first.click()
        assert "<script>" in page.locator("#runs tbody tr").first.inner_text()
        assert barriers(page) == {}


def test_a_model_that_keeps_no_cache_opens(browser: Any, tmp_path: Path) -> None:
    dossier = make_dossier()
    assert dossier.plan is not None and dossier.verdict is not None
    plan = dossier.plan
    plan = replace(plan, source=replace(plan.source, cached=False), target=replace(plan.target, cached=False))
    plan = replace(plan, budgets=plan.budgets[1:])
    verdict = replace(dossier.verdict, quality={"cosine": BeforeAfter(Measure(0.99, 0.98, 1.0))}, samples=())
    (tmp_path / "report.html").write_text(render(replace(dossier, plan=plan, verdict=verdict)))
    with Visit(browser, tmp_path / "report.html") as page:
        assert page.locator(".card").count() == 4 and "KV cache" not in page.inner_text("#costs")


def test_a_run_that_stopped_early_opens(browser: Any, tmp_path: Path) -> None:
    whole = make_dossier()
    for name, dossier in {
        "probed": replace(whole, plan=None, healing=None, verdict=None, baselines=()),
        "empty": Dossier(),
        "old": replace(whole, readings=None),
    }.items():
        (tmp_path / f"{name}.html").write_text(render(dossier))
        with Visit(browser, tmp_path / f"{name}.html") as page:
            assert page.locator("#budget").count() == 0 and wide(page) == 0


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_barrier(browser: Any, run: RunFolder, scheme: str, width: int) -> None:
    with Visit(browser, run.report_file, color_scheme=scheme, viewport={"width": width, "height": 740}) as page:
        page.evaluate(UNFOLD)
        page.select_option("#layer", "1")
        assert barriers(page) == {}
