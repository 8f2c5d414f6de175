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
import tempfile
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import commit
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

    def known(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {name: right for name, right in zip(self._fields, self, strict=True) if right is not None}

    def to_json(self, source: Scores | None = None) -> dict[str, float]:
        """Shares with standard errors; against the source's, the change with its own, as the items are the same."""
        found: dict[str, float] = {"items": len(self.acc)}
        for name, right in self.known().items():
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


class Exam:
    """The items of one task as a model reads them: tokenised once, however many models answer them."""

    def __init__(self, tokenizer: Any, items: list[Item]) -> None:
        self.items = items
        pairs = [(item.context, ending) for item in items for ending in item.endings]
        both = tokenizer([f"{context} {ending}" for context, ending in pairs])["input_ids"]
        texts = [item.context.rstrip() for item in items]  # spaces before the ending belong to it
        sizes = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        starts = [size for item, size in zip(items, sizes, strict=True) for _ in item.endings]
        self.asked = [(row, len(row) - start) for row, start in zip(both, starts, strict=True)]

    def scores(self, model: Any, batch_tokens: int | None = None, bf16: bool = False) -> Scores:
        """Answer all items."""
        size = batch_tokens or (16_384 if model.device.type == "cuda" else 1_024)
        logs, greedy = _likelihoods(model, self.asked, size, bf16)
        if all(len(item.endings) == 1 for item in self.items):
            return Scores(greedy.double())
        right, normed, place = [], [], 0
        for item in self.items:
            own = logs[place : place + len(item.endings)]
            lengths = torch.tensor([float(len(ending)) for ending in item.endings], dtype=own.dtype)
            right.append(int(own.argmax()) == item.right)
            normed.append(int((own / lengths).argmax()) == item.right)
            place += len(item.endings)
        return Scores(torch.tensor(right).double(), torch.tensor(normed).double())


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
        ids = torch.tensor([asked[i][0] + [0] * (longest - len(asked[i][0])) for i in now], device=model.device)
        with cast:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # what is behind a row's end is not looked at
        places = [(n, at) for n, i in enumerate(now) for at in range(len(asked[i][0]) - asked[i][1], len(asked[i][0]))]
        rows, at = torch.tensor(places, device=model.device).unbind(1)
        wrong, total = torch.zeros(2, len(now), dtype=torch.float64, device=model.device)
        for some, where in zip(rows.split(4096), at.split(4096), strict=True):
            found, wanted = logits[some, where - 1].float(), ids[some, where]
            total.index_add_(0, some, found.log_softmax(-1).gather(-1, wanted[:, None])[:, 0].double())
            wrong.index_add_(0, some, (found.argmax(-1) != wanted).double())
        logs[now], greedy[now] = total.cpu(), wrong.cpu() == 0
    return logs, greedy


def exams(tokenizer: Any, data: Path, most: int | None = None, tasks: tuple[str, ...] = TASKS) -> dict[str, Exam]:
    """Every task, the first `most` items of each."""
    return {task: Exam(tokenizer, read(data, task, most)) for task in tasks}


def all_tasks(
    model: nn.Module, asked: dict[str, Exam], source: dict[str, Scores] | None = None
) -> tuple[dict[str, Scores], dict[str, Any]]:
    """Scores of every task, and what is said of them, against the source's where given."""
    found = {task: exam.scores(model, bf16=model.device.type == "cuda") for task, exam in asked.items()}
    return found, {task: scores.to_json(source and source[task]) for task, scores in found.items()}


def by_lm_eval(model: nn.Module, tokenizer: Any, asked: dict[str, Exam]) -> dict[str, Any]:
    """The same items answered through lm-eval, where that is installed: what it says of every task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, exam in asked.items():
            lines = [json.dumps(item._asdict()) for item in exam.items]
            (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
            single = all(len(item.endings) == 1 for item in exam.items)
            about = {
                "task": f"headwise_{task}",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(folder / f"{task}.jsonl")}},
                "test_split": "test",
                "output_type": "loglikelihood" if single else "multiple_choice",
                "doc_to_text": "{{context}}",
                "doc_to_target": "{{' ' + endings[0]}}" if single else "right",
                **({} if single else {"doc_to_choice": "endings"}),
                "metric_list": [{"metric": "acc"}] + ([] if single else [{"metric": "acc_norm"}]),
            }
            (folder / f"{task}.yaml").write_text(json.dumps(about))  # JSON is YAML
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        names: Any = [f"headwise_{task}" for task in asked]
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16)  # type: ignore[arg-type]
        found = simple_evaluate(wrapped, tasks=names, task_manager=manager, bootstrap_iters=0)
    return {
        task: {key.split(",")[0]: value for key, value in found["results"][f"headwise_{task}"].items() if "acc" in key}
        for task in asked
    }


def main() -> None:
    from headwise import families
    from headwise.checks import speed

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--most", type=int, help="items of each task")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--lm-eval", action="store_true", help="also through lm-eval, which has to be installed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows, source = [], None
    for name in asked.model:
        start = time.perf_counter()
        model, tokenizer = families.load(name, asked.device)
        items = exams(tokenizer, asked.data, asked.most, tuple(asked.task or TASKS))
        scores, said = all_tasks(model, items, source)
        source = source or scores  # the first model is what the others are held against
        about = {"model": Path(name).name, "hardware": speed.machine(model.device), "commit": commit()}
        about["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
        rows.append({**about, "seconds": time.perf_counter() - start, "tasks": said})
        if asked.lm_eval:
            rows[-1]["lm_eval"] = by_lm_eval(model, tokenizer, items)
        print(json.dumps(rows[-1]), flush=True)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
