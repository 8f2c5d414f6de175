"""Plans that code the cache, in everything that a person sees: page, model card, terminal, figures, comparison."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from bits_parts import ALLOW, LAYERS, ROW, code, coded, codes, hand_made
from report_parts import HOSTILE, check_page, data_of, make_dossier, make_verdict

from headwise import strategies
from headwise.budgets import parse
from headwise.cli.show import finished, show_record
from headwise.cost import kv_bytes_per_token
from headwise.report import _bits as bits
from headwise.report import _data as data
from headwise.report import _pictures as pictures
from headwise.report import _tables as tables
from headwise.report import compare, fragment, model_card, render
from headwise.report._explore import explorer, heats, layer_facts
from headwise.report.figures import COLOURS, charts, save_figures
from headwise.runs.dossier import Dossier
from headwise.runs.settings import Settings
from headwise.stages import frontier
from headwise.types import (
    UNITS,
    Healing,
    Plan,
    code_bytes,
)


@pytest.fixture(scope="module")
def dossier() -> Dossier:
    """A coded run, with its frontier and its rivals."""
    readings, plan, sweep = coded()
    found = Dossier(Settings(plan.model, ("kv=25%",)), readings, plan, Healing("none"), make_verdict(plan))
    return replace(found, sweep=sweep, baselines=frontier.rivals(readings, plan, ALLOW))


def plan_of(dossier: Dossier) -> Plan:
    assert dossier.plan is not None
    return dossier.plan


def test_rows_add_up_and_count_everything_that_is_stored() -> None:
    plan = hand_made()
    keys, values = (bits.bit_rows(plan, part) for part in bits.PARTS)
    assert [row.layer for row in keys] == [0, 1, 3], "a layer that is gone caches nothing"
    assert keys[0].spans == ((8, 8), (4, 96), (0, 152)) and (keys[0].kept, keys[0].full) == (104, ROW)
    assert values[0].spans == ((1, 32), (0, 224)) and values[1].spans == ((3, 16), (0, 48))
    assert keys[2].spans == ((16, 64),) and keys[2].mean == 16, "not coded"
    assert keys[0].bytes == code_bytes(code(b8=8, b4=96), ROW) == plan.target.layers[0].k_bytes
    assert keys[0].mean == 8 * keys[0].bytes / ROW > (8 * 8 + 4 * 96) / ROW, "scales and first tokens are counted"
    share = kv_bytes_per_token(plan.target) / kv_bytes_per_token(plan.source)
    assert bits.average_bits(plan) == pytest.approx(16 * share), "bits and percentages say the same"
    assert bits.in_bits(plan.source.layers[0], plan.target.layers[0]).startswith("keys 1.9 bits, values 0.2 bits")
    assert bits.mean_bits(plan.source.layers[2], plan.target.layers[2]) == (0.0, 0.0)


def test_a_source_that_is_coded_already_keeps_its_bits() -> None:
    plan = hand_made()
    again = replace(plan, source=plan.target.with_layers(plan.target.layers[:1]), keep=plan.keep[:1],
                    target=plan.target.with_layers(plan.target.layers[:1]))  # fmt: skip
    old = again.source.layers[0]
    assert bits.row_sizes(old) == (ROW, ROW) and bits.mean_bits(old, old) == (1.9, 0.2)
    check_page(render(Dossier(plan=again)))


def test_the_picture_of_bits_says_what_every_colour_says() -> None:
    plan = hand_made()
    chart = pictures.bits(bits.bit_rows(plan, "keys"))
    assert chart.ends == (0.0, 1.0) and chart.percent and "keys" in chart.title
    row = chart.rows[0]
    assert [(bar.start, bar.end, bar.style) for bar in row.bars] == [
        (0, 8 / 256, "bit-8"), (8 / 256, 104 / 256, "bit-4"), (104 / 256, 1, "bit-0"),
    ]  # fmt: skip
    assert row.bars[1].title == "layer 0, keys: 96 of 256 coefficients in 4 bits"
    assert row.bars[2].title == "layer 0, keys: 152 of 256 coefficients without bits"
    assert row.words == "1.9 bits" and "104 of 256 coefficients kept" in row.title and row.layer == 0


def test_the_table_of_bits() -> None:
    found = tables.layer_bits(hand_made())
    assert found.heads[0] == "layer" and found.layers and len(found.rows) == 3
    taken = hand_made().target.layers[0].row_bytes()
    assert found.rows[0] == ("0", "1.9", "0.2", "104 of 256", "32 of 256", "1", str(taken), "1,024",
                             f"{taken / 1024:.1%}")  # fmt: skip
    assert found.rows[1][5] == "2", "rows of a token"
    sizes = tables.layer_sizes(hand_made())
    assert "keys cached" in sizes.heads and "query/key dim" not in sizes.heads
    assert sizes.rows[0][3] == "104 of 256, 1.9 bits" and sizes.rows[2][3] == "64 → 0"


def test_the_page_and_the_card_of_a_coded_run(dossier: Dossier) -> None:
    page, card = render(dossier), model_card(dossier)
    check_page(page)
    plan = plan_of(dossier)
    share = kv_bytes_per_token(plan.target) / kv_bytes_per_token(plan.source)
    for text in (page, card):
        assert "The cache in bits" in text
        assert f"{share:.1%} of the source" in text and "at 16 bits per number" in text and "first 4 tokens" in text
        assert "uses the coded cache automatically" in text and "no memory is saved" in text
        assert "sliding window" in text and "slower than with a plain cache" in text
        assert "cannot hold a cache in bits" in text and re.search(r"headwise run .*--serve vllm", text)
    assert 'id="bits"' in page and page.count('class="bit-4"') > 1
    assert "Bits of keys by layer" in page and "Bits of values by layer" in page
    assert "trust_remote_code=True" in card and card.index("uses the coded cache") < card.index("## Before and after")
    assert f"{kv_bytes_per_token(plan.source):,}" in card and f"{kv_bytes_per_token(plan.target):,}" in card
    assert re.search(r"\| 0 \| 8 \| 1 \| \d+ of 256, \d\.\d bits \|", card), "layers are described in bits"
    assert "kv=20%" in card, "a budget that says something"


def test_other_runs_have_no_bits() -> None:
    page, card = render(make_dossier()), model_card(make_dossier())
    for text in (page, card):
        assert "The cache in bits" not in text and "bits per number" not in text
    assert 'id="bits"' not in page


def test_names_from_files_are_escaped() -> None:
    readings, plan, sweep = coded(model=HOSTILE)
    whole = Dossier(Settings("x"), readings, plan, verdict=make_verdict(plan, HOSTILE), sweep=sweep)
    check_page(render(whole))
    outside = re.sub(r"(`{3,})[^`].*?\1", "", model_card(whole), flags=re.S)  # in code it is shown as it is
    assert "<script" not in outside and "<img" not in outside


def test_the_model_is_drawn_in_bits(dossier: Dossier) -> None:
    page, plan = render(dossier), plan_of(dossier)
    keys, values = bits.mean_bits(plan.source.layers[0], plan.target.layers[0])
    assert ">k bits</th>" in page and ">v bits</th>" in page and "height: bits of 16" in page
    assert f'<td class="num n-qk cut">{keys:.1f}<small>/16</small></td>' in page
    found = data_of(page)["explorer"]
    assert found["bits"]["layers"][0][str(found["own"][0])] == [f"{keys:.1f}", f"{values:.1f}"]
    assert found["bits"]["layers"][0][str(found["source"][0])] == ["16.0", "16.0"]
    assert found["bits"]["rows"] == [[ROW, ROW]] * LAYERS
    places = {place for answer in found["answers"] for place in [answer["layers"][1]]}
    assert places <= {int(place) for place in found["bits"]["layers"][1]}, "the slider knows every answer's bits"
    own = [words for name, words in layer_facts(dossier)[0] if name == "In this run"]
    assert own == [f"keys {keys:.1f} bits, values {values:.1f} bits"]


def test_a_plan_without_bits_beside_a_frontier_with_them() -> None:
    readings, _, sweep = coded()
    plan = strategies.allocate(readings, (parse("kv=50%", readings.source),), "uniform", ("qk", "v"))
    page = render(Dossier(Settings("x"), readings, plan, sweep=sweep))
    check_page(page)
    assert data_of(page)["explorer"]["bits"] and ">k bits</th>" in page, "one measure for all that the slider shows"
    assert "The cache in bits" not in page, "as this plan has none"


def test_curves_of_codes(dossier: Dossier) -> None:
    assert dossier.readings is not None
    plan = plan_of(dossier)
    sets = {group.kind: group for group in data.curve_sets(dossier.readings, plan)}
    keys = sets["damage.k_bits"]
    assert keys.used and keys.earlier_probe == "fisher" and keys.reading.probe == "swap"
    assert keys.ticks[1] == code_bytes(code(b8=ROW), ROW) < 2 * ROW, "what is not coded is left out"
    taken = plan.target.layers[2].k_bytes
    assert keys.curves[2].chosen is not None and keys.curves[2].chosen[0] == taken
    chart = pictures.curves(keys)
    assert chart.x.label == "bytes of a row's keys" and f"keeps {taken} bytes" in chart.series[2].title
    assert not sets["damage.v"].used and all(one.chosen is None for one in sets["damage.v"].curves)
    pairs = [pair for pair in data.cut_pairs(dossier.readings) if pair.kind == "damage.k_bits"]
    assert len(pairs) == sum(len(codes(layer, "k")) for layer in range(LAYERS))
    assert all(pair.measured == pytest.approx(2 * pair.predicted) for pair in pairs)
    rows = data.damage_rows(dossier.readings, plan)
    assert sum(row.total for row in rows) == pytest.approx(plan.predicted_damage)
    assert all(set(row.parts) == {"bits"} for row in rows)


def test_heat_maps_of_codes_have_no_holes(dossier: Dossier) -> None:
    found = next(one for one in heats(dossier) if one.reading.kind == "damage.v_bits")
    for own, row, chosen in zip(found.reading.ticks, found.rows, found.chosen, strict=True):
        known = [value for tick, value in zip(found.ticks, row, strict=True) if tick >= min(own)]
        assert None not in known and known == sorted(known, reverse=True), "more bytes, less damage"
        assert chosen is None or chosen in found.ticks
    at = found.reading.ticks[1][3]
    fits = next(tick for tick in found.ticks if tick >= at)
    assert data.fitting(found.reading.ticks[1], fits) is not None and data.fitting((9, 5), 4) is None


def test_the_slider_goes_from_the_finest_code_to_three_percent() -> None:
    readings, plan, sweep = coded()
    shares = [answer.share for answer in sweep.answers]
    assert sweep.done and len(shares) >= 40 and min(shares) == pytest.approx(0.03)
    finest = code_bytes(code(b8=ROW), ROW) / (2 * ROW)
    assert finest <= max(shares) < finest + 0.03, "above the finest code nothing is gained"
    damages = [answer.damage for answer in sweep.answers]
    assert damages == sorted(damages) and "kv=25%" in [answer.text for answer in sweep.answers]
    steps = [round(100 * (a - b), 3) for a, b in zip(shares, shares[1:], strict=False)]
    assert steps == sorted(steps, reverse=True) and steps[-1] == 0.5, "finer where little is left"
    for answer in sweep.answers[::9]:
        asked = strategies.allocate(readings, (parse(answer.text, plan.source),), "exact", ALLOW)
        assert asked.predicted_damage == pytest.approx(answer.damage)
    found = frontier.limits(plan.budgets[0], 0.101 * 6144 / 2, readings.source, finest * 3072)
    assert min(found.values()) >= 0.101 * 3072 / 2, "no less than can be reached"


def test_the_frontier_knows_codes_and_limits_of_other_budgets() -> None:
    readings, plan, _ = coded()
    other = replace(readings, orders=tuple({**order, "k_bits": order["k_bits"][::-1]} for order in readings.orders))
    assert frontier.fingerprint(readings, plan, ALLOW) != frontier.fingerprint(other, plan, ALLOW)
    high = strategies.allocate(readings, (parse("kv=80%", readings.source),), "exact", ALLOW)
    sweep = frontier.solve(readings, high, ALLOW)
    assert sweep is not None and sweep.answers[0].text == "kv=80%", "the run's own limit is there"
    chart = pictures.frontier(Dossier(plan=high, sweep=sweep))
    assert chart is not None and chart.x.label == "share of the cache at 16 bits per number"


def test_rivals_keep_dimensions(dossier: Dossier) -> None:
    names = [rival.strategy for rival in dossier.baselines]
    assert names == ["uniform", "exact, no bits"]
    assert all(rival.predicted_damage > plan_of(dossier).predicted_damage for rival in dossier.baselines)
    page = render(dossier)
    assert (
        "The others code nothing" in page
        and "predicted by the sensitivity probe alone, that of bits by the swap probe" in page
    )


def test_the_terminal_shows_bits(
    dossier: Dossier, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = plan_of(dossier)
    show_record(plan)
    text = capsys.readouterr().out
    keys, values = bits.mean_bits(plan.source.layers[1], plan.target.layers[1])
    assert "k bits" in text and f"{keys:.1f}/16" in text and f"{values:.1f}/16" in text
    assert f"cached {bits.plan_in_bits(plan)}" in text and "scales, first and newest tokens" in text
    assert dossier.readings is not None
    show_record(dossier.readings)
    table = capsys.readouterr().out.split("damage.k_bits")[-1].split("damage.")[0].splitlines()
    heads = next(line for line in table if line.split()[:1] == ["layer"])
    layers = [line.split() for line in table if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert len(layers) == LAYERS and all(len(cells) >= len(heads.split()) - 1 for cells in layers), (
        "only codes that fit"
    )
    assert "bits per number on average" in finished(dossier, tmp_path)


def test_figures_comparison_and_notebook(dossier: Dossier, tmp_path: Path) -> None:
    assert set(COLOURS) == set(UNITS) and len(set(COLOURS.values())) == len(UNITS), "every unit has its own colour"
    drawn = charts(dossier)
    assert {"bits-keys", "bits-values", "damage-k-bits"} <= set(drawn)
    few = replace(dossier, readings=None, healing=None, verdict=None, sweep=None)
    names = {path.name for path in save_figures(few, tmp_path)}
    assert {"allocation.svg", "bits-keys.png"} <= names
    widths = {width for row in bits.bit_rows(plan_of(dossier), "keys") for width, _ in row.spans}
    assert all(bits.bit_words(width) in (tmp_path / "bits-keys.svg").read_text() for width in widths)
    plain = replace(make_dossier(), verdict=None, healing=None)
    page = compare([("coded", dossier), ("plain", replace(plain, readings=None))])
    assert "cache bits per number" in page and "with everything that is stored" in page
    assert "cache bits per number" not in compare([("a", make_dossier()), ("b", make_dossier(layers=5))])
    assert "k bits" in fragment(plan_of(dossier)) and "3" in fragment(dossier)
    assert explorer(make_dossier()) is None or explorer(make_dossier())["bits"] is None  # type: ignore[index]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slider_moves_bits_in_a_browser(dossier: Dossier, tmp_path: Path, scheme: str) -> None:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install headwise[browser]"
    )
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    chromium = os.environ.get("CHROMIUM") or next((found for name in names if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no Chromium was found: make browser installs it")
    written, plan = render(dossier), plan_of(dossier)
    (tmp_path / "page.html").write_text(written)
    assert dossier.sweep is not None
    answer = sorted(dossier.sweep.answers, key=lambda one: one.share)[0]
    keys, values = bits.mean_bits(plan.source.layers[1], dossier.sweep.target(answer)[1])
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        drawn = page.eval_on_selector_all("#model path", "all => all.map(one => one.getAttribute('d'))")
        model = written.split('id="model"')[1].split("</table>")[0]
        assert drawn == re.findall(r'<path class="\w+" d="([^"]*)"', model), (
            "the script draws what the page was written with"
        )
        page.locator("#budget").press("Home")
        page.select_option("#layer", "1")
        assert page.inner_text("tr[data-layer='1'] .n-qk") == f"{keys:.1f}/16"
        assert f"Preview at {answer.text}: keys {keys:.1f} bits, values {values:.1f} bits" in page.inner_text(
            "#inspect"
        )
        assert page.locator("#bits g.on").count() == 2, "a chosen layer is chosen in both pictures of bits"
        page.click("#own")
        page.emulate_media(media="print")
        heads = page.locator("table[data-name='bits by layer'] thead").inner_text()
        assert "bytes of a row" in heads, "tables keep their heads on paper"
        page.emulate_media(media="screen")
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = [one for one in axe.run(page).response["violations"] if one["impact"] in ("serious", "critical")]
        browser.close()
    assert complaints == [] and found == []
