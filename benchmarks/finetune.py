"""What a few steps of fine-tuning do to a source and to its cut models: 16 steps of AdamW at 1e-4, all weights.

Every kind of cut is saved twice: balanced, as Headwise saves every model, and as it would be without; `--as-saved`
leaves the second out. Text that no step has seen is read before and after. Error bars are paired: the spread over
rows of what the steps changed.

    python benchmarks/finetune.py --out benchmarks/results/finetune-embedded.json
    python benchmarks/finetune.py --page docs/serving/hub.md

The second prints benchmarks/results/finetune-*.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import kinds
import torch
import transformers
from provenance import commit
from torch import nn

from headwise import families
from headwise.files.disk import write_atomically

STEPS, RATE, ROWS = 16, 1e-4, 4
RESULTS = Path(__file__).parent / "results"
LIMIT = 0.05  # nats that a cut model may lose beyond what its source loses


def main() -> None:
    """Measure one model and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--work", type=Path, default=Path("runs/kinds"), help="where models are made")
    parser.add_argument("--out", type=Path, help="the result; needed unless there is a page to print")
    parser.add_argument("--kinds", nargs="+", default=list(kinds.KINDS), help="measured; rows of others are kept")
    parser.add_argument("--as-saved", action="store_true", help="leave out models that are not balanced")
    parser.add_argument("--page", type=Path, help="print all results into this page")
    asked = parser.parse_args()
    if asked.page:
        found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("finetune-*.json"))]
        kinds.print_page(asked.page, "finetune", Path(__file__).name, tables(found))
        return
    if asked.out is None:
        parser.error("where does the result go? Add --out FILE.")
    known = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    rows: list[dict[str, Any]] = [row for row in known if row["kind"] not in asked.kinds]
    texts = kinds.texts(asked.model)
    for kind in asked.kinds:
        rows += measured(asked.model, kind, asked.work, texts, not rows, (True,) if asked.as_saved else (True, False))
        write_atomically(asked.out, json.dumps(result(asked.model, rows), indent=1) + "\n")
        print("\n".join(map(str, rows[-2:])), flush=True)


def result(model: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows with what they are worth."""
    harm = rows[0]["after"] - rows[0]["before"]
    worst = max((row["after"] - row["before"] - harm for row in rows[1:] if row["balanced"]), default=0.0)
    return {
        "model": Path(model).name,
        "data": kinds.TEXTS.get(model, "self"),
        "steps": STEPS,
        "rate": RATE,
        "rows_of_a_step": ROWS,
        "limit": LIMIT,
        "worst_beyond_source": worst,
        "rows": rows,
        "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def tables(every: list[dict[str, Any]]) -> list[str]:
    """Of every model one row for the source and one or two for every kind of cut; then how the figures came about."""
    head = ["model", "kind", "before", "after", "change", "beyond the source's"]
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head))]
    for found in every:
        lines += table(found)
    worst = ", ".join(f"{found['worst_beyond_source']:+.3f} ({found['model']})" for found in every)
    told = f"Worst of the models as saved: {worst} nats beyond the source's change (limit {LIMIT})."
    below = "Below 0 a cut model gains more, or loses less, than its source."
    note = "Nats per token of held-out text, with the 95% interval of the change, paired by rows."
    return [*lines, "", note, f"{told} {below}", "", *map(provenance, every)]


def table(found: dict[str, Any]) -> list[str]:
    """The rows of one model."""
    rows, lines = found["rows"], []
    harm = rows[0]["after"] - rows[0]["before"]
    for row in rows:
        name = row["kind"] if row is rows[0] else f"{row['kind']}, {'as saved' if row['balanced'] else 'not balanced'}"
        change = row["after"] - row["before"]
        beyond = "" if row is rows[0] else f"{change - harm:+.3f}"
        error = f"{change:+.3f} ± {1.96 * row['change_error']:.3f}"
        start = f"| {found['model']} | {name} | {row['before']:.3f} | {row['after']:.3f}"
        lines.append(f"{start} | {error} | {beyond} |")
    return lines


def provenance(found: dict[str, Any]) -> str:
    """Where, when and with what a model was measured."""
    texts = {"self": "text that it wrote itself", "stdlib": "source code of Python's standard library"}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    about = f"- {found['model']} on {texts[found['data']]}: {found['hardware']}"
    return f"{about}, {kinds.when(found['rows'], found)}; {versions}."


def measured(
    model: str, kind: str, folder: Path, texts: Any, source_too: bool, both: tuple[bool, ...]
) -> list[dict[str, Any]]:
    """A kind of cut, balanced, and not where both are asked for; before them the source, where it is asked for."""
    rows, found = (texts.calibration, texts.evaluation), []
    if source_too:
        stock, _ = families.load(model)
        found.append({"kind": "source", "balanced": False, **trained(stock, *rows)})
    for balanced in both:
        loaded, _ = families.load(str(kinds.made(model, kind, folder, balanced)))
        found.append({"kind": kind, "balanced": balanced, **trained(loaded, *rows)})
    return [{**row, "date": time.strftime("%Y-%m-%d"), "commit": commit()} for row in found]


def trained(model: nn.Module, learned: torch.Tensor, held_out: torch.Tensor) -> dict[str, float]:
    """Nats per token of held-out rows before and after the steps, and the standard error of their difference."""
    before = nats(model, held_out)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for step in range(STEPS):
        place = step * ROWS % max(1, len(learned) - ROWS + 1)
        batch = learned[place : place + ROWS]
        model(batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    after = nats(model.eval(), held_out)
    change = after - before
    error = float(change.std() / len(change) ** 0.5)
    return {"before": float(before.mean()), "after": float(after.mean()), "change_error": error}


@torch.no_grad()
def nats(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The loss of every row."""
    return torch.stack([model(row, labels=row).loss for row in rows.split(1)])


if __name__ == "__main__":
    main()
