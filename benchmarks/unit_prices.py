"""What a million parameters less costs, unit by unit: the same small cut in every layer of a model, nothing healed.

    python benchmarks/unit_prices.py MODEL --data other.txt --eval wikitext-eval.txt --out unit-prices-smollm2.json

Moments of inputs and gradients come from the calibration text, and damage is measured on the evaluation text. Two
factors are the best for those moments. MLP channels go by the size of what they write, and the others make up for them
by least squares. Of a tied word table either all words have one rank, or the most frequent stay whole. Rows that the
result has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import commit

from headwise import families
from headwise.checks import speed
from headwise.files.disk import write_atomically
from headwise.linalg import ridge_step, roots, two_factors
from headwise.probes import weights

Cut = Callable[[], int]  # changes weights, and returns how many parameters that would save
FACTORED = (("q", 0.7), ("q", 0.5), ("k", 0.7), ("o", 0.7), ("gate", 0.8), ("up", 0.8), ("down", 0.8))
CHANNELS, RANK, WHOLE_WORDS, RARE_RANK = 0.9, 448, 16_384, 256


class Bench:
    """A model with its texts, moments and answers."""

    def __init__(self, asked: argparse.Namespace) -> None:
        stock, self.tokenizer = families.load(asked.model, "cpu")
        self.family = families.family_of(stock.config)
        self.model: Any = self.family.tailor(stock, share="all").float().eval()
        self.rows = self._rows(asked.eval, asked.eval_rows, asked.length)
        self.read = self._rows(asked.data, asked.rows, asked.length)
        self.used = torch.tensor(self.tokenizer(asked.data.read_text())["input_ids"])
        self.moments = weights.collect(self.family, self.model, self.read, 0)
        self.before = [self._answers(row) for row in self.rows]
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def _rows(self, path: Path, count: int, length: int) -> torch.Tensor:
        ids = self.tokenizer(path.read_text()[: count * length * 8])["input_ids"]
        return torch.tensor(ids[: count * length]).view(count, length)

    @torch.no_grad()
    def _answers(self, row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(row[None]).logits[0, :-1].log_softmax(-1)
        return found

    def damage(self) -> dict[str, float]:
        """Increase of the loss and divergence, in nats per token."""
        loss = kl = 0.0
        for row, before in zip(self.rows, self.before, strict=True):
            after = self._answers(row)
            loss += float((before - after).gather(-1, row[1:, None]).sum())
            kl += float((before.exp() * (before - after)).sum())
        count = self.rows[:, 1:].numel()
        return {"damage": loss / count, "kl": kl / count}

    def set(self, weight: torch.nn.Parameter, new: torch.Tensor) -> None:
        """Change a weight until `restore`."""
        self.kept.setdefault(weight, weight.data)
        weight.data = new.to(weight)

    def restore(self) -> None:
        """All weights as they were."""
        for weight, data in self.kept.items():
            weight.data = data

    def layers(self) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """Matrices and moments of every layer."""
        for index, moment in enumerate(self.moments):
            yield weights.modules(self.family, self.model, index), moment

    def factored(self, name: str, share: float) -> int:
        """One matrix of every layer as two factors with that share of its entries."""
        saved = 0
        for modules, moment in self.layers():
            weight = modules[name].weight
            rows, columns = weight.shape
            rank = int(share * rows * columns / (rows + columns))
            a, _, b = two_factors(weight.detach(), moment[f"w_{weights.INPUTS[name]}"], moment[f"g_{name}"])
            self.set(weight, a[:, :rank] @ b[:rank])
            saved += rows * columns - rank * (rows + columns)
        return saved

    def channels(self) -> int:
        """Some MLP channels of every layer gone, the others made up for them."""
        saved = 0
        for modules, moment in self.layers():
            weight, gram = modules["down"].weight, moment["w_hidden"].double()
            power = (weight.double().square() * moment["g_down"].double()[:, None]).sum(0) * gram.diagonal()
            order = power.argsort()
            count = int((1 - CHANNELS) * len(order))
            gone, kept = order[:count], order[count:]
            step = ridge_step(gram[kept][:, kept], gram[kept][:, gone] @ weight.double()[:, gone].mT, 1e-2)
            new = torch.zeros_like(weight, dtype=torch.float64)
            new[:, kept] = weight.double()[:, kept] + step.mT
            self.set(weight, new)
            saved += count * weight.shape[0] * len([name for name in ("gate", "up", "down") if name in modules])
        return saved

    def words(self, rank: int, whole: int) -> int:
        """The word table at a rank, but for the most frequent words."""
        weight = self.model.get_input_embeddings().weight
        count = torch.bincount(self.used, minlength=len(weight)).double() + 0.5
        rare = count.argsort(descending=True)[whole:]
        root, inverse = roots(weights.table_metric(self.moments[0], True)["w_embed"])
        x, share = weight.detach().double()[rare] @ root, count[rare] if not whole else count[rare].sqrt()
        basis = torch.linalg.eigh((x * share[:, None]).mT @ x)[1][:, -rank:]
        new = weight.detach().double().clone()
        new[rare] = (x @ basis) @ (basis.mT @ inverse)
        self.set(weight, new)
        return len(rare) * weight.shape[1] - rank * (len(rare) + weight.shape[1])

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """All cuts that are tried."""
        for name, share in FACTORED:
            yield f"{name} as two factors, {share:.0%} of its entries", lambda n=name, s=share: self.factored(n, s)  # type: ignore[misc]
        yield f"MLP channels, {CHANNELS:.0%} of them", self.channels
        yield f"all words at rank {RANK}", lambda: self.words(RANK, 0)
        yield f"{WHOLE_WORDS:,} words whole, others at rank {RARE_RANK}", lambda: self.words(RARE_RANK, WHOLE_WORDS)


def main() -> None:
    """Measure, and write after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--eval-rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    bench = Bench(asked)
    found: dict[str, Any] = {
        "model": Path(asked.model).stem, "data": asked.data.name, "eval": asked.eval.name, "rows": [],
        "read": bench.read.numel(), "evaluated": bench.rows.numel(), "date": time.strftime("%Y-%m-%d"),
        "hardware": speed.machine(torch.device("cpu")), "commit": commit(),
    }  # fmt: skip
    known = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    found["rows"] = known
    for name, cut in bench.cuts():
        if name in {row["cut"] for row in known}:
            continue
        saved = cut()
        found["rows"].append({"cut": name, "saved": saved, **bench.damage()})
        bench.restore()
        print(json.dumps(found["rows"][-1]), flush=True)
        write_atomically(asked.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
