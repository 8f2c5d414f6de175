"""Writes tables and pictures of the README and of pages in docs/ from committed results: no figure is typed by hand.

python benchmarks/tables.py          # rewrite the pages in PAGES, docs/PARAMETERS.md and docs/allocation.svg
python benchmarks/tables.py --check  # exit 1 if they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import bits_page
import faq
import memory_page
import parameters_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {  # result file -> how pages call the model
    "quality-embedded.json": "embedded (Python code)",
    "field-stories15M-kv.json": "stories15M (TinyStories)",
    "field-smollm2-kv.json": "SmolLM2-135M (Q4_1, dequantised)",
    "quality-tinyllama.json": "TinyLlama-1.1B (IQ2_XXS, dequantised)",
}
METHODS = {  # as a result calls it -> as a page does
    "published": "recipe of A3 (`published`)",
    "uniform + refit": "equal sizes + refit",
    "exact": "`exact`",
    "exact + refit": "`exact` + refit",
}
HEALED = {  # results of quality.py for the cache -> how pages call the model
    **{f"field-embedded-{part}.json": "embedded" for part in ("kv", "pooled")},
    **{f"field-stories15M-{part}.json": "stories15M" for part in ("kv", "pooled")},
    **{f"field-smollm2-{part}.json": "SmolLM2-135M (Q4_1, dequantised)" for part in ("kv", "pooled")},
    **{f"quality-tinyllama{part}.json": "TinyLlama-1.1B (IQ2_XXS, dequantised)" for part in ("", "-pooled")},
}
HEALINGS = {"none": "no healing", "refit": "refit", "blockwise": "blockwise", "distill": "distilled"}


def results() -> dict[str, dict[str, Any]]:
    """The committed results, by the name of their model."""
    return {
        name: json.loads((RESULTS / file).read_text()) for file, name in MODELS.items() if (RESULTS / file).exists()
    }


def table() -> str:
    """Increase of perplexity per model, budget and method, with half the width of the 95% interval."""
    lines = [
        f"| model, KV cache kept | {' | '.join(METHODS.values())} |",
        f"| --- |{' --- |' * len(METHODS)}",
    ]
    notes = []
    for name, result in results().items():
        for budget in dict.fromkeys(row["budget"] for row in result["rows"]):
            rows = {row["method"]: row for row in result["rows"] if row["budget"] == budget}
            cells = [_cell(rows[method]) if method in rows else "" for method in METHODS]
            lines.append(f"| {name}, {budget.removeprefix('kv=')} | {' | '.join(cells)} |")
        notes.append(
            f"{name}: {result['evaluation_tokens']:,} evaluation tokens{in_rows(result)}, perplexity "
            f"{result['perplexity_before']:.2f} before, {result['calibration_tokens']:,} calibration tokens, "
            f"{result['hardware']}, {result['date']}."
        )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def in_rows(result: dict[str, Any]) -> str:
    """How long the rows of the evaluation are."""
    return f" in rows of {result['evaluation_length']:,}, the full context"


def _cell(row: dict[str, Any], digits: int = 1) -> str:
    change = math.expm1(row["measured"]) * 100
    half = (math.expm1(row["measured_high"]) - math.expm1(row["measured_low"])) * 50
    return f"{change:+.{digits}f}% ± {half:.{digits}f}"


def embeddings() -> str:
    """What a quarter of MiniLM's attention costs its embeddings, with 95% intervals."""
    result = json.loads((RESULTS / "embeddings-minilm.json").read_text())
    lines = [
        "| all-MiniLM-L6-v2 | attention parameters | cosine to the source | STS-B Spearman |",
        "| --- |" + " --- |" * 3,
    ]
    for row in result["rows"]:
        half = (row["cosine_high"] - row["cosine_low"]) / 2
        change = f"{row['change']:+.2f} ({row['change_low']:+.2f} to {row['change_high']:+.2f})"
        kept = f"{row['attention_parameters_kept']:.1%}"
        lines.append(f"| {row['method']} | {kept} | {row['cosine']:.4f} ± {half:.4f} | {change} |")
    before = result["rows"][0]["spearman_before"]
    note = (
        f"- {result['evaluation']}, {result['pairs']:,} pairs, Spearman {before:.2f} before; calibrated on "
        f"{result['calibration_tokens']:,} tokens of {result['calibration']}; {result['hardware']}, {result['date']}."
    )
    return "\n".join([*lines, "", note])


def healing() -> str:
    """What each healing leaves of the damage of the solver's plan, for models cut per head and pooled."""
    lines, notes = [], []
    for file, name in HEALED.items():
        if not (RESULTS / file).exists():
            continue
        result = json.loads((RESULTS / file).read_text())
        heads = "per head" if result["settings"]["pool"] == "none" else "pooled"
        for budget in result["settings"]["budgets"]:
            rows = {row["heal"]: row for row in result["rows"] if (row["budget"], row["plan"]) == (budget, "exact")}
            cells = [_cell(rows[heal], 2) if heal in rows else "" for heal in HEALINGS]
            lines += [f"| {name}, {budget.removeprefix('kv=')} | {heads} | {' | '.join(cells)} |"] if rows else []
        notes.append(
            f"- {name}, {heads}: {result['evaluation_tokens']:,} evaluation tokens{in_rows(result)}, "
            f"{result['calibration_tokens']:,} calibration tokens, {result['healing_tokens']:,} for training; healing "
            f"options {', '.join(result['settings']['heal_options']) or 'as they are'}; {result['hardware']}, "
            f"{result['date']}, commit {result['commit']}."
        )
    head = [f"| model, KV cache kept | heads | {' | '.join(HEALINGS.values())} |", "| --- |" + " --- |" * 5]
    return "\n".join([*head, *lines, "", *notes])


def speed() -> str:
    """Decode steps of a large model where compiled stock code was timed beside ours: it is the rival."""
    result = json.loads((RESULTS / "generate.json").read_text())
    rivals = {
        "stock": "transformers, eager", "stock compiled": "transformers, compiled", "uncut": "Headwise, uncut",
        "kv 50%": "half the dimensions", "kv 25%, coded": "a quarter, in bits",
    }  # fmt: skip
    head = f"| Llama-3-8B's shape, batch x context | {' | '.join(rivals.values())} |"
    lines = [head, "| --- |" + " --- |" * len(rivals)]
    found = [row for row in result["rows"] if row["model"] == "llama-3-8b"]
    for size in sorted({(row["batch"], row["context"]) for row in found if row["rival"] == "stock compiled"}):
        rows = {row["rival"]: row for row in found if (row["batch"], row["context"]) == size}
        stock = rows["stock compiled"]["ms"]
        cells = [f"{rows[name]['ms']:.1f} ms ({stock / rows[name]['ms']:.2f} x)" for name in rivals]
        lines.append(f"| {size[0]} x {size[1] // 1024}k | {' | '.join(cells)} |")
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = "- Milliseconds of a decode step for the whole batch, random weights, bfloat16, static cache"
    when = {f"{row['date']}, commit {row['commit']}" for row in found if row["rival"] == "stock compiled"}
    sizes = {(row["batch"], row["context"]) for row in found if row["rival"] == "stock compiled"}
    lines += ["", f"{note}; {result['hardware']}, {'; '.join(sorted(when))}, {made}."]
    return "\n".join([*lines, *_by_later_code(rivals, sizes)])


def _by_later_code(names: dict[str, str], sizes: set[tuple[int, int]]) -> list[str]:
    """What steps take by code that changed after rivals were timed."""
    rows = json.loads((RESULTS / "generate-later.json").read_text())["rows"]
    told = []
    for size in sorted(sizes):
        found = {row["rival"]: row for row in rows if (row["batch"], row["context"]) == size}
        if parts := [f"{names[name]} {found[name]['ms']:.1f} ms" for name in names if name in found]:
            told.append(f"{size[0]} x {size[1] // 1024}k: {', '.join(parts)}")
    made = "; ".join(sorted({f"{row['date']}, commit {row['commit']}" for row in rows}))
    said = f"- Our kernels changed after that; rivals were not timed again ({made}): {'; '.join(told)}."
    return [said] if told else []


PAGES = {  # page -> its blocks
    "README.md": {"cache": bits_page.named, "speed": speed},
    "docs/results.md": {
        "shares": bits_page.summary,
        "memory": memory_page.named,
        "quality": table,
        "embeddings": embeddings,
    },
    "docs/faq.md": {"quantise": faq.quantise, "calibration": faq.calibration, "longest": faq.longest},
    "docs/guides/heal.md": {"healing": healing},
}


def picture() -> str:
    """Key and value dimensions per layer of the embedded model at 75%: what stays of the 64 that each layer had."""
    rows = results()[MODELS["quality-embedded.json"]]["rows"]
    sizes = next(r["sizes"] for r in rows if r["method"] == "exact + refit" and r["budget"] == "kv=75%")
    parts = []
    for layer, (_, qk_dim, v_dim, *_) in enumerate(sizes):
        y = 46 + 24 * layer
        parts.append(f'<text x="8" y="{y + 13}">layer {layer}</text>')
        for x, kept, colour in ((80, qk_dim, "#0b62a8"), (400, v_dim, "#d98b00")):
            parts.append(f'<rect x="{x}" y="{y}" width="256" height="16" fill="#d9dce1"/>')
            parts.append(f'<rect x="{x}" y="{y}" width="{4 * kept}" height="16" fill="{colour}"/>')
            parts.append(f'<text x="{x + 262}" y="{y + 13}">{kept}</text>')
    height = 54 + 24 * len(sizes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" viewBox="0 0 720 {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">'
        "<title>What the solver keeps of every layer at 75% of the cache</title>"
        f'<rect width="720" height="{height}" fill="#fff"/>'
        '<text x="80" y="28" font-weight="bold">query/key dimensions kept of 64</text>'
        '<text x="400" y="28" font-weight="bold">value dimensions kept of 64</text>'
        f"{''.join(parts)}</svg>\n"
    )


def filled(page: str) -> str:
    """The page with every block between its marks as the results say."""
    text = (ROOT / page).read_text()
    for name, block in PAGES[page].items():
        start, end = f"<!-- {name}: printed by benchmarks/tables.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n\n{block()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    new = {page: filled(page) for page in PAGES}
    new |= {"docs/PARAMETERS.md": parameters_page.page(), "docs/allocation.svg": picture()}
    stale = [page for page, text in new.items() if (ROOT / page).read_text() != text]
    if check:
        sys.exit(f"stale: {', '.join(stale)}; run benchmarks/tables.py" if stale else 0)
    for page in stale:
        (ROOT / page).write_text(new[page])
        print(f"{page}: written anew")


if __name__ == "__main__":
    main()
