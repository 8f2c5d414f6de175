"""Weights and cache under one limit of bytes: our joint plan against uniform bits, and against cuts alone.

Shares are of the model's weights and cache at 16 bits a number, for 8 texts of 8,192 tokens or of the model's own
context where that is shorter. Rivals give all matrices, the table of words included, the same bits and cache integers
by token; those that fit into a share compete, and the best of them on the held-out text itself stands for all. Damage
is on held-out text, with 95% intervals over blocks. Packages: compressed-tensors is needed only to save models.

    python benchmarks/memory.py embedded --out benchmarks/results/memory-embedded.json
    python benchmarks/memory.py --page docs/MEMORY.md

Sections, and some of the rivals' widths, may be measured side by side, each with an --out of its own, and then joined:

    python benchmarks/memory.py --join joint.json uniform.json --out benchmarks/results/memory-embedded.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bits_bench import say, told
from memory_page import write_page
from memory_parts import model_name
from provenance import commit
from rival_caches import Integers, Rival

from headwise import budgets as prices
from headwise import pipeline
from headwise.checks import _lengths as lengths
from headwise.checks import speed
from headwise.cost import weight_bytes
from headwise.errors import HeadwiseError
from headwise.files.disk import write_atomically
from headwise.linalg import rounded
from headwise.probes import weights
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages import packing
from headwise.stages.words import mean_bits, parts
from headwise.types import ModelShape
from headwise.types.weights import ENDS, FIELDS, group_of

SHARES = (25, 30, 40, 60)
WIDTHS = ((8, 8), (8, 4), (4, 8), (4, 4), (4, 3), (3, 4), (3, 3), (4, 2), (3, 2), (2, 2))  # of weights and of the cache
ROUNDINGS = ("second order", "nearest")
WEIGHTS = (60, 50, 40, 35, 30, 27, 25, 22, 20)  # percent of the weights alone, predicted and measured
LENGTH, BATCH = 8_192, 8
CUTS = ("qk", "v", "mlp")


class Bench:
    """One source with its rows, probed once."""

    def __init__(self, settings: Settings, work: Path, rows: int) -> None:
        self.settings = settings
        say(f"loading {settings.model}")
        self.source: Any = pipeline.load_source(settings, told)
        self.at = f"{min(LENGTH, self.source.context)},b{BATCH}"
        self.rows = self._rows(rows)
        whole = settings.allow != ("weights",)
        self.settings = replace(settings, budgets=(f"memory=50%@{self.at}",)) if whole else settings
        self.work = work

    def _rows(self, count: int) -> torch.Tensor:
        text, length = self.source.long, min(LENGTH, self.source.context)
        if text is None:
            return self.source.evaluation[: max(1, count * length // self.source.evaluation.shape[1])]
        return lengths.rows_of(text.tokens, length, length, count * length, text.start)[:count]

    def probed(self) -> Any:
        """What is known of the source."""
        return pipeline.probe_in(RunFolder(self.work), self.settings, self.source, told, diagnose=False)

    def damage(self, model: Any) -> dict[str, float]:
        """On held-out text, against the source: increase of the loss and divergence, with intervals."""
        found = lengths.predicted(self.source.family, (self.source.model, model), self.rows, told, "quality")
        if isinstance(found, str):
            raise SystemExit(found)
        made = lengths.summed_up(found, self.rows.shape[1], 512, 0)
        return {name: getattr(made, name) for name in ("damage", "low", "high", "kl", "kl_low", "kl_high")}

    def share(self, model: ModelShape) -> float:
        """Of the source's bytes, under the limit on all memory."""
        (budget,) = prices.parse_all(self.settings.budgets, self.source.shape)
        return prices.price(budget, model) / prices.price(budget, self.source.shape)

    def planned(self, text: str, **changes: Any) -> tuple[dict[str, Any], Any]:
        """A plan for a budget, carried out: what it predicts, what it takes, and the model."""
        wanted, probed = replace(self.settings, budgets=(text,), **changes), self.probed()
        plan = pipeline.allocate(wanted, self.source, probed.readings, pipeline.budgets_of(wanted, self.source))
        fitted = self.source.fit(wanted, probed, plan, None, told)
        (budget,) = plan.budgets
        told_of = {"asked": text, "share": self.share(plan.target), "bits": mean_bits(plan.target)}
        told_of |= {"bytes": parts(budget, plan.target), "bytes_before": parts(budget, plan.source)}
        return {**told_of, "predicted": plan.predicted_damage, "rehearsed": fitted.rehearsed}, fitted.model


@contextmanager
def uniform(bench: Bench, moments: list[Any], bits: int, second_order: bool) -> Iterator[None]:
    """All matrices of the source in so many bits, until the end."""
    model, family = bench.source.model, bench.source.family
    kept: list[tuple[Any, torch.Tensor]] = []

    def put(module: Any, moment: torch.Tensor) -> None:
        weight = module.weight
        (new,) = rounded(weight, moment, (bits,), group_of(weight.shape[1]), second_order)
        kept.append((weight, weight.data))
        weight.data = new.dense().to(weight)

    try:
        for index in range(len(bench.source.shape.layers)):
            for name, module in weights.modules(family, model, index).items():
                put(module, moments[index][f"w_{weights.INPUTS[name]}"])
        for end, metric in weights.table_metric(moments[0], bench.source.shape.tied_embeddings).items():
            put(weights.table_of(model, end), metric)
        yield
    finally:
        for weight, data in kept:
            weight.data = data


@torch.no_grad()
def rivals(
    bench: Bench, moments: list[Any], widths: Sequence[tuple[int, int]], roundings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Uniform bits of weights and cache, by second-order rounding or to the nearest number."""
    source = bench.source
    (budget,) = prices.parse_all(bench.settings.budgets, source.shape)
    whole = prices.price(budget, source.shape)
    clean = list(_answers(bench))
    caches: dict[int, list[int]] = {}  # by the bits of the weights, which are rounded once
    for bits, cache in widths:
        caches.setdefault(bits, []).append(cache)
    for how, bits in itertools.product(roundings, caches):
        same: dict[str, Any] = dict.fromkeys(FIELDS, bits)
        target = replace(
            source.shape.with_layers(tuple(replace(layer, **same) for layer in source.shape.layers)),
            **dict.fromkeys(ENDS, bits),
        )
        with uniform(bench, moments, bits, how == ROUNDINGS[0]):
            for cache in caches[bits]:
                rival = Rival(f"int{cache} by token", Integers(cache))
                size = weight_bytes(target) + BATCH * rival.stored_bytes(source.shape.layers, budget.length)
                with rival.acting(source.family.blocks(source.model)):
                    made = _against(bench, clean, _answers(bench))
                yield {"method": "uniform", "rounding": how, "weight_bits": bits, "cache_bits": cache,
                       "share": size / whole, **made}  # fmt: skip


def _answers(bench: Bench) -> Iterator[torch.Tensor]:
    """The model's logits as it is now, row by row."""
    source = bench.source
    for row in bench.rows:
        yield source.family.logits(source.model, lengths.last_stream(source.family, source.model, row[None]))


def _against(bench: Bench, clean: list[torch.Tensor], logits: Iterator[torch.Tensor]) -> dict[str, float]:
    """Damage of answers that are given as logits, row by row."""
    parts_found = []
    for row, before, after in zip(bench.rows, clean, logits, strict=True):
        before, after = (found[:, :-1].float().log_softmax(-1) for found in (before, after))
        wanted = row[None, 1:, None].to(after.device)
        losses = [-one.gather(-1, wanted).squeeze(-1) for one in (before, after)]
        kl = (before.exp() * (before - after)).sum(-1)
        none = torch.zeros_like(kl)
        parts_found.append(lengths.Tokens(*(x.double().cpu() for x in (*losses, kl, none, none, none))))
    made = lengths.summed_up(lengths.together(parts_found), bench.rows.shape[1], 512, 0)
    return {name: getattr(made, name) for name in ("damage", "low", "high", "kl", "kl_low", "kl_high")}


def main() -> None:
    """Measure and write, or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("memory-work"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--swap-tokens", type=int, default=4_096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=["joint", "each_head", "uniform", "weights", "cuts"])
    parser.add_argument("--shares", type=int, nargs="+", help="percent; if not given, all")
    parser.add_argument("--widths", nargs="+", help="of rivals: bits of weights and of the cache, such as 8,4")
    parser.add_argument("--rounding", choices=ROUNDINGS, help="of rivals; if not given, both")
    parser.add_argument("--join", type=Path, nargs="+", help="measure nothing: put these results together")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.page:
        write_page(asked.page)
        return
    if asked.join:
        write_atomically(asked.out, json.dumps(joined(asked.join), indent=1) + "\n")
        return
    settings = Settings(
        model=asked.model, data=asked.data, eval=asked.eval, budgets=(f"memory=50%@1k,b{BATCH}",), tokens=asked.tokens,
        swap_tokens=asked.swap_tokens, length=asked.length, eval_tokens=asked.rows * 1024,
    )  # fmt: skip
    results = Results(asked, settings)
    for name in asked.only:
        for row in globals()[f"measure_{name}"](settings, asked):
            results.add(name, row)


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """One result of several of the same model; of a section that two have, both keep their rows."""
    results = [json.loads(file.read_text()) for file in files]
    if len({(model_name(result["name"]), result["batch"]) for result in results}) > 1:
        raise SystemExit(f"{', '.join(map(str, files))} are not of one model; join those of one.")
    return results[0] | {"rows": [row for result in results for row in result["rows"]]}


def _name(file: str | None) -> str | None:
    return Path(file).name if file else None


class Results:
    """The result file; rows of a section that is measured anew are replaced."""

    def __init__(self, asked: argparse.Namespace, settings: Settings) -> None:
        self.path, known = asked.out, json.loads(asked.out.read_text()) if asked.out.exists() else {}
        kept = [row for row in known.get("rows", []) if row["section"] not in asked.only]
        older = {name: known[name] for name in ("hardware", "date") if name in known}  # of rows that do not have them
        if "settings" in known:
            older |= {name: known["settings"][name] for name in ("tokens", "length")}
        self.found = {"name": Path(asked.model).stem, "batch": BATCH, "rows": [{**older, **row} for row in kept]}
        self.about = {"hardware": speed.machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
        self.about |= {"date": time.strftime("%Y-%m-%d"), "commit": commit()}
        self.about |= {name: getattr(settings, name) for name in ("tokens", "length", "swap_tokens")}
        self.about |= {"eval_rows": asked.rows, "data": _name(settings.data), "eval": _name(settings.eval)}
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self.found, indent=1) + "\n")

    def add(self, section: str, row: dict[str, Any]) -> None:
        """Keep a row and write the file."""
        self.found["rows"].append({"section": section, **self.about, **row})
        self._write()
        say(json.dumps(row))


def measure_joint(settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Our plans over cuts, cache bits and weight bits together."""
    yield from _planned("joint", settings, asked)


def measure_each_head(settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same where heads share no rows: their bases take fewer weights, and their codes are worse."""
    yield from _planned("each_head", replace(settings, pool="none"), asked)


def measure_cuts(settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Cuts of dimensions and MLP widths alone, in 16 bits a number."""
    yield from _planned("cuts", replace(settings, allow=CUTS), asked)


def _planned(name: str, settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench = Bench(settings, asked.work / name, asked.rows)
    for share in asked.shares or SHARES:
        try:
            found, model = bench.planned(f"memory={share}%@{bench.at}")
        except HeadwiseError as error:
            yield {"method": name, "asked_share": share, "refused": str(error)}
            continue
        yield {"method": name, "asked_share": share, "at": bench.at, **found, **bench.damage(model)}


def measure_weights(settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bits of weights alone, not healed: what the prices say against what is measured."""
    alone = replace(settings, allow=("weights",), heal="none", budgets=("weights=50%",))
    bench = Bench(alone, asked.work / "weights", asked.rows)
    for share in asked.shares or WEIGHTS:
        found, model = bench.planned(f"weights={share}%")
        yield {"method": "weights", "asked_share": share, **found, **bench.damage(model)}


def measure_uniform(settings: Settings, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rivals; heads are not pooled."""
    bench = Bench(replace(settings, pool="none"), asked.work / "uniform", asked.rows)
    count = max(1, packing.TOKENS // bench.source.calibration.shape[1])
    some = bench.source.calibration[:: max(1, len(bench.source.calibration) // count)]
    moments = weights.collect(bench.source.reader, bench.source.model, some, 0, told)
    widths = [(int(bits), int(cache)) for bits, _, cache in (text.partition(",") for text in asked.widths or ())]
    yield from rivals(bench, moments, widths or WIDTHS, [asked.rounding] if asked.rounding else ROUNDINGS)


if __name__ == "__main__":
    main()
