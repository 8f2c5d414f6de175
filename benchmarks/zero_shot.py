"""Zero-shot accuracy of a decoder: which ending does it find likeliest? LAMBADA, HellaSwag, ARC-easy, PIQA.

    python benchmarks/zero_shot.py MODEL --data ../shared/data/zero-shot --out benchmarks/results/zero-shot.json

Scored as lm-eval defines it: `acc` by the log-likelihood of the endings, `acc_norm` by that divided by their length in
characters; of LAMBADA, whether the last word is what the model would write greedily. Standard errors are of the items.
"""

from __future__ import annotations

import argparse
import bz2
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

TASKS = ("lambada", "hellaswag", "arc_easy", "piqa")


class Item(NamedTuple):
    """A beginning, its possible endings and which of them is right."""

    context: str
    endings: tuple[str, ...]
    right: int


class Scores(NamedTuple):
    """Whether each item was answered rightly."""

    acc: torch.Tensor
    acc_norm: torch.Tensor | None = None

    def to_json(self, source: Scores | None = None) -> dict[str, float]:
        """Shares with standard errors; against the source's, the change with its own, as the items are the same."""
        found: dict[str, float] = {"items": len(self.acc)}
        for name, right in zip(self._fields, self, strict=True):
            if right is not None:
                found[name], found[f"{name}_se"] = _mean(right)
                if source is not None:
                    found[f"{name}_change"], found[f"{name}_change_se"] = _mean(right - getattr(source, name))
        return found


def _mean(values: torch.Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def read(data: Path, task: str, most: int | None = None) -> list[Item]:
    """The items of a task, the first `most` of them."""
    if task == "hellaswag":
        lines = bz2.decompress((data / "hellaswag_val_full.txt.bz2").read_bytes()).decode().split("\n")
        rows = [lines[i : i + 6] for i in range(0, len(lines) - 5, 6)]
        items = [Item(row[0], tuple(row[2:]), int(row[1])) for row in rows]
    else:
        name = "lambada_openai" if task == "lambada" else task
        rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        if task == "lambada":
            items = [Item(row["context"], (row["continuation"],), 0) for row in rows]
        else:
            items = [Item(row["query"].rstrip("\n") + "\nAnswer:", tuple(row["choices"]), row["gold"]) for row in rows]
    return items[:most]


def score(
    model: nn.Module, tokenizer: Any, items: list[Item], batch_tokens: int = 16_384, bf16: bool = False
) -> Scores:
    """Answer all items."""
    asked = [_tokens(tokenizer, item.context, ending) for item in items for ending in item.endings]
    logs, greedy = _likelihoods(model, asked, batch_tokens, bf16)
    if all(len(item.endings) == 1 for item in items):
        return Scores(greedy.double())
    right, normed, place = [], [], 0
    for item in items:
        own = logs[place : place + len(item.endings)]
        lengths = torch.tensor([float(len(ending)) for ending in item.endings], dtype=own.dtype)
        right.append(int(own.argmax()) == item.right)
        normed.append(int((own / lengths).argmax()) == item.right)
        place += len(item.endings)
    return Scores(torch.tensor(right).double(), torch.tensor(normed).double())


def _tokens(tokenizer: Any, context: str, ending: str) -> tuple[list[int], int]:
    """Tokens of both, and how many of them are the ending's; a space between belongs to the ending."""
    whole = tokenizer(f"{context} {ending}", add_special_tokens=False)["input_ids"]
    return whole, len(whole) - len(tokenizer(context, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def _likelihoods(
    model: Any, asked: list[tuple[list[int], int]], batch_tokens: int, bf16: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-likelihood of every ending, and whether it is what greedy writing gives. Rows of like length go together."""
    logs, greedy = torch.zeros(len(asked), dtype=torch.float64), torch.zeros(len(asked), dtype=torch.bool)
    order = sorted(range(len(asked)), key=lambda i: -len(asked[i][0]))
    cast = torch.autocast(model.device.type, torch.bfloat16) if bf16 else nullcontext()
    while order:
        longest = len(asked[order[0]][0])
        now, order = order[: max(1, batch_tokens // longest)], order[max(1, batch_tokens // longest) :]
        rows = [asked[i][0] for i in now]
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
        with cast:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # what is behind a row's end is not looked at
        found = [_ending(logits[place], ids[place], *asked[i]) for place, i in enumerate(now)]
        logs[now], greedy[now] = (torch.stack(column).cpu() for column in zip(*found, strict=True))
    return logs, greedy


def _ending(logits: torch.Tensor, ids: torch.Tensor, row: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-likelihood of the last `size` tokens of a row, and whether each was the likeliest; nothing waits for it."""
    last, wanted = logits[len(row) - 1 - size : len(row) - 1].float(), ids[len(row) - size : len(row)]
    return last.log_softmax(-1).gather(-1, wanted[:, None]).double().sum(), (last.argmax(-1) == wanted).all()


def all_tasks(
    model: nn.Module,
    tokenizer: Any,
    data: Path,
    most: int | None = None,
    source: dict[str, Scores] | None = None,
    tasks: tuple[str, ...] = TASKS,
) -> tuple[dict[str, Scores], dict[str, Any]]:
    """Scores of every task, and what is said of them, against the source's where given."""
    found = {task: score(model, tokenizer, read(data, task, most), bf16=model.device.type == "cuda") for task in tasks}
    return found, {task: scores.to_json(source and source[task]) for task, scores in found.items()}


def main() -> None:
    from headwise import families

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--most", type=int, help="items of each task")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows, source = [], None
    for name in asked.model:
        start = time.perf_counter()
        model, tokenizer = families.load(name, asked.device)
        scores, said = all_tasks(model, tokenizer, asked.data, asked.most, source, tuple(asked.task or TASKS))
        source = source or scores  # the first model is what the others are held against
        rows.append({"model": name, "seconds": time.perf_counter() - start, "tasks": said})
        print(json.dumps(rows[-1]), flush=True)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
