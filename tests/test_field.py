"""The page on healing: it says what the results say, and calls a tie a tie."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def field(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("field")


def row(budget, plan, heal, measured, half=0.002, **more):
    ends = {"measured_low": measured - half, "measured_high": measured + half}
    return {
        "budget": budget,
        "plan": plan,
        "heal": heal,
        "measured": measured,
        **ends,
        "heal_tokens": 5,
        "seconds": 3.0,
    } | more


def tasks(accuracy, change=0.0):
    found = {"acc": accuracy, "acc_change": change, "acc_change_se": 0.01}
    return {"lambada": found, "piqa": {"acc": 0.0, **{f"acc_norm{k[3:]}": v for k, v in found.items()}}}


@pytest.fixture
def folder(tmp_path):
    rows = [
        row("kv=75%", "uniform", "none", 0.02),
        row("kv=75%", "exact", "none", 0.005),
        row("kv=50%", "uniform", "none", 0.1),
        row("kv=50%", "exact", "none", 0.2, zero_shot=tasks(0.4, -0.1)),
        row("kv=50%", "uniform", "refit", 0.051),
        row("kv=50%", "exact", "refit", 0.05),
        row("kv=50%", "exact, 3 rounds", "refit", 0.02),
    ]
    settings = {"data": None, "seed": 0, "heal_options": ["tokens=5"]}
    more = {"evaluation": "held out", "calibration_tokens": 9, "healing_tokens": 9, "evaluation_tokens": 9}
    more |= {
        "evaluation_length": 8,
        "probe_seconds": 1.0,
        "perplexity_before": 4.2,
        "hardware": "a machine",
        "date": "today",
        "versions": {},
    }
    result = {"settings": settings, "rows": rows, "zero_shot": tasks(0.5), **more}
    (tmp_path / "field-embedded-kv.json").write_text(json.dumps(result))
    return tmp_path


def test_tables_mark_the_best_and_what_ties_with_it(field, folder):
    page = field.page(folder)
    assert "| uniform | **+10.5% ± 0.2** | **+5.2% ± 0.2** |" not in page, "three rounds are better after a refit"
    assert "| uniform | **+10.5% ± 0.2** | +5.2% ± 0.2 |" in page
    assert "| exact, 3 rounds |  | **+2.0% ± 0.2** |" in page
    assert page.index("75% of the KV cache") < page.index("50% of the KV cache")
    assert "| tokens; seconds (medians) | 5; 3 | 5; 3 |" in page and "a machine, today" in page


def test_sentences_tell_where_the_solver_is_beaten(field, folder):
    page = field.page(folder)
    said = "In 3 comparisons (budget and healing) `exact` is better than every other plan in 1, ties with the best in 1"
    assert said in page
    assert "kv=50%, no healing: uniform is better, +10.5% ± 0.2 against +22.1% ± 0.2." in page
    assert "kv=50%, refit: +2.0% ± 0.2 in rounds, +5.1% ± 0.2 in one cut: rounds are better." in page


def test_zero_shot_averages_have_their_change(field, folder):
    page = field.page(folder)
    assert "| source | | | 50.0% | |" in page
    assert "| kv=50% | exact | no healing | 40.0% | -10.0 ± 1.4 |" in page


def test_the_picture_has_a_panel_for_every_healing(field, folder):
    drawn = ElementTree.fromstring(field.picture(folder))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"no healing", "refit", "50%", "75%", "exact", "uniform"} <= set(texts)
    assert "healing.svg" in field.page(folder)
    assert field.picture(folder / "nothing") == "" and "No results yet" in field.page(folder / "nothing")


def test_the_page_is_what_the_results_say():
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "field.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RESULTS = [path for kind in ("quality", "field", "params") for path in (ROOT / "benchmarks/results").glob(f"{kind}-*")]
CONTEXTS = {"embedded": 1024, "stories15M": 256, "stories260K": 512, "SmolLM2-135M": 8192, "TinyLlama-1.1B": 2048}


@pytest.mark.parametrize("file", sorted(RESULTS), ids=lambda path: path.stem)
def test_quality_is_measured_at_the_full_context(file):
    result = json.loads(file.read_text())
    (context,) = [size for name, size in CONTEXTS.items() if result["settings"]["model"].startswith(name)]
    assert result["evaluation_length"] == context
    assert result["settings"]["context"] is None, "calibrated for the whole context"
