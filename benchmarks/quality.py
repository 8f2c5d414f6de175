"""Quality after cutting and after healing: every plan on the same model, text and budgets, healed in every way.

    python benchmarks/quality.py embedded --budget kv=75% --budget kv=50% --out benchmarks/results/quality-embedded.json

Prints a table and writes it as JSON, row by row: a run that was killed resumes, and more plans,
healings and budgets may be added to a file later. What the source says (its readings, its answers to zero-shot tasks)
is found once and kept in a hidden folder beside the file. Damage is the increase of the loss in nats per token on
held-out text in rows of the model's full context, with a 95% bootstrap interval over rows; `published` before healing
is the bar, measured in the same run. Tokens and seconds count what each healing learned from and took, cut included.

Several runs may share a GPU, some plans in each; `--shared` notes that their seconds are not of a machine on its own:

    python benchmarks/quality.py embedded --budget kv=50% --plan exact --shared --out A.json  # and B.json beside it
    python benchmarks/quality.py --join A.json B.json --out benchmarks/results/field-embedded-kv.json

With `--work FOLDER` they also share one probing, which `--probe` makes before the others begin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from join import SHARED, joined
from provenance import commit
from safetensors.torch import load_file, save
from torch import nn
from zero_shot import Scores, all_tasks, exams

from headwise import pipeline
from headwise.checks import _lengths as lengths
from headwise.checks import quality, speed
from headwise.cost import parameters
from headwise.errors import HeadwiseError
from headwise.heal import stages
from headwise.heal._job import Job
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.strategies import POOLING
from headwise.types import LayerShape, write_atomically

PLANS: dict[str, dict[str, Any]] = {
    "svd": dict(strategy="svd", allow=("qk", "v", "mlp")),
    "published": dict(strategy="published"),
    "magnitude": dict(strategy="magnitude", allow=("kv_heads", "mlp")),
    "uniform": dict(strategy="uniform"),
    "depth": dict(strategy="depth"),
    "exact": dict(strategy="exact"),
    "exact, 3 rounds": dict(strategy="exact", rounds=3, heal="refit"),  # healed between rounds, and so at the end
}
DEFAULT_PLANS = [name for name in PLANS if name != "depth"]  # which needs parameters or FLOPs to save
HEALINGS = ("none", "refit", "blockwise", "distill")


class Asked(NamedTuple):
    """Zero-shot tasks: where they are, how many items of each, and after which healings."""

    data: Path | None = None
    most: int | None = None
    heals: tuple[str, ...] = HEALINGS


class Healed(NamedTuple):
    """A model and what it took to heal it, beginning with the cut."""

    model: nn.Module
    tokens: int = 0
    seconds: float = 0.0
    record: dict[str, Any] | None = None


class Table:
    """Every plan at every budget, healed in every way; written after each row, so that a kill loses one row."""

    def __init__(
        self, settings: Settings, out: Path, asked: Asked, samples: bool, shared: bool = False,
        work: Path | None = None, cut: str | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.out, self.asked, self.samples, self.shared = settings, out, asked, samples, shared
        self.cut = tuple(cut.split(",")) if cut else settings.allow
        self.found: dict[str, Any] = {"settings": plain(settings), "cut": list(self.cut), "rows": []}
        if out.exists():
            known = json.loads(out.read_text())
            same = known.get("cut", known["settings"]["allow"]) == self.found["cut"]
            if not same or _but_budgets(known["settings"]) != _but_budgets(self.found["settings"]):
                sys.exit(f"{out} was measured with other settings; choose another --out, or delete it.")
            budgets = dict.fromkeys((*known["settings"]["budgets"], *settings.budgets))
            self.found = known | {"settings": known["settings"] | {"budgets": list(budgets)}}
        kinds = sorted({budget.partition("=")[0] for budget in settings.budgets})  # what is probed depends on them
        told = _but_budgets(plain(settings))
        if work is not None:  # healing options change no reading, and neither do the texts that only a healing reads
            told = {name: value for name, value in told.items() if name not in ("heal_options", "eval_tokens")}
        about = json.dumps([kinds, told], sort_keys=True)
        mark = hashlib.sha256(about.encode()).hexdigest()[:8]
        self.work = out.parent / f".{out.stem}-{mark}" if work is None else work / f"probed-{mark}"

    def missing(self, plan: str, healings: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Budgets, and the healings of a plan that are not in the table yet."""
        done = {(row["budget"], row["method"]) for row in self.found["rows"]}
        rest = [
            (budget, [heal for heal in healings if (budget, method_of(plan, heal)) not in done])
            for budget in self.settings.budgets
        ]
        return [(budget, left) for budget, left in rest if left]

    def probe(self) -> None:
        """Load the source, and probe it unless that was done."""
        self.bench = pipeline.load_source(self.settings)
        self.first = pipeline.probe_in(RunFolder(self.work), self.settings, self.bench, diagnose=False)

    def measure(self, plans: Sequence[str], healings: Sequence[str]) -> None:
        """Whatever is missing; the source is probed once."""
        if not any(self.missing(plan, healings) for plan in plans):
            return
        self.probe()
        bench, self.evaluation = self.bench, full_rows(self.bench, self.settings.eval_tokens)
        if self.asked.data is not None:
            self.exams = exams(bench.tokenizer, self.asked.data, self.asked.most)
            self.scores = self._source_scores()
        shared = self.shared or self.found.get("hardware", "").endswith(SHARED)  # some rows are enough
        self.found |= _about(bench, self.evaluation, self.first[0].seconds, shared)
        for budget in self.settings.budgets:
            for plan in plans:
                for asked, left in self.missing(plan, healings):
                    if asked == budget:
                        self._budget(budget, plan, left)

    def _source_scores(self) -> dict[str, Scores]:
        """What the source answers to the zero-shot tasks, asked once."""
        path = self.work / f"zero-shot-{self.asked.most or 'all'}.safetensors"
        if not path.exists():
            self._ask_source(path)
        kept = load_file(path)
        found = {task: Scores(kept[f"{task}.acc"], kept.get(f"{task}.acc_norm")) for task in self.exams}
        self.found["zero_shot"] = {task: scores.to_json() for task, scores in found.items()}
        return found

    def _ask_source(self, path: Path) -> None:
        found, _ = all_tasks(self.bench.model, self.exams)
        kept = {f"{task}.{name}": right for task, scores in found.items() for name, right in scores.known().items()}
        write_atomically(path, save(kept))

    def _budget(self, budget: str, plan: str, healings: list[str]) -> None:
        told = {"heal": "none", "allow": self.cut, **PLANS[plan]}
        settings = replace(self.settings, budgets=(budget,), **told)
        start = time.perf_counter()
        try:
            fitted = pipeline.fit(settings, self.bench, first=self.first)
        except HeadwiseError as error:
            print(f"{budget:12} {plan:16} {error}", flush=True)
            return
        tokens = sum(healing.tokens or 0 for healing in fitted.healings)  # of healings between rounds
        cut = Healed(fitted.model, tokens, time.perf_counter() - start)
        states = {settings.heal: cut, "none": cut}
        job = self.bench.job(replace(settings, heal_options=self.settings.heal_options), fitted.model)
        for heal in healings:
            if heal == "none" and settings.heal != "none":
                continue  # rounds are healed as they are cut
            try:
                state = self._healed(heal, states, job)
            except HeadwiseError as error:
                print(f"{budget:12} {method_of(plan, heal):28} {error}", flush=True)
                continue
            self._add(budget, plan, heal, fitted, state)

    def _healed(self, heal: str, states: dict[str, Healed], job: Job) -> Healed:
        """The cut model after all stages of a healing; those that others went through too are kept."""
        state = states["none"]
        for module, options in stages(heal, job.options) if heal != "none" else ():
            name = module.NAME if options == job.options else f"{module.NAME} {options}"
            if name not in states:
                start = time.perf_counter()
                model, record = module.heal(replace(job, cut=state.model, options=options))
                seconds = state.seconds + time.perf_counter() - start
                states[name] = Healed(model, state.tokens + record.tokens, seconds, record.to_json())
            state = states[name]
        return state

    def _add(self, budget: str, plan: str, heal: str, fitted: pipeline.Fitted, state: Healed) -> None:
        bench, rows = self.bench, self.found["rows"]
        found = quality.compare(bench.family, bench.model, state.model, self.evaluation)
        held = quality.compare(bench.family, bench.model, state.model, bench.rehearsal)
        expected = fitted._replace(rehearsed=held.expected_damage())
        row = _row(budget, method_of(plan, heal), expected, found, state.seconds, rows)
        record = state.record or {}
        row |= {"plan": plan, "heal": heal, "heal_tokens": state.tokens}
        row |= {name: record[name] for name in ("rate", "steps", "trials", "tokens_per_second") if name in record}
        if self.asked.data is not None and heal in self.asked.heals:
            row["zero_shot"] = all_tasks(state.model, self.exams, self.scores)[1]
        if self.samples:
            texts = quality.samples(bench.model, state.model, bench.tokenizer, bench.evaluation)
            row["samples"] = [text.to_json() for text in texts]
        rows.append(row)
        self.found["perplexity_before"] = math.exp(float(found.loss_before.mean()))
        write_atomically(self.out, json.dumps(self.found, indent=1) + "\n")
        print(_line(row), flush=True)


def plain(settings: Settings) -> dict[str, Any]:
    """Settings as JSON has them; of files their names, wherever they lie."""
    found: dict[str, Any] = json.loads(json.dumps(settings.to_json()))
    return found | {name: _name(found[name]) for name in ("model", "data", "eval")}


def _name(text: str | None) -> str | None:
    file, own = (text.removesuffix("+self"), text.endswith("+self")) if text else ("", False)
    return Path(file).name + "+self" * own if file and Path(file).exists() else text


def _but_budgets(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "budgets"}


def method_of(plan: str, heal: str) -> str:
    """What the tables call a plan that is healed so."""
    return plan if heal == "none" else f"{plan} + {heal}"


def full_rows(bench: pipeline.Source, tokens: int) -> torch.Tensor:
    """The evaluation text in rows of the full context; text that the model wrote itself stays as it is."""
    if bench.long is None:
        return bench.evaluation
    rows = lengths.rows_of(bench.long.tokens, bench.context, bench.context, tokens, bench.long.start)
    return rows if len(rows) > 1 else bench.evaluation


def _about(bench: pipeline.Source, evaluation: torch.Tensor, seconds: float, shared: bool) -> dict[str, Any]:
    """On what, where and when."""
    return {
        "evaluation": _name(bench.described),
        "calibration_tokens": bench.calibration.numel(),
        "healing_tokens": bench.calibration.numel() + (0 if bench.more is None else bench.more.numel()),
        "evaluation_tokens": evaluation.numel(),
        "evaluation_length": evaluation.shape[1],
        "length": bench.calibration.shape[1],
        "probe_seconds": seconds,
        "hardware": speed.machine(bench.model.device) + (SHARED if shared else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _row(
    budget: str,
    name: str,
    fitted: pipeline.Fitted,
    found: quality.Comparison,
    seconds: float,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    damage = found.damage()
    bar = next((r["measured"] for r in rows if r["budget"] == budget and r["method"] == "published"), None)
    return {
        "budget": budget,
        "method": name,
        **damage,
        "kl": float(found.kl.mean()),
        "predicted": fitted.rehearsed,
        "sum_of_prices": fitted.plan.predicted_damage,
        "of_published": damage["measured"] / bar if bar else None,
        "next_token_agreement": float(found.agreement.mean()),
        "sizes": [_sizes(layer) for layer in fitted.plan.target.layers],
        "parameters": parameters(fitted.plan.target),
        "seconds": seconds,
    }


def _sizes(layer: LayerShape) -> list[int]:
    """Width and dimension of queries and keys, dimension of values, query heads, key/value heads, MLP width."""
    return [layer.qk_width, layer.qk_dim, layer.v_dim, layer.query_heads, layer.kv_heads, layer.mlp_width]


def _line(row: dict[str, Any]) -> str:
    change = math.expm1(row["measured"]) * 100
    half = (row["measured_high"] - row["measured_low"]) / 2
    bar = f"{row['of_published']:.3f}" if row["of_published"] else "-"
    return (
        f"{row['budget']:12} {row['method']:28} damage {row['measured']:.4f} ± {half:.4f}  perplexity {change:+.2f}%  "
        f"of published {bar}  predicted {row['predicted']:.4f}  {row['heal_tokens']:,} tokens  {row['seconds']:.0f} s"
    )


def arguments() -> argparse.ArgumentParser:
    """What can be asked for; settings of a run have the names and defaults that are theirs there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--plan", action="append", choices=list(PLANS))
    parser.add_argument("--heal", action="append", choices=HEALINGS)
    parser.add_argument("--heal-option", action="append", default=[], help="such as tokens=2000000")
    parser.add_argument("--allow", default="qk,v,mlp", help="units that are probed, separated by commas")
    parser.add_argument("--cut", help="those of them that plans may cut which have no units of their own")
    parser.add_argument("--samples", action="store_true", help="keep texts that source and cut model write")
    parser.add_argument("--zero-shot", type=Path, help="folder of LAMBADA, HellaSwag, ARC-easy and PIQA")
    parser.add_argument("--zero-shot-most", type=int, help="items of each task")
    parser.add_argument("--zero-shot-heal", action="append", choices=HEALINGS, help="only after these healings")
    parser.add_argument("--shared", action="store_true", help="note that the machine has other work meanwhile")
    parser.add_argument("--work", type=Path, help="folder of a probing that several runs share")
    parser.add_argument("--probe", action="store_true", help="probe into --work, and measure nothing")
    parser.add_argument("--join", type=Path, nargs="+", help="measure nothing: put these results together")
    parser.add_argument("--data")
    parser.add_argument("--eval")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--swap-tokens", type=int, default=8_192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pool", default="none", help="key/value heads that share a cached row: a number or all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def main() -> None:
    parser = arguments()
    asked = vars(parser.parse_args())
    out, files, shared, samples = (asked.pop(name) for name in ("out", "join", "shared", "samples"))
    work, cut, only_probe = (asked.pop(name) for name in ("work", "cut", "probe"))
    out.parent.mkdir(parents=True, exist_ok=True)
    if files:
        if out.exists() and out not in files:
            sys.exit(f"{out} exists; choose another --out, or --join it too.")
        write_atomically(out, json.dumps(joined(files, list(PLANS), HEALINGS), indent=1) + "\n")
        return
    if not (asked["model"] and asked["budget"]):
        parser.error("give a model and at least one --budget, or results to --join")
    known = [name for name in DEFAULT_PLANS if asked["pool"] == "none" or PLANS[name]["strategy"] in POOLING]
    plans, healings = asked.pop("plan") or known, asked.pop("heal") or list(HEALINGS)
    tasks = Asked(asked.pop("zero_shot"), asked.pop("zero_shot_most"), tuple(asked.pop("zero_shot_heal") or HEALINGS))
    budgets, options, allow = tuple(asked.pop("budget")), tuple(asked.pop("heal_option")), asked.pop("allow")
    units = tuple(allow.split(","))
    settings = Settings(budgets=budgets, heal="distill", heal_options=options, allow=units, **asked)
    table = Table(settings, out, tasks, samples, shared, work, cut)
    if only_probe:
        table.probe()
    else:
        table.measure(plans, healings)


if __name__ == "__main__":
    main()
