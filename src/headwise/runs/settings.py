"""What a run is asked to do, and the flags that say it. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headwise.errors import HeadwiseError, PlanError
from headwise.registry import names, nearest
from headwise.runs import fingerprint
from headwise.runs.flags import check_smallest, option
from headwise.runs.heal_options import Options
from headwise.strategies import POOLING
from headwise.types import DEFAULT_UNITS, UNITS, ModelShape, Record, under_time
from headwise.types.shape import ENGINES
from headwise.types.verdict import MAX_LOSS, damage_limit

SAME_DIMS = ("exact", "uniform")  # strategies that can give keys and values the same size
FORMATS = ("auto", "float32", "bfloat16")
LONGEST_CONTEXT = 32_768  # unless --context is given
CUT, HEAL, DATA, MACHINE = "What is cut", "Healing and verification", "Data", "Machine"  # headings in the help text
HEAL_OPTIONS = ", ".join(field.name for field in fields(Options))


@dataclass(frozen=True, slots=True)
class Settings(Record):
    """What a run is asked to do. An interrupted run resumes only under the same settings (see `resumes`)."""

    model: str = option(..., "Hub id, local folder, .gguf file, or 'embedded'.", "run probe", argument=True)
    budgets: tuple[str, ...] = option(
        (),
        "Limit on the result, in percent of the source or absolute; repeatable. Budgets are listed below.",
        "run probe allocate",
        value="NAME=LIMIT",
        required="run allocate",
        flag="budget",
        plug_ins="headwise.budgets",
    )
    data: str | None = option(
        None,
        "Calibration data. Text: a text or jsonl file, a folder of them, a datasets name, 'stdlib', or 'self' (the "
        "model writes it, the default). Images: a folder, an .npz file, a datasets name. Speech: a folder of .wav "
        "files or a jsonl file.",
        "run probe",
        DATA,
        "SOURCE",
    )  # for the embedded model: the standard library
    eval: str | None = option(
        None, "Evaluation data; if not given, a part of --data is held out.", "run", DATA, "SOURCE"
    )
    task: str | None = option(
        None, "The model's task; if not given, that of its head.", "run probe", DATA, plug_ins="headwise.tasks"
    )
    strategy: str = option(
        "exact", "How the budget is divided among layers.", "run allocate", CUT, plug_ins="headwise.strategies"
    )
    rounds: int = option(1, "Number of rounds: cut a part, probe again, cut more.", "run", CUT, least=1)
    heal: str = option(
        "refit", "How the cut model is repaired; 'none' leaves it as it is.", "run heal", HEAL, plug_ins="headwise.heal"
    )
    heal_options: tuple[str, ...] = option(
        (),
        f"Option of the healing, such as tokens=1e6; repeatable. Known: {HEAL_OPTIONS}.",
        "run heal",
        HEAL,
        "NAME=VALUE",
        flag="heal-option",
    )
    portable: bool = option(
        False, "One size for all layers, so that stock transformers loads the result.", "run allocate", CUT
    )
    allow: tuple[str, ...] = option(
        DEFAULT_UNITS,
        f"What may be cut, of {','.join(UNITS)}. bits: cached keys and values in fewer bits; weights: weights in "
        "fewer bits, with a limit on their bytes; rank: the query projection as two thin factors.",
        "run probe allocate",
        CUT,
        "UNITS",
        commas=True,
    )
    serve: str | None = option(
        None,
        f"Engine that will serve the result ({', '.join(ENGINES)}): only sizes that its cache holds without "
        "padding, and no bits.",
        "run probe allocate",
        CUT,
        "ENGINE",
    )
    multiple: int = option(
        1,
        "Sizes of heads and MLPs in multiples of this, such as 16, 32 or 64; no bits if above 1.",
        "run probe allocate",
        CUT,
        least=1,
    )
    same_dims: bool = option(
        False, "Queries, keys and values of a layer get the same dimension; no bits.", "run probe allocate", CUT
    )
    seed: int = option(0, "Random seed.", "run probe allocate", MACHINE, least=0)
    device: str = option("auto", "auto, cpu, cuda, or one GPU: cuda:1.", "run probe", MACHINE, "NAME")
    dtype: str = option(
        "auto",
        "Number format of computation: float32, bfloat16, or auto: bfloat16 on a GPU if the file has it.",
        "run probe",
        MACHINE,
        "FORMAT",
    )
    tokens: int = option(65_536, "Calibration tokens; for images, patches.", "run probe", DATA, least=1)
    eval_tokens: int = option(32_768, "Evaluation tokens.", "run", DATA, least=1)
    swap_tokens: int = option(
        4_096, "Tokens on which the damage of single cuts is measured; 0: only predicted.", "run probe", DATA, least=0
    )
    length: int = option(512, "Tokens in a row of text; at most the model's context.", "run probe", DATA, least=8)
    context: int | None = option(
        None,
        "Context length, in tokens, that the result must serve; if not given, the model's own, at most "
        f"{LONGEST_CONTEXT:,}.",
        "run probe",
        DATA,
        least=8,
    )
    trust_remote_code: bool = option(
        False, "Run Python code from the model's repository.", "run probe reshape heal verify", MACHINE
    )  # of this command alone: the value in a file is never believed
    recompute: bool | None = option(
        None, "Gradient checkpointing; if not given, where memory is short.", "run probe", MACHINE
    )
    stream: bool | None = option(
        None, "Keep one layer in memory at a time; if not given, where the model does not fit.", "run probe", MACHINE
    )
    pool: str = option(
        "auto",
        "Key/value heads that share a row of the cache: none, all, a number such as 2, or auto: all, up to 1,024 "
        "numbers, where the cache is coded in bits; what loses least, where time is limited.",
        "run probe",
        CUT,
        "HEADS",
    )
    max_loss: str | None = option(
        None,
        f"Largest accepted damage: 2% more perplexity, or 0.02 nats per token; {MAX_LOSS} if not given.",
        "run verify",
        HEAL,
        "DAMAGE",
    )

    def __post_init__(self) -> None:
        if broken := [n for n in ("model", "data", "eval", "task", "device") if "\0" in (getattr(self, n) or "")]:
            raise HeadwiseError(f"{broken[0]} contains a NUL character; give a name that a file can have.")
        check_smallest(self)
        if self.heal not in (known := ("none", *names("headwise.heal"))):
            hint = nearest(self.heal, known)
            raise HeadwiseError(f"no healing is called '{self.heal}'.{hint} Known: {', '.join(known)}.")
        if self.dtype not in FORMATS:
            raise HeadwiseError(f"dtype is '{self.dtype}'; give {', '.join(FORMATS)}.")
        if self.serve is not None and self.serve not in ENGINES:
            raise HeadwiseError(f"no engine is called '{self.serve}'; --serve takes: {', '.join(ENGINES)}.")
        if (self.serve or self.same_dims) and self.strategy not in SAME_DIMS:
            raise HeadwiseError(
                f"--serve and --same-dims are planned by {', '.join(SAME_DIMS)}; leave out --strategy {self.strategy}."
            )
        Options.parse(self.heal_options)
        damage_limit(self.max_loss or MAX_LOSS)
        if self.pool not in ("auto", "none", "all") and not (self.pool.isdecimal() and int(self.pool) > 1):
            raise HeadwiseError(f"pool is '{self.pool}'; give auto, none, all, or how many heads share a row.")
        if self.pool not in ("auto", "none"):
            self.refuse_to_pool()

    def refuse_to_pool(self) -> None:
        """Refuse settings that heads with shared rows cannot have."""
        if {"heads", "kv_heads"} & set(self.allow):
            raise HeadwiseError(
                "pooled heads cannot be cut one by one; leave heads and kv_heads out of --allow, or probe with --pool "
                "none."
            )
        if self.portable:
            raise HeadwiseError(
                "stock code has no rows that heads share; leave out --portable, or probe with --pool none."
            )
        if self.strategy not in POOLING:
            raise HeadwiseError(
                f"pooled heads are allocated by {', '.join(POOLING)}; probe with --pool none for others."
            )

    def resumes(self, before: Settings) -> bool:
        """Whether a run with these settings can resume one that was begun with others.

        Only what changes memory and nothing else may differ, and trust, which is given anew with every command.
        """
        return not self.changed(before)

    def difference(self, before: Settings) -> str:
        """The settings that keep a run from being resumed, in words."""
        found = [
            f"{name} was {_in_words(getattr(before, name))} and is now {_in_words(getattr(self, name))}"
            for name in self.changed(before)
        ]
        return "; ".join(found) or "the settings differ"

    def changed(self, before: Settings) -> tuple[str, ...]:
        """The names of the settings that keep a run from being resumed."""
        ours, theirs = (Options.parse(settings.heal_options).fixed() for settings in (self, before))
        free = {"trust_remote_code", "recompute", *(("heal_options",) if ours == theirs else ())}
        names = (field.name for field in fields(self) if field.name not in free)
        return tuple(name for name in names if getattr(self, name) != getattr(before, name))

    def served(self, longest: int) -> int:
        """The context length that the result must hold for; `longest` is what the model takes."""
        if self.context is not None and self.context > longest:
            raise HeadwiseError(
                f"the context is {self.context:,} tokens and the model takes {longest:,}; lower --context."
            )
        return self.context or min(longest, LONGEST_CONTEXT)

    def asked(self, names: Sequence[str]) -> dict[str, str]:
        """Some settings as text, for the record of what a stage followed."""
        return {name: json.dumps(self.to_json()[name]) for name in names}

    def inputs(self, source: str) -> dict[str, str]:
        """Fingerprints of everything that is read: the model, found at `source`, and the data."""
        data = self.data or ("stdlib" if self.model == "embedded" else None)
        read = fingerprint.of_data(data) | fingerprint.of_data(self.eval)
        return fingerprint.of_model(self.model, source) | read

    @property
    def may_code(self) -> bool:
        """Whether cached rows may be coded: where the cache is limited, or time, or nothing is yet.

        Where time is limited, only if no sizes of attention are to be cut.
        """
        timed = "latency" in self.limited
        limited = timed or not self.limited or bool({"kv", "memory"} & self.limited)
        allow = under_time(self.allow) if timed else self.allow
        return "bits" in allow and limited and self._may_choose_bits

    @property
    def may_pack(self) -> bool:
        """Whether weights may be stored in few bits: where their bytes are limited, and no time is."""
        limited = bool({"weights", "memory"} & self.limited) and "latency" not in self.limited
        return "weights" in self.allow and limited and self._may_choose_bits

    @property
    def limited(self) -> set[str]:
        """The names of the budgets."""
        return {text.partition("=")[0].strip() for text in self.budgets}

    @property
    def _may_choose_bits(self) -> bool:
        return self.strategy == "exact" and not (self.portable or self.limits_sizes)

    @property
    def limits_sizes(self) -> bool:
        """Whether only some sizes are legal: those of an engine, multiples, or the same for keys and values."""
        return bool(self.serve) or self.multiple > 1 or self.same_dims

    @property
    def units(self) -> tuple[str, ...]:
        """What may be cut: all that is allowed; where sizes are limited, bits and weights are not."""
        return tuple(unit for unit in self.allow if unit not in ("bits", "weights") or not self.limits_sizes)

    def legal(self, shape: ModelShape) -> ModelShape:
        """A model with the sizes that these settings make legal."""
        if not self.limits_sizes:
            return shape
        if self.serve and (not shape.cached or any(layer.role for layer in shape.layers)):
            raise PlanError(f"{self.serve} serves decoders; leave out --serve for {shape.family} models.")
        heads, equal = ENGINES.get(self.serve or "", ()), self.same_dims or bool(self.serve)
        return replace(shape, grain=replace(shape.grain, multiple=self.multiple, heads=heads, equal=equal))

    @property
    def only_kv(self) -> bool:
        """Whether nothing but the cache is limited, so that the MLP need not be probed."""
        return bool(self.budgets) and all(text.strip().startswith("kv") for text in self.budgets)


def _in_words(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
