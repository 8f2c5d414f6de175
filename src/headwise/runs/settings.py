"""What a run was asked to do. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headwise.errors import HeadwiseError
from headwise.registry import names
from headwise.runs import fingerprint
from headwise.runs.heal_options import Options
from headwise.strategies import POOLING
from headwise.types import DEFAULT_UNITS, Record
from headwise.types.verdict import MAX_LOSS, damage_limit

LONGEST_CONTEXT = 32_768  # unless a longer one is asked for


@dataclass(frozen=True, slots=True)
class Settings(Record):
    """What a run was asked to do. A run that was killed goes on under the same settings (see `goes_on`)."""

    model: str
    budgets: tuple[str, ...] = ()
    data: str | None = None  # None: the standard library for the embedded model, the model's own text for others
    eval: str | None = None  # None: held out from `data`
    task: str | None = None  # None: that of the model's head
    strategy: str = "exact"
    rounds: int = 1
    heal: str = "refit"
    heal_options: tuple[str, ...] = ()  # such as steps=200
    portable: bool = False
    allow: tuple[str, ...] = DEFAULT_UNITS
    seed: int = 0
    device: str = "auto"
    tokens: int = 65_536  # calibration
    eval_tokens: int = 32_768
    swap_tokens: int = 4_096  # 0: prices are predicted, not measured
    length: int = 512  # of a block of text, at most what the model takes
    context: int | None = None  # tokens that will be served; None: what the model takes, at most LONGEST_CONTEXT
    trust_remote_code: bool = False  # of this command alone: the value in a file is never believed
    recompute: bool | None = None  # layers compute twice what gradients need of them; None: where memory asks for it
    stream: bool | None = None  # one layer in memory at a time; None: where the model would not fit
    pool: str = "none"  # key/value heads that share a cached row: a number or all
    max_loss: str | None = None  # most damage that counts as good: 2% of perplexity, or nats; None: MAX_LOSS

    def __post_init__(self) -> None:
        if lost := [n for n in ("model", "data", "eval", "task", "device") if "\0" in (getattr(self, n) or "")]:
            raise HeadwiseError(f"{lost[0]} contains a NUL character; give a name that a file can have.")
        for name, least in (
            ("rounds", 1),
            ("tokens", 1),
            ("eval_tokens", 1),
            ("length", 8),
            ("swap_tokens", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise HeadwiseError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.context is not None and self.context < 8:
            raise HeadwiseError(f"context is {self.context}; it is the number of tokens served, at least 8.")
        if self.heal not in (known := ("none", *names("headwise.heal"))):
            raise HeadwiseError(f"no healing is called '{self.heal}'. Known: {', '.join(known)}.")
        Options.parse(self.heal_options)
        damage_limit(self.max_loss or MAX_LOSS)
        if self.pool not in ("none", "all") and not (self.pool.isdecimal() and int(self.pool) > 1):
            raise HeadwiseError(f"pool is '{self.pool}'; give none, all, or how many heads share a row, such as 2.")
        if self.pool != "none":
            self.refuse_to_pool()

    def refuse_to_pool(self) -> None:
        """What heads that share rows cannot have, and what to do instead."""
        if {"heads", "kv_heads"} & set(self.allow):
            raise HeadwiseError("pooled heads cannot go one by one; leave heads and kv_heads out of --allow.")
        if self.portable:
            raise HeadwiseError("stock code has no rows that heads share; leave out --portable or --pool.")
        if self.strategy not in POOLING:
            raise HeadwiseError(f"pooled heads are allocated by {', '.join(POOLING)}; leave out --pool for others.")
        if any(text.strip().startswith("latency") for text in self.budgets):
            raise HeadwiseError("pooled layers are not timed yet; limit kv, params or flops, or leave out --pool.")

    def goes_on(self, before: Settings) -> bool:
        """Whether a run with these settings can go on with what one left behind: only its memory may differ."""
        ours, theirs = (Options.parse(settings.heal_options).fixed() for settings in (self, before))
        free: dict[str, Any] = {"heal_options": (), "trust_remote_code": False}  # trust is asked for every time
        return ours == theirs and replace(self, **free) == replace(before, **free)

    def served(self, longest: int) -> int:
        """Tokens of context that the result must hold for; `longest` is what the model takes."""
        if self.context is not None and self.context > longest:
            raise HeadwiseError(
                f"the context is {self.context:,} tokens and the model takes {longest:,}; lower --context."
            )
        return self.context or min(longest, LONGEST_CONTEXT)

    def difference(self, before: Settings) -> str:
        """The first setting that keeps a run from being resumed, in words."""
        for name in (field.name for field in fields(self)):
            now, then = getattr(self, name), getattr(before, name)
            if now != then and not (name == "heal_options" and self.goes_on(replace(before, heal_options=now))):
                return f"{name} was {_shown(then)} and is now {_shown(now)}"
        return "the settings differ"

    def asked(self, names: Sequence[str]) -> dict[str, str]:
        """Some settings as text, for the record of what a stage followed."""
        return {name: json.dumps(self.to_json()[name]) for name in names}

    def inputs(self, source: str) -> dict[str, str]:
        """Fingerprints of everything that is read: the model, found at `source`, and the text."""
        data = self.data or ("stdlib" if self.model == "embedded" else None)
        return {
            **fingerprint.of_model(self.model, source),
            **fingerprint.of_data(data),
            **fingerprint.of_data(self.eval),
        }

    @property
    def only_kv(self) -> bool:
        """Whether nothing but the cache is limited, so that the MLP need not be looked at."""
        return bool(self.budgets) and all(text.strip().startswith("kv") for text in self.budgets)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
