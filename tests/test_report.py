"""The report: facts that appear, text that cannot break out, pictures whose data is right."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from report_parts import HOSTILE, check_page, data_of, make_dossier, scripts

from headwise.cost import kv_bytes_per_token
from headwise.report import _facts as facts
from headwise.report import model_card, render
from headwise.report._answer import next_step
from headwise.report._commands import how_to_make, run_command
from headwise.report._healing import HealRow, healing_parts
from headwise.report._html import script
from headwise.report._judged import advice
from headwise.report._sizes import sizes_of
from headwise.report._svg import Scale, spread
from headwise.report._text import cell, fence, number
from headwise.runs.dossier import Dossier
from headwise.runs.settings import Settings
from headwise.types import (
    Answer,
    BeforeAfter,
    Budget,
    Check,
    Healing,
    HealingStage,
    Measure,
    Reading,
    Sweep,
    Verdict,
)
from headwise.types.measure import grouped

MISSING = [
    {"verdict": None},
    {"healing": None},
    {"readings": None},
    {"plan": None},
    {"plan": None, "healing": None, "verdict": None, "baselines": ()},
    {"readings": None, "plan": None, "healing": None, "verdict": None, "baselines": ()},
    {"readings": None, "plan": None, "healing": None, "verdict": None, "baselines": (), "settings": None},
]


def test_the_answer_comes_first() -> None:
    page = render(make_dossier())
    check_page(page)
    assert "http://" not in page and "https://" not in page
    first = page[: page.index("<section")]
    for fact in (
        "<h1>tiny-llama at kv=90%, params=1T</h1>", "✓ sizes verified", "quality within limit", "Safe to use", "+2.9%",
        "perplexity, measured after healing", "95% interval +1.6% to +4.3%", "counted, exact", "3.210 → 2.870 ms",
        "KV cache at most 90% of the source", "limit: 90%", "less KV cache", "fewer parameters",
        "FLOPs a prompt", "load it", "headwise.load(",
    ):  # fmt: skip
        assert fact in first, fact
    assert first.count("%</div>") == 5, "one quality, three sizes, one time"
    assert "+1.2%" not in first, "what is predicted is no quality"
    assert "trust_remote_code=True" in page and "with the portable plan 0.031" in page
    order = [
        page.index(f'id="{name}"')
        for name in (
            "map",
            "frontier",
            "samples",
            "certificate",
            "reproduce",
            "advanced",
            "baselines",
            "damage",
            "layers",
            "healing",
            "record",
        )
    ]
    assert order == sorted(order)


def test_page_and_card_hold_the_same_facts() -> None:
    dossier = make_dossier()
    for text in (render(dossier), model_card(dossier)):
        for fact in (
            "parameters as planned", "✓ pass", "0.9312", "0.0287 to 0.0316", "outside the interval", "uniform",
            "little", "test CPU",
            "2025-01-02", "32,768", "held out from stdlib", "headwise run acme/tiny-llama", "1024 → 512",
            "predicted before healing: 0.0123",
            "refit",
        ):  # fmt: skip
            assert fact in text, fact


def test_a_portable_result_needs_no_custom_code() -> None:
    dossier = make_dossier()
    assert dossier.plan is not None
    dossier = replace(dossier, plan=replace(dossier.plan, portable=True))
    for text in (render(dossier), model_card(dossier)):
        assert "Portable" in text and "no custom code" in text and "trust_remote_code=True" not in text


def test_a_failed_check_is_loud_and_not_by_colour_alone() -> None:
    dossier = make_dossier()
    assert dossier.verdict is not None
    bad = (*dossier.verdict.checks, Check("budget kv=90%", False, "9", "at most 8"))
    dossier = replace(dossier, verdict=replace(dossier.verdict, checks=bad))
    for text in (render(dossier), model_card(dossier)):
        assert "1 of 3 checks FAILED (budget kv=90%)" in text and "✗ FAIL" in text
    assert "✗ sizes: 1 of 3 checks FAILED" in render(dossier) and "✗ Do not use it" in render(dossier)
    assert dossier.verdict is not None
    unchecked = replace(dossier, verdict=replace(dossier.verdict, checks=()))
    assert "✗ sizes not verified" in render(unchecked) and "no checks were made" in model_card(unchecked)


@pytest.mark.parametrize("gone", MISSING)
def test_a_run_that_stopped_early_says_what_to_type(gone: dict[str, Any]) -> None:
    dossier = replace(make_dossier(), **gone)
    page, card = render(dossier), model_card(dossier)
    check_page(page)
    assert (
        card.startswith("---\nlibrary_name: transformers\n")
        and "headwise report DIR" in page
        and "headwise report DIR" in card
    )


def test_missing_stages_are_made_in_order() -> None:
    empty = Dossier(Settings("a b", ("kv=50%",)))
    lines = how_to_make(empty, "verify").splitlines()
    assert [line.split()[1] for line in lines] == ["probe", "allocate", "heal", "verify", "report"]
    assert lines[0] == "headwise probe 'a b' --budget kv=50% --out DIR --overwrite"
    named = how_to_make(replace(empty, folder="my runs/a"), "verify").splitlines()
    assert named[1:3] == ["headwise allocate 'my runs/a' --budget kv=50%", "headwise heal 'my runs/a'"]
    assert how_to_make(replace(make_dossier(), verdict=None), "verify") == "headwise verify DIR\nheadwise report DIR"
    assert "headwise reshape DIR" in how_to_make(replace(empty, settings=Settings("a b", heal="none")), "verify")


def test_planned_sizes_stand_in_for_counted_ones() -> None:
    dossier = replace(make_dossier(), verdict=None)
    assert dossier.plan is not None
    _, cache, size, time = facts.measures(dossier)
    assert cache.planned and size.planned and time.after is None
    assert (cache.before, cache.after) == (
        kv_bytes_per_token(dossier.plan.source),
        kv_bytes_per_token(dossier.plan.target),
    )
    assert "will need" in facts.headline(dossier) and "not been measured" in facts.headline(dossier)


def test_any_key_of_the_verdict_may_be_missing_or_odd() -> None:
    dossier = make_dossier()
    assert dossier.verdict is not None
    for odd in ({}, {"perplexity_after": float("nan")}, {"perplexity_after": 3.0, "new_thing": 7.5}):
        verdict = replace(dossier.verdict, quality=grouped(odd), size={}, speed={}, damage={}, samples=())
        page = render(replace(dossier, verdict=verdict, healing=Healing("none"), baselines=()))
        check_page(page)
    assert "New thing" in page and "7.5" in page


def test_hostile_text_stays_text() -> None:
    dossier = make_dossier(model=HOSTILE, text=HOSTILE)
    page = render(dossier)
    check_page(page)
    assert "&lt;script&gt;" in page and "<img" not in page and "\x00" not in page
    assert "<" not in scripts(page)[0] and "\u2028" not in page and "alert(" not in script()
    card = model_card(dossier)
    card.encode("utf-8")
    assert "base_model" not in card, "what cannot be a name on the Hub stays out of the front matter"
    widths: list[int] = []
    block, columns = "", 0
    for line in card.split("---\n", 2)[2].splitlines():
        if block:
            block = "" if line == block else block
        elif line.startswith("```"):
            block = re.match("`+", line).group()  # type: ignore[union-attr]
        else:
            assert "<" not in line and "`" not in line.replace("`folder`", "")
            here = line.count("|") if line.startswith("| ") else 0
            assert not (here and columns) or here == columns, "every row has as many cells as its head"
            columns = here
            widths.append(here)
    assert not block and max(widths) > 5


def test_hostile_readings_stay_text() -> None:
    dossier = make_dossier()
    assert dossier.readings is not None
    odd = replace(dossier.readings.curves[0], kind=HOSTILE, axis=HOSTILE, unit=HOSTILE, meaning=HOSTILE, probe=HOSTILE)
    page = render(replace(dossier, readings=replace(dossier.readings, curves=(odd,))))
    check_page(page)
    told = data_of(page)["heats"][0]
    assert "</title></svg><script>" in told["kind"] and "onerror" in told["unit"], "as text, inside the data"


def test_eighty_layers_stay_small() -> None:
    dossier = make_dossier(80)
    assert dossier.readings is not None
    ticks = tuple(range(1024, 128, -4))
    long = Reading(
        "s",
        "damage.mlp",
        "mlp_width",
        (ticks,) * 80,
        (tuple(1e-6 * i for i in range(224)),) * 80,
        None,
        "nats",
        "Long.",
        1,
        0,
    )
    page = render(replace(dossier, readings=replace(dossier.readings, curves=(*dossier.readings.curves, long))))
    check_page(page)
    assert len(page.encode()) < 1_000_000 and len(model_card(dossier).encode()) < 60_000


def test_the_card_has_front_matter_for_the_hub() -> None:
    head = model_card(make_dossier()).split("---\n")[1]
    assert 'base_model: "acme/tiny-llama"' in head and "- headwise" in head and "- tailored" in head


def test_healing_is_read_per_part() -> None:
    parts = healing_parts(make_dossier().healing)
    assert set(parts) == {"attention", "mlp"} and parts["attention"][1] == HealRow(1, 0.05, 0.02)


def test_the_command_can_be_pasted() -> None:
    settings = {**facts.settings_of(make_dossier()), "portable": True, "tokens": 4096}
    assert run_command(settings, "my runs/new") == (
        "headwise run acme/tiny-llama --budget kv=90% --budget params=1T --eval 'eval file.txt' --portable "
        "--allow qk,v,mlp,heads,kv_heads --tokens 4096 --out 'my runs/new'"
    ), "the run's own options, none that are as usual"
    assert run_command({}, "DIR") == "headwise run MODEL --budget kv=75% --out DIR"


def test_one_sentence_says_whether_it_is_safe_and_one_command_what_to_do() -> None:
    dossier = replace(make_dossier(), folder="runs/a")
    assert dossier.verdict is not None and dossier.plan is not None and dossier.settings is not None
    good = replace(dossier.verdict, max_loss="10%", limit=0.0953, length=512)

    def said(verdict: Verdict, **more: Any) -> tuple[str, str]:
        found = replace(dossier, verdict=verdict, **more)
        return " ".join(advice(verdict)), next_step(found).code

    assert said(good) == (
        "✓ Safe to use for texts of up to 512 tokens.",
        'import headwise\nmodel = headwise.load("runs/a/model")',
    )
    words, code = said(replace(good, context=2048))
    assert "! Safe to use for texts of up to 512 tokens; longer ones were not measured" in words and "load" in code
    words, code = said(replace(good, max_loss="2%", limit=0.02))
    assert "! Use it with care: the limit of 2% lies inside the interval" in words
    assert "--eval-tokens 131072" in code and code.endswith("--out runs/a-more")
    bad = replace(good, max_loss="1%", limit=0.01)
    words, code = said(bad, settings=replace(dossier.settings, heal="none"))
    assert "✗ Do not use it as it is" in words and code.splitlines()[:2] == [
        "cp -r runs/a runs/a-refit",
        "headwise heal runs/a-refit",
    ]
    layers = (0,) * len(dossier.plan.keep)
    answers = tuple(Answer(f"kv={p}%", p / 100, 0.02 - p / 5000, 0.0, layers) for p in (100, 95, 50))
    sweep = Sweep("k", "kv", (), ("qk", "v"), dossier.plan.source.layers[:1], answers, 3, True)
    _, code = said(bad, sweep=sweep)
    assert code.splitlines()[1] == "headwise allocate runs/a-kv95 --budget kv=95% --allow qk,v", (
        "the least that should do"
    )
    assert "--heal distill" in said(bad)[1], "where no budget is known that would do"
    far = replace(good, quality=good.quality | {"kl": BeforeAfter(Measure(0.7, 0.6, 0.8))})
    assert "but answers differ from the source's (KL 0.7)" in said(far)[0]


def test_scales_and_words() -> None:
    assert (
        Scale(0, 10, 0, 100)(5) == 50
        and Scale(1, 100, 0, 10, log=True)(10) == 5
        and Scale(1, 100, 0, 10, log=True)(0) == 0
    )
    assert Scale(0.001, 1, 0, 1, log=True).ticks() == pytest.approx([0.001, 0.01, 0.1, 1])
    assert Scale(0, 1, 0, 1).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    placed = sorted(spread([95, 96, 97], 10, 0, 100))
    assert all(b - a >= 10 for a, b in zip(placed, placed[1:], strict=False)) and placed[-1] <= 100
    assert number(None) == "–" and number(12345.6) == "12,346" and number(1e-5) == "0.00001"
    assert fence("a```b").startswith("````\n") and "\n" not in cell("a\nb") and "|" not in cell("a|b")


def test_importing_the_report_does_not_import_torch() -> None:
    code = "import sys, headwise.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_healing_that_was_left_out_is_not_called_one() -> None:
    dossier = make_dossier()
    left_out = Healing("refit", kept=False, stages=(HealingStage("refit", 0, 0.0, kept=False),))
    assert facts.measured_words(dossier) == "measured after healing"
    assert facts.measured_words(replace(dossier, healing=left_out)) == "measured, without healing"


def test_sizes_say_for_what_texts_and_in_what_unit_they_are_counted() -> None:
    plan = make_dossier().plan
    assert plan is not None
    budget = Budget("memory", "bytes", 1e9, 1024, "memory=1GB@1k,b8", batch=8)
    labels = [size.full_label for size in sizes_of(replace(plan, budgets=(budget,), spent={"memory": 1e9}))]
    assert labels[0] == "bytes of the weights plus the cache of 8 texts of 1,024 tokens"
    assert "KV cache, bytes per token" in labels and "parameters" in labels
