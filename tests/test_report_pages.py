"""What surrounds the report: its frontier, comparisons, notebooks, figures, the terminal, the data behind pictures."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import Invented, invent
from report_parts import (
    HOSTILE,
    Stack,
    check_page,
    curve,
    make_dossier,
    make_plan,
    make_readings,
    make_verdict,
)

from headwise import cli
from headwise.checks.quality import line_start
from headwise.cli.show import show_record
from headwise.errors import HeadwiseError, OutputError
from headwise.report import _facts as facts
from headwise.report import _pictures as pictures
from headwise.report import compare, render
from headwise.report._chart import draw
from headwise.report._compare import best, read_runs
from headwise.report._data import cut_pairs
from headwise.report._explore import heat
from headwise.report._healing import loss_curve
from headwise.report._samples import differences, in_common
from headwise.report._text import for_script
from headwise.report.figures import save_figures
from headwise.runs.dossier import Dossier
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.allocate import allocate_in
from headwise.types import GONE, Answer, BeforeAfter, Healing, LayerShape, LossPoint, Measure, Sweep, Verdict


def test_data_cannot_leave_its_script_element() -> None:
    nasty = {
        "</script><!--": ["<script>", "]]>", "\u2028\u2029", "\ud800", float("nan"), float("inf"), -1.5, True, None]
    }
    text = for_script(nasty)
    assert not set("<>&\u2028\u2029") & set(text) and text.isascii()
    assert json.loads(text) == {
        "</script><!--": ["<script>", "]]>", "\u2028\u2029", "\ufffd", None, None, -1.5, True, None]
    }


def test_generations_are_marked_where_they_differ() -> None:
    left, right = differences("a small house, old", "a little house, old")
    assert [p.text for p in left if not p.same] == ["small"] and [p.text for p in right if not p.same] == ["little"]
    assert (
        "".join(p.text for p in left) == "a small house, old"
        and "".join(p.text for p in right) == "a little house, old"
    )
    assert in_common("a b c", "a b d") == "the first 2 of 3 words are the same" and in_common("a", "a") == "identical"
    assert in_common("x", "y") == "they differ from the first word"
    page = render(make_dossier())
    assert "<del>small</del>" in page and "<ins>little</ins>" in page


def test_prompts_begin_with_a_line() -> None:
    class Words:
        all_special_ids = (0,)
        pieces = ("<s>", "rest of", " a line", "\n", "    ", "def f", "():\n", "return\nx")

        def decode(self, tokens: list[int]) -> str:
            return "".join(self.pieces[token] for token in tokens)

    def start(*row: int, most: int = 8) -> int:
        return line_start(torch.tensor(row), Words(), most)

    assert start(1, 2, 3, 5, 6) == 3 and start(1, 2, 6, 5) == 3, "after the first line break"
    assert start(1, 3, 3, 4, 5) == 3, "not with an empty line, but with its indentation"
    assert start(1, 7, 2) == 0, "a piece that holds the beginning of a line has lost it"
    assert start(0, 1, 3, 5) == 0 and start(1, 2, 2) == 0 and start(1, 2, 3, 5, most=2) == 0


def test_predictions_stand_beside_measurements() -> None:
    dossier = make_dossier()
    assert dossier.readings is not None and dossier.verdict is not None
    pairs = cut_pairs(dossier.readings)
    assert {pair.kind for pair in pairs} == {"damage.v"}, "the kind that two probes looked at"
    assert all(pair.measured == pytest.approx(1.5 * pair.predicted) for pair in pairs)
    marks = facts.damages(dossier)
    assert {name: mark.value for name, mark in marks.items()} == {
        "predicted": 0.0123, "calibration": 0.0111, "measured": 0.0286,
    }  # fmt: skip
    assert marks["measured"].low == 0.0156 and list(facts.damages(replace(dossier, verdict=None))) == ["predicted"]
    page = render(dossier)
    for named in ("predicted before healing: 0.0123", "calibration after healing, on calibration data: 0.0111",
                  "measured after healing, on evaluation data: 0.0286", "outside the interval"):  # fmt: skip
        assert named in page, named
    for old in ("rehearsed", "sum of prices", "Sum of prices", "price"):
        assert old not in page, f"{old} is no word of the report any more"


def trained(*losses: float, held_out: float | None = None) -> Healing:
    """A healing that trained, with a loss at every step; the last step was also measured on held-out text."""
    points = [LossPoint(step, loss) for step, loss in enumerate(losses)]
    return Healing("distill", curve=(*points[:-1], replace(points[-1], held_out=held_out)))


def test_loss_curves_are_drawn() -> None:
    looked = trained(2.0, math.nan, 1.5, held_out=1.7)
    assert loss_curve(looked) == ((0.0, 2.0), (2.0, 1.5)) and loss_curve(looked, held_out=True) == ((2.0, 1.7),)
    chart = pictures.loss(looked)
    assert chart is not None and "step 2: 1.7" in draw(chart) and pictures.loss(trained(3.0)) is None
    page = render(replace(make_dossier(), healing=trained(3.0, 2.0, 1.0)))
    check_page(page)
    assert "loss while healing" in page


@pytest.mark.parametrize("values", [[1e300, 1e300], [1e17, 1e17, 1e17], [-1.7e308, 1.7e308], [0.0, 0.0]], ids=str)
def test_a_loss_curve_may_be_flat_or_huge(values: list[float]) -> None:
    chart = pictures.loss(trained(*values))
    assert chart is not None
    drawn = draw(chart)
    points = re.search(r'd="M([^"]+)"|points="([^"]+)"', drawn)
    assert points and not re.search("nan|inf", drawn), "a line is drawn, at coordinates"


def test_conditioning_has_its_own_question() -> None:
    dossier = make_dossier()
    assert dossier.readings is not None
    kappa = curve("conditioning.kappa", "layer_part", (0, 1, 2), 6, 1.0)
    page = render(replace(dossier, readings=replace(dossier.readings, curves=(*dossier.readings.curves, kappa))))
    check_page(page)
    assert "How well conditioned is attention?" in page and "Conditioning kappa" in page.split('id="layers"')[1]


def test_heat_maps_hold_the_values_and_stay_small() -> None:
    readings = make_readings(make_plan(80, "m").source, "m")
    reading = readings.curves[0]
    found = heat(reading, 0, None)
    assert found.ticks == (16, 32, 48, 64) and found.rows[2][0] == pytest.approx(reading.at(2, 16), rel=1e-3)
    ticks = tuple(range(14336, 0, -64))
    long = replace(reading, ticks=(ticks,) * 80, values=(tuple(map(float, ticks)),) * 80, standard_error=None)
    assert len(heat(long, 0, None).ticks) <= 24 and {64, 14336} <= set(heat(long, 0, None).ticks), "both ends stay"


def test_eighty_layers_with_a_frontier_stay_below_three_megabytes() -> None:
    dossier = make_dossier(80)
    assert dossier.plan is not None and dossier.readings is not None
    n = len(dossier.plan.keep)
    menu = [LayerShape(16, 4, qk, v, 1024, 64) for qk in (64, 48, 32, 16) for v in (64, 48, 32, 16)]
    answers = tuple(
        Answer(f"kv={p}%", p / 100, 1.0 - p / 100, 0.0, tuple((p * i) % 16 for i in range(n)))
        for p in range(100, 20, -1)
    )
    sweep = Sweep("k", "kv", (), ("qk", "v"), tuple(menu), answers, 80, True)
    many = tuple(replace(c, kind=f"{c.kind}.{i}") for i in range(4) for c in dossier.readings.curves)
    page = render(
        replace(dossier, sweep=sweep, readings=replace(dossier.readings, curves=(*dossier.readings.curves, *many)))
    )
    check_page(page)
    assert len(page.encode()) < 3_000_000


def check_fragment(text: str) -> None:
    stack = Stack()
    stack.feed(text)
    assert (
        stack.open == [] and stack.loads == [] and "<script" not in text and text.startswith('<div class="headwise">')
    )


def test_records_show_themselves_in_notebooks() -> None:
    dossier = make_dossier(model=f"evil {HOSTILE}", text=HOSTILE)
    assert dossier.plan is not None and dossier.readings is not None and dossier.verdict is not None
    shown: dict[str, Any] = {
        "dossier": dossier, "plan": dossier.plan, "reading": dossier.readings.curves[0], "readings": dossier.readings,
        "verdict": dossier.verdict, "empty": Dossier(),
        "heads": curve("saturation.slope", "query_head", (0, 1, 2), 3),
    }  # fmt: skip
    drawn = {name: record._repr_html_() for name, record in shown.items()}
    for text in drawn.values():
        check_fragment(text)
    assert "512/1024" in drawn["plan"] and "48<small>/64</small>" in drawn["plan"]
    assert "<svg" in drawn["reading"] and "damage.qk_projected" in drawn["readings"] and "✓ pass" in drawn["verdict"]
    assert "&lt;script&gt;" in drawn["dossier"]


def other_run(factor: float, share: float) -> Dossier:
    """A run with so many times the damage, at a share of the cache."""
    dossier = make_dossier()
    assert dossier.verdict is not None
    flat = dossier.verdict.to_json()
    flat["size"]["kv_bytes_per_token_after"] = int(share * flat["size"]["kv_bytes_per_token_before"])
    flat["damage"] = {name: factor * value for name, value in flat["damage"].items()}
    return replace(dossier, verdict=Verdict.from_json(flat))


def test_runs_are_compared_on_one_frontier() -> None:
    runs = [("wide", other_run(1, 0.9)), ("half", other_run(8, 0.5)), ("worse", other_run(9, 0.6))]
    found = read_runs(runs)
    assert [run.name for run in best(found, "KV cache per token")] == ["half", "wide"], "worse costs more and is worse"
    page = compare(
        [*runs, (f"evil {HOSTILE}", replace(other_run(2, 0.8), verdict=None))], {"half": "../half/report.html"}
    )
    check_page(page)
    for fact in (
        "4 runs compared", "better than half and wide", "+2.9%", "+1.6% to +4.3%", "(predicted)", "✓ verified",
        "50.0%", "18.21 → 18.74", '<a href="../half/report.html">half</a>',
    ):  # fmt: skip
        assert fact in page, fact
    drawn = page.split('id="frontier"')[1]
    assert "evil" not in re.sub("(?s)<title>.*?</title>", "", drawn), (
        "pictures name runs by letters, which are never cut"
    )
    masked = make_dossier()
    assert masked.readings is not None
    other = replace(masked.readings, curves=tuple(replace(c, unit="1 - cosine") for c in masked.readings.curves))
    with pytest.raises(HeadwiseError, match=r"count damage in 1 - cosine and nats per token; compare runs of one task"):
        compare([*runs, ("embedding", replace(masked, readings=other))])
    with pytest.raises(HeadwiseError, match="bare holds no plan yet; type: headwise allocate bare"):
        compare([*runs, ("bare", replace(masked, plan=None))])


def folder_of(path: Path, seed: int) -> Path:
    """A run folder with a plan and a verdict, of a model that does not exist."""
    folder = RunFolder(path)
    Settings(model="invented", budgets=("kv=70%",)).save(folder.settings_file)
    invent(seed, Invented(layers=3, dim=16, sizes=4)).save(folder.readings_file)
    plan = allocate_in(folder.path, ("kv=70%",), "exact", ("qk", "v", "mlp"), False, 0)
    folder.record_verdict(make_verdict(plan))
    return path


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headwise", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_compares_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    a, b, out = folder_of(tmp_path / "a", 1), folder_of(tmp_path / "b", 2), tmp_path / "compare.html"
    assert call(monkeypatch, "report", a, b, "--out", out) == 0
    check_page(out.read_text())
    assert not (a / "report.html").exists(), "comparing leaves the runs alone"
    assert call(monkeypatch, "report", a, b, "--out", out) == 2 and "exists already" in capsys.readouterr().err
    assert call(monkeypatch, "report", a, b, "--out", out, "--overwrite") == 0
    assert call(monkeypatch, "report", a, b) == 2 and "add --out compare.html" in capsys.readouterr().err
    assert call(monkeypatch, "report", a, a, "--out", tmp_path / "c.html") == 2 and "twice" in capsys.readouterr().err
    assert call(monkeypatch, "report", a, "--out", out) == 2 and "for several runs" in capsys.readouterr().err
    assert call(monkeypatch, "report", a) == 0 and (a / "report.html").exists() and (a / "report.md").exists()


def test_figures_are_written_as_svg_and_png(tmp_path: Path) -> None:
    dossier = make_dossier(3)
    assert dossier.readings is not None
    few = tuple(c for c in dossier.readings.curves if c.kind in ("damage.v", "damage.mlp"))
    heads = curve("saturation.slope", "query_head", (0, 1), 3)
    odd = replace(heads, kind=f"../{HOSTILE}$x", axis="length$", unit="$_{")
    dossier = replace(dossier, readings=replace(dossier.readings, curves=(*few, heads, odd)))
    paths = save_figures(dossier, tmp_path / "figures")
    names = {path.stem for path in paths}
    assert {"allocation", "frontier", "damage", "healing-mlp", "damage-v", "saturation-slope"} <= names
    assert all(path.parent == tmp_path / "figures" and path.stat().st_size for path in paths), (
        "no name leaves the folder"
    )
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.parse(path)
    assert save_figures(dossier, tmp_path / "figures") == paths, "the same again, as after a kill"
    paths[1].write_text("a picture of somebody else")
    with pytest.raises(OutputError, match="exists already; choose another --figures"):
        save_figures(dossier, tmp_path / "figures")
    assert paths[1].read_text() == "a picture of somebody else"


def test_the_terminal_shows_heads_sizes_and_removed_layers(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(6, "m")
    plan = replace(plan, target=plan.target.with_layers((GONE, *plan.target.layers[1:])))
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_record(plan)
        out = capsys.readouterr().out
        rows = [line for line in out.splitlines() if line.split()[:1] in ([str(i)] for i in range(6))]
        assert "removed" in rows[0] and "48/64" in rows[1] and "512/1024" in rows[2] and "12/16 on 3" in rows[5]
        assert max(map(len, out.splitlines())) <= columns and "…" not in out
    assert "██··████" in rows[4], "a lost head leaves a gap: two columns a head, query/key and value"
    assert "▄" in rows[3] and "✓ kv=90%" in out and "predicted damage by budget" in out
    show_record(make_verdict(plan))
    out = capsys.readouterr().out
    assert "✓ pass" in out and "18.50 to 18.99" in out and "test CPU" in out


def test_the_answer_tells_a_change_of_time_that_all_repeats_show() -> None:
    whole = make_dossier()
    assert whole.verdict is not None
    for low, high, told in ((6.0, 7.0, "102% more time per generated token"), (3.0, 9.0, "")):
        time = BeforeAfter(Measure(6.5, low, high), Measure(3.21))
        slow = replace(whole.verdict, speed={**whole.verdict.speed, "decode_ms_per_token": time})
        words = facts.changes(replace(whole, verdict=slow), short=True)
        assert told in words and ("time" in words) == bool(told)
