"""What a study found, as data, as a picture and as a page: no model beats those on the front in loss for less."""

import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwise.errors import DataError, HeadwiseError, OutputError
from headwise.types import LayerShape, write_atomically

PRICES = {"parameters": "parameters", "train_flops_per_token": "training FLOPs per token"}
HEADING = ("trial", "on the front", "loss", "parameters", "FLOPs per token", "layers", "width", "heads", "rate")


def rows_of(study: Any) -> list[dict[str, Any]]:
    """All trials that ran to their end or were given up, by number."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name in ("COMPLETE", "PRUNED") and "parameters" in trial.user_attrs:
            _refuse_foreign(trial)
            loss = trial.value if trial.state.name == "COMPLETE" else None
            found.append({"number": trial.number, "loss": loss, "params": dict(trial.params), **dict(trial.user_attrs)})
    return found


def _refuse_foreign(trial: Any) -> None:
    """Refuse a trial that does not say what every trial of a search says."""
    noted, layers = trial.user_attrs, trial.user_attrs.get("layers")
    numbers = [noted.get(name) for name in (*PRICES, "hidden_size")]
    known = all(isinstance(number, (int, float)) and number > 0 for number in numbers)
    try:
        shapes = [LayerShape.from_json(layer) for layer in layers] if isinstance(layers, list) else []
    except (HeadwiseError, TypeError, ValueError, KeyError):
        shapes = []
    if not known or not shapes:
        raise damaged(trial.number)


def damaged(number: int) -> DataError:
    """What is said of a trial that cannot be read."""
    return DataError(f"trial {number} of the study is damaged; begin another with --out or --study.")


def front(rows: Sequence[dict[str, Any]], price: str) -> list[int]:
    """Numbers of the trials that no other beats in loss at the same price or less, cheapest first.

    >>> front([{"number": 0, "loss": 2.0, "p": 5}, {"number": 1, "loss": 3.0, "p": 4}], "p")
    [1, 0]
    """
    found: list[int] = []
    best = float("inf")
    for row in sorted(_finished(rows), key=lambda row: (row[price], row["loss"])):
        if row["loss"] < best:
            best = row["loss"]
            found.append(row["number"])
    return found


def _finished(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["loss"] is not None]


def summary(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """For pareto.json."""
    done = _finished(rows)
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
    files = {"pareto.json": json.dumps(found, indent=1) + "\n"}
    with suppress(HeadwiseError):  # no matplotlib: the table says the same
        files["pareto.svg"] = draw(found)
    files["search.html"] = page(found, files.get("pareto.svg", ""))
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def draw(found: dict[str, Any]) -> str:
    """Held-out loss over both prices, as SVG; trials on the front are joined by a line."""
    from headwise.report import plots

    figure = plots.new_figure(8.0, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    done = {row["number"]: row for row in _finished(found["rows"])}
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
    """A small page that stands alone: the picture, and a table of all trials, the best first."""
    from headwise.report._html import NO_DATA, document, paragraph, section, table, top
    from headwise.report._tables import Table

    ordered = sorted(found["rows"], key=lambda row: (row["loss"] is None, row["loss"] or 0.0))
    rows = tuple(_cells(row, row["number"] in found["fronts"]["parameters"]) for row in ordered)
    settings = ", ".join(f"{name} {value}" for name, value in found["settings"].items())
    title = f"Search: {found['trials']} trials, {found['given_up']} given up"
    words = paragraph("On the front: no other trial has a lower loss with as few parameters.")
    trials = table(Table(HEADING, rows, (0, *range(2, len(HEADING))), "trials"))
    body = section("trials", "Trials", drawing[max(0, drawing.find("<svg")) :] + words + trials)
    return document("Headwise search", top(title, (), settings), "", body, NO_DATA)


def _cells(row: dict[str, Any], on_front: bool) -> tuple[str, ...]:
    heads = [layer["query_heads"] for layer in row["layers"]]
    return (
        str(row["number"]),
        "yes" if on_front else "",
        "given up" if row["loss"] is None else f"{row['loss']:.4f}",
        f"{row['parameters']:,}",
        f"{row['train_flops_per_token']:.3g}",
        str(len(row["layers"])),
        str(row["hidden_size"]),
        f"{heads[0]} to {heads[-1]}" if len(set(heads)) > 1 else str(heads[0]),
        f"{row['params']['rate']:.2g}" if "rate" in row["params"] else "",
    )
