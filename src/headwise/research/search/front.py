"""What a study found, as data, as a picture and as a page: no model beats those on the front in loss for less."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, OutputError
from headwise.types import write_atomically

PRICES = {"parameters": "parameters", "train_flops_per_token": "training FLOPs per token"}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}"
    "tr.front{font-weight:600}svg{max-width:100%;height:auto}"
)


def rows_of(study: Any) -> list[dict[str, Any]]:
    """All trials that ended or were given up, by number."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name in ("COMPLETE", "PRUNED") and "parameters" in trial.user_attrs:
            loss = trial.value if trial.state.name == "COMPLETE" else None
            found.append({"number": trial.number, "loss": loss, "params": dict(trial.params), **dict(trial.user_attrs)})
    return found


def front(rows: Sequence[dict[str, Any]], price: str) -> list[int]:
    """Numbers of the trials that no other beats in loss at the same price or less, cheapest first.

    >>> front([{"number": 0, "loss": 2.0, "p": 5}, {"number": 1, "loss": 3.0, "p": 4}], "p")
    [1, 0]
    """
    found: list[int] = []
    best = float("inf")
    done = [row for row in rows if row["loss"] is not None]
    for row in sorted(done, key=lambda row: (row[price], row["loss"])):
        if row["loss"] < best:
            best = row["loss"]
            found.append(row["number"])
    return found


def summary(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """For pareto.json."""
    done = [row for row in rows if row["loss"] is not None]
    return {
        "settings": settings,
        "trials": len(rows),
        "given_up": len(rows) - len(done),
        "best": min(done, key=lambda row: row["loss"])["number"] if done else None,
        "fronts": {price: front(rows, price) for price in PRICES},
        "rows": list(rows),
    }


def refuse(out: Path) -> None:
    """Refuse a folder in which a search would write over files that no search made."""
    ours = any((out / name).exists() for name in ("journal.log", "pareto.json"))
    taken = [name for name in ("best", "pareto.svg", "search.html") if (out / name).exists()]
    if taken and not ours:
        raise OutputError(f"{out / taken[0]} exists and was not written by a search; choose another --out.")


def write(found: dict[str, Any], out: Path) -> list[Path]:
    """pareto.json, pareto.svg where it can be drawn, and search.html with both."""
    paths = [out / "pareto.json"]
    write_atomically(paths[0], json.dumps(found, indent=1) + "\n")
    drawn = ""
    try:
        drawn = draw(found)
        paths.append(out / "pareto.svg")
        write_atomically(paths[-1], drawn)
    except HeadwiseError:  # no matplotlib: the table says the same
        pass
    paths.append(out / "search.html")
    write_atomically(paths[-1], page(found, drawn[drawn.find("<svg") :] if drawn else ""))
    return paths


def draw(found: dict[str, Any]) -> str:
    """Loss over both prices; the front in line."""
    from headwise.report import plots

    figure = plots.new_figure(8.0, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    done = {row["number"]: row for row in found["rows"] if row["loss"] is not None}
    for panel, (price, label) in zip(axes, PRICES.items(), strict=True):
        panel.plot([row[price] for row in done.values()], [row["loss"] for row in done.values()], "o", alpha=0.5)
        best = [done[number] for number in found["fronts"][price]]
        panel.plot([row[price] for row in best], [row["loss"] for row in best], "-s", color=plots.PALETTE[1])
        panel.set_xlabel(label)
    axes[0].set_ylabel("held-out loss (nats per token)")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue().decode()


def page(found: dict[str, Any], drawing: str) -> str:
    """A small page that stands alone; everything from outside is escaped."""
    best = set(found["fronts"]["parameters"])
    heading = ("trial", "loss", "parameters", "FLOPs per token", "layers", "width", "heads", "rate")
    lines = []
    ordered = sorted(found["rows"], key=lambda row: (row["loss"] is None, row["loss"] or 0.0))
    for row in ordered:
        heads = [layer["query_heads"] for layer in row["layers"]]
        cells = (
            row["number"],
            "given up" if row["loss"] is None else f"{row['loss']:.4f}",
            f"{row['parameters']:,}",
            f"{row['train_flops_per_token']:.3g}",
            len(row["layers"]),
            row["hidden_size"],
            f"{heads[0]} to {heads[-1]}" if len(set(heads)) > 1 else heads[0],
            f"{row['params']['rate']:.2g}" if "rate" in row["params"] else "",
        )
        mark = ' class="front"' if row["number"] in best else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    settings = html.escape(", ".join(f"{k} {v}" for k, v in found["settings"].items()))
    titles = "".join(f"<th>{title}</th>" for title in heading)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Headwise search</title><style>{STYLE}</style>'
        f"<h1>Search: {found['trials']} trials, {found['given_up']} given up</h1><p>{settings}</p>{drawing}"
        f"<p>Bold: no other trial has a lower loss with as few parameters.</p>"
        f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></html>\n"
    )
