"""What to type: to make the run again, or to make the stage that is missing. Flags come from `Settings`.

Commands name the run's real folder and its own options. What builds something else works in a new folder beside it.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from headwise.runs.dossier import Dossier
from headwise.runs.flags import words
from headwise.runs.settings import Settings
from headwise.types import Sweep
from headwise.types.shape import ENGINES

FOLDER = "DIR"  # stands for the run folder where it is not known, as in a notebook or on the Hub
UNKNOWN = {"model": "MODEL", "budgets": ("kv=75%",)}  # what a command needs, where the settings do not have it
USUAL = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}


def folder_of(dossier: Dossier) -> str:
    """The run folder as it was named."""
    return dossier.folder or FOLDER


def beside(dossier: Dossier, what: str) -> str:
    """A new folder beside the run's, named after what is in it.

    >>> beside(Dossier(folder="runs/first"), "kv=12.5%")
    'runs/first-kv12.5'
    """
    return f"{folder_of(dossier).rstrip('/')}-{re.sub('[^A-Za-z0-9.]+', '', what)}"


def run_command(settings: Mapping[str, Any], out: str) -> str:
    """The command line that makes this run again, quoted for a shell; options that are as usual are left out.

    >>> run_command({"model": "gpt2", "budgets": ["kv=75%"], "seed": 1, "heal": "refit"}, "runs/new")
    'headwise run gpt2 --budget kv=75% --seed 1 --out runs/new'
    """
    return shlex.join(["headwise", "run", *_words("run", settings), "--out", out])


def how_to_make(dossier: Dossier, stage: str) -> str:
    """Commands, one per line, from the first stage that is missing to `stage`, and the report again at the end.

    Stages and not `headwise run`, which refuses a folder that holds a report.
    """
    settings, folder = _settings(dossier), folder_of(dossier)
    lines: list[str] = []
    if dossier.readings is None:
        probe = _words("probe", settings)
        lines.append(shlex.join(["headwise", "probe", *probe, "--out", folder, "--overwrite"]))
    if dossier.plan is None and stage != "probe":
        lines.append(_on("allocate", folder, settings))
    if stage in ("heal", "verify"):
        if dossier.healing is None:
            left_out = {"heal": None} if stage == "heal" and settings.get("heal") == "none" else {}
            lines.append(_build(folder, {**settings, **left_out}))
        lines.append(_on("verify", folder, settings))
    return "\n".join([*lines, shlex.join(["headwise", "report", folder])])


def another_budget(dossier: Dossier, sweep: Sweep, budget: str) -> str:
    """Build a point of the frontier in a new folder, from this run's readings: nothing is probed again."""
    out, settings = beside(dossier, budget), _settings(dossier)
    asked = {**settings, "budgets": (budget, *sweep.others), "allow": sweep.allow, "strategy": "exact"}
    return "\n".join((_copy(dossier, out), _on("allocate", out, {**asked, "portable": False}), *_finish(out, settings)))


def another_healing(dossier: Dossier, method: str) -> str:
    """Heal the same plan in another way, in a new folder."""
    out = beside(dossier, method)
    return "\n".join((_copy(dossier, out), *_finish(out, {**_settings(dossier), "heal": method, "heal_options": ()})))


def for_engine(dossier: Dossier) -> tuple[str, str] | None:
    """Why vLLM does not serve a decoder's model as it is, and the command that makes one that it serves; else None."""
    plan, settings = dossier.plan, _settings(dossier)
    if plan is None or not plan.target.cached or any(layer.role for layer in plan.target.layers):
        return None
    layers = [layer for layer in plan.target.layers if layer.query_heads]
    taken, odd = ENGINES["vllm"], sorted({layer.qk_dim for layer in layers})
    if any(layer.coded for layer in layers):
        why = "vLLM, llama.cpp and other engines with a cache of their own cannot hold a cache in bits"
    elif plan.portable and not set(odd) <= set(taken):
        why = f"vLLM on a CPU takes heads of {', '.join(map(str, taken))} numbers; this model's have {odd[0]}"
    else:
        return None
    bits_alone = set(settings.get("allow", ())) <= {"bits", "weights"}  # which --serve leaves out
    heads = {layer.kv_heads * layer.pooled for layer in plan.source.layers}
    shared = len(heads) == 1 and all(layer.pooled > 1 for layer in plan.source.layers)
    more = {**({"allow": ("qk", "v")} if bits_alone else {}), **({"pool": "all"} if shared else {})}
    asked = {**settings, **more, "serve": "vllm"}
    return why, run_command(asked, beside(dossier, "vllm"))


def _copy(dossier: Dossier, out: str) -> str:
    return shlex.join(["cp", "-r", folder_of(dossier), out])


def _finish(out: str, settings: Mapping[str, Any]) -> tuple[str, str, str]:
    """Build, verify and report, in a folder that has a plan."""
    return _build(out, settings), _on("verify", out, settings), shlex.join(["headwise", "report", out])


def _settings(dossier: Dossier) -> dict[str, Any]:
    return dossier.settings.to_json() if dossier.settings else {}


def _build(folder: str, settings: Mapping[str, Any]) -> str:
    """Healing as in the run: another one would replace the model by one that was healed otherwise."""
    return _on("reshape" if settings.get("heal") == "none" else "heal", folder, settings)


def _on(command: str, folder: str, settings: Mapping[str, Any]) -> str:
    return shlex.join(["headwise", command, folder, *_words(command, settings)])


def _words(command: str, settings: Mapping[str, Any]) -> list[str]:
    """What to type for settings that are not as usual; placeholders stand for what a command needs and is not there."""
    known = {name: value for name, value in settings.items() if value not in (None, "", [], ())}
    changed = {name: value for name, value in known.items() if _plain(value) != _plain(USUAL.get(name))}
    return words(Settings, command, UNKNOWN | changed)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
