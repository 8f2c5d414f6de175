"""What to type: to make the run again, or to make the stage that is not there yet."""

from __future__ import annotations

import shlex
from typing import Any

from headwise.runs.dossier import Dossier
from headwise.types import Sweep

FOLDER = "DIR"  # the run folder, which the dossier does not know
PROBE_FLAGS = ("data", "task", "seed", "device", "tokens", "swap_tokens", "length", "context", "pool")
RUN_FLAGS = (
    "data",
    "eval",
    "task",
    "strategy",
    "rounds",
    "heal",
    "seed",
    "device",
    "tokens",
    "eval_tokens",
    "swap_tokens",
    "length",
    "context",
    "pool",
    "max_loss",
)


def run_command(settings: dict[str, Any]) -> str:
    """The command line that makes this run again, quoted for a shell.

    >>> run_command({"model": "gpt2", "budgets": ["kv=75%"], "seed": 0})
    'headwise run gpt2 --budget kv=75% --seed 0 --out DIR'
    """
    parts = [
        "headwise",
        "run",
        str(settings.get("model") or "MODEL"),
        *_budgets(settings),
        *_flags(settings, RUN_FLAGS),
    ]
    parts += [part for text in items(settings.get("heal_options")) for part in ("--heal-option", text)]
    parts += [*_switch(settings, "portable"), *_allow(settings), *_switch(settings, "trust_remote_code")]
    return shlex.join([*parts, "--out", FOLDER])


def how_to_make(dossier: Dossier, stage: str) -> str:
    """Commands, one a line, from the first stage that is missing to `stage`, with the report again at the end.

    Stages and not `headwise run`, as that refuses a folder in which a report lies.
    """
    settings: dict[str, Any] = dossier.settings.to_json() if dossier.settings else {}
    lines = []
    trust = _switch(settings, "trust_remote_code")
    if dossier.readings is None:
        model = str(settings.get("model") or "MODEL")
        flags = [
            *_budgets(settings),
            *_flags(settings, PROBE_FLAGS),
            *_allow(settings),
            *_switch(settings, "trust_remote_code"),
        ]
        lines.append(shlex.join(["headwise", "probe", model, *flags, "--out", FOLDER, "--overwrite"]))
    if dossier.plan is None and stage != "probe":
        flags = [*_flags(settings, ("strategy", "seed")), *_switch(settings, "portable"), *_allow(settings)]
        lines.append(shlex.join(["headwise", "allocate", FOLDER, *_budgets(settings), *flags]))
    if stage in ("heal", "verify"):
        if dossier.healing is None:
            lines.append(_heal(settings if stage == "verify" or settings.get("heal") != "none" else {}))
        lines.append(shlex.join(["headwise", "verify", FOLDER, *trust]))
    return "\n".join([*lines, f"headwise report {FOLDER}"])


def _heal(settings: dict[str, Any]) -> str:
    """Healing as it was asked for: another one would replace the model by one that was healed otherwise."""
    method = settings.get("heal")
    if method == "none":
        return f"headwise reshape {FOLDER}"
    more = ["--heal", str(method)] if method and method != "refit" else []
    more += [part for text in items(settings.get("heal_options")) for part in ("--heal-option", text)]
    return shlex.join(["headwise", "heal", FOLDER, *more, *_switch(settings, "trust_remote_code")])


def allocate_command(sweep: Sweep, settings: dict[str, Any]) -> tuple[str, str]:
    """What stands before and after the first budget in the commands that build a point of the frontier."""
    others = [part for text in sweep.others for part in ("--budget", text)]
    after = shlex.join([*others, "--allow", ",".join(sweep.allow)])
    stages = (_heal(settings), f"headwise verify {FOLDER}", f"headwise report {FOLDER}")
    return f"headwise allocate {FOLDER} --budget ", "\n".join((f" {after}", *stages))


def items(value: Any) -> list[str]:
    """A setting as a list of texts, whether it holds one, several or none."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)] if value else []


def _budgets(settings: dict[str, Any]) -> list[str]:
    return [part for text in items(settings.get("budgets")) or ["kv=75%"] for part in ("--budget", text)]


def _flags(settings: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    known = [n for n in names if settings.get(n) is not None and (n, settings[n]) != ("pool", "none")]
    return [part for name in known for part in (f"--{name.replace('_', '-')}", str(settings[name]))]


def _switch(settings: dict[str, Any], name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}"] if settings.get(name) else []


def _allow(settings: dict[str, Any]) -> list[str]:
    allowed = items(settings.get("allow"))
    return ["--allow", ",".join(allowed)] if allowed else []
