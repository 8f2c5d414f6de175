"""What all rows of the bits benchmark share: the source models with their texts, scores, and the result file."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import bits_plans as plans
import torch
import transformers
from provenance import commit
from quality import plain
from rival_caches import whole_bytes

from headwise import families, heal, pipeline
from headwise.checks import _lengths as lengths
from headwise.checks import speed
from headwise.data import batches
from headwise.runs.folder import RunFolder
from headwise.runs.settings import Settings
from headwise.stages.source import heads_to_pool
from headwise.types import write_atomically

HEADS = {"each head": "none", "pooled": "auto"}  # how our rows are made: the setting `pool`
RANK = ("qk", "v", "mlp")  # what a rank cut may cut
SAME = ("eval", "eval_tokens", "dtype", "rows", "seed")  # settings that a rival depends on
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Stream = Callable[[torch.Tensor], torch.Tensor]  # rows of tokens -> residual stream after the last layer


class Key(NamedTuple):
    """What a row is about; `asked` is the share that was asked for, or whose bytes were matched."""

    group: str
    method: str
    asked: str = ""


def say(text: str) -> None:
    """Progress, for a person."""
    print(text, file=sys.stderr, flush=True)


def told(items: Sequence[Any], label: Any) -> Iterable[Any]:
    """Name what takes long."""
    if len(items) > 1:
        say(f"  {label if isinstance(label, str) else label()}: {len(items)} steps")
    return items


class Bench:
    """One source model with its rows, probed once."""

    def __init__(self, settings: Settings, work: Path, dtype: torch.dtype) -> None:
        self.settings, self.work, self.dtype = settings, work, dtype

    @cached_property
    def source(self) -> Any:
        say(f"loading {self.settings.model} (heads pooled: {self.settings.pool})")
        return pipeline.load_source(self.settings, told)

    @cached_property
    def probed(self) -> Any:
        say(f"probing (heads pooled: {self.settings.pool})")
        return pipeline.probe_in(RunFolder(self.work), self.settings, self.source, told, diagnose=False)

    @cached_property
    def model(self) -> Any:
        """The source as it is measured."""
        return self.cast(copy.deepcopy(self.source.model) if self.dtype != torch.float32 else self.source.model)

    @cached_property
    def prices(self) -> plans.Prices:
        return plans.Prices.of(self.probed)

    @cached_property
    def solver(self) -> plans.Solver:
        return plans.Solver(self.settings, self.probed)

    @property
    def family(self) -> Any:
        return self.source.family

    @property
    def layers(self) -> Any:
        return self.source.shape.layers

    def cast(self, model: Any) -> Any:
        """A model in the precision of the benchmark; buffers stay, as rotary frequencies need theirs."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model

    def rows(self, length: int, count: int) -> torch.Tensor:
        text = self.source.long
        if text is None:
            sys.exit("no held-out text: give --data FILE, or --eval FILE.")
        if length > (most := self.family.longest(self.source.model.config)):
            sys.exit(f"the model takes {most:,} tokens, not {length:,}; lower --length.")
        found = lengths.rows_of(text.tokens, length, length, count * length, text.start)[:count]
        if not len(found):
            sys.exit(f"the held-out text has {len(text.tokens):,} tokens: too few for one row of {length:,}.")
        return found

    def plan(self, share: str) -> Any:
        """The plan that a user gets who asks for a share of the cache."""
        wanted = replace(self.settings, budgets=(f"kv={share}",))
        return pipeline.allocate(wanted, self.source, self.probed.readings, pipeline.budgets_of(wanted, self.source))

    def fitted(self, plan: Any) -> Any:
        return self.source.fit(replace(self.settings, heal="none"), self.probed, plan, None, told)

    def healed(self, method: str, options: tuple[str, ...], model: Any) -> tuple[Any, Any]:
        job = self.source.job(replace(self.settings, heal=method, heal_options=options), model, told)
        return heal.healed(method, job, self.source.rehearse)


class Table:
    """All rows of a result file."""

    def __init__(self, asked: argparse.Namespace, settings: Settings) -> None:
        self.asked, self.settings, self.commit = asked, settings, commit()
        about = plain(settings) | {"dtype": asked.dtype, "rows": asked.rows}
        self.found: dict[str, Any] = {"name": asked.name or Path(asked.model).stem, "settings": about, "rows": []}
        if asked.out.exists():
            known = json.loads(asked.out.read_text())
            if known["settings"] != about:
                sys.exit(f"{asked.out} was measured with other settings; choose another --out, or delete it.")
            self.found = known
        elif asked.rivals_from:
            self.found["rows"] = of_groups(asked.rivals_from, about, ("rivals", "library"))
        mark = hashlib.sha256(json.dumps([about, self.commit], sort_keys=True).encode()).hexdigest()[:8]
        work, dtype = asked.out.parent / f".{asked.out.stem}-{mark}", DTYPES[asked.dtype]
        self.benches = {
            kind: Bench(replace(settings, pool=pool), work / kind.replace(" ", "-"), dtype)
            for kind, pool in HEADS.items()
        }
        self.benches["rank"] = Bench(self._rank_settings(), work / "rank", dtype)

    def _rank_settings(self) -> Settings:
        """A rank cut pools as many heads as a coded cache does."""
        config = families.configuration(self.settings.model)
        heads = heads_to_pool(replace(self.settings, pool="auto"), families.family_of(config).shape_of(config))
        return replace(self.settings, allow=RANK, pool=str(heads) if heads > 1 else "none")

    def left(self, key: Key) -> list[int]:
        """Lengths at which something was not measured by this code yet."""
        done = {row["length"] for row in self.found["rows"] if _key(row) == key and row["commit"] == self.commit}
        return [length for length in self.asked.length if length not in done]

    def add(self, key: Key, length: int, **found: Any) -> None:
        """Keep one row, in place of an older one of the same kind, and write the file."""
        rows = [row for row in self.found["rows"] if (_key(row), row["length"]) != (key, length)]
        row = {**key._asdict(), "length": length, "commit": self.commit, **found}
        self.found |= self._about() | {"rows": [*rows, row]}
        write_atomically(self.asked.out, json.dumps(self.found, indent=1) + "\n")
        say(_line(row))

    def _about(self) -> dict[str, Any]:
        device = next((b.source.model.device for b in self.benches.values() if "source" in vars(b)), None)
        machine = {} if device is None else {"hardware": speed.machine(device) + self.shared}
        evaluated = [b.source.described for b in self.benches.values() if "source" in vars(b)]
        return {
            **machine,
            **({"evaluation": Path(evaluated[0]).name} if evaluated else {}),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": self.commit,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    @property
    def shared(self) -> str:
        return ", shared with other work" if self.asked.shared else ""

    def refuse(self, key: Key, wanted: list[int], why: object) -> None:
        """Rows that say why there is nothing to measure."""
        for length in wanted:
            self.add(key, length, why=" ".join(str(why).split()))

    def measure(
        self,
        key: Key,
        bench: Bench,
        stored: Callable[[int], float],
        stream: Stream,
        model: Any,
        wanted: Sequence[int],
        **more: Any,
    ) -> None:
        """Rows of one method at some lengths."""
        for length in wanted:
            start, rows = time.perf_counter(), bench.rows(length, self.asked.rows)
            damage, kl = _damage(bench, stream, model, rows)
            size = stored(length)  # after reading: caches of others are counted as they were
            low, high = lengths.interval(damage)
            mean = float(damage.mean())
            found = {"bytes": size, "share": size / whole_bytes(bench.layers, length)}
            found |= {"measured": mean, "measured_low": low, "measured_high": high, "kl": kl, "texts": len(rows)}
            found |= {"perplexity_change": math.expm1(mean), "seconds": time.perf_counter() - start}
            self.add(key, length, **more, **found)

    def reads(self, bench: Bench, model: Any) -> Stream:
        """How a model reads rows without a cache."""
        return lambda ids: lengths.last_stream(bench.family, model, ids)


def of_groups(path: Path, about: dict[str, Any], groups: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of some groups of an earlier result, if it is of the same text and precision."""
    earlier = json.loads(path.read_text())
    if differ := [name for name in SAME if earlier["settings"][name] != about[name]]:
        sys.exit(f"{path} has another {differ[0]}: its rows cannot be kept.")
    return [row for row in earlier["rows"] if row["group"] in groups]


def join(file: Path, earlier: Path, groups: Sequence[str]) -> None:
    """Add rows of some groups of another result, which name their own commit, to a result that has none of them."""
    found = json.loads(file.read_text())
    more, known = of_groups(earlier, found["settings"], groups), {(*_key(r), r["length"]) for r in found["rows"]}
    if twice := [row["method"] for row in more if (*_key(row), row["length"]) in known]:
        sys.exit(f"{file} has a row of {twice[0]} already.")
    found["rows"] += more
    write_atomically(file, json.dumps(found, indent=1) + "\n")


def _key(row: dict[str, Any]) -> Key:
    return Key(row["group"], row["method"], row["asked"])


@torch.no_grad()
def _damage(bench: Bench, stream: Stream, model: Any, rows: torch.Tensor) -> tuple[Any, float]:
    """Per row the increase of the loss over the source's; and the mean divergence from it."""
    source, parts = bench.model, []
    for part in batches(rows):
        part = part.to(source.device)
        streams = lengths.last_stream(bench.family, source, part), stream(part)
        parts.append(lengths.predictions(bench.family, (source, model), streams, part))
    found = lengths.together(parts)
    return (found.loss_after - found.loss_before).mean(1).numpy(), float(found.kl.mean())


def _line(row: dict[str, Any]) -> str:
    name = f"{row['length']:6} {row['method']:44} {row['asked']:30}"
    if "why" in row:
        return f"{name} {row['why']}"
    half = (row["measured_high"] - row["measured_low"]) / 2
    predicted = f"predicted {row['predicted']:.5f}" if row.get("predicted") is not None else ""
    return f"{name} {row['share']:7.2%}  damage {row['measured']:.5f} ± {half:.5f}  KL {row['kl']:.5f}  {predicted}"
