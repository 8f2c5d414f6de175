"""Commands that the fault campaign breaks, each in a folder of its own with a tiny model and a text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from folders import OUT, SOURCE, TEXT

SMALL = ["--data", TEXT, "--tokens", "128", "--swap-tokens", "16", "--length", "16", "--device", "cpu"]
RUN = ["run", SOURCE, "--budget", "kv=75%", *SMALL, "--eval-tokens", "64", "--out", OUT]
SECOND_OUT = "second"
PROBE = ["probe", SOURCE, "--budget", "kv=75%", *SMALL, "--out", OUT]
TRAIN = [
    *("train", SOURCE, "--data", TEXT, "--steps", "6", "--save-every", "2", "--eval-every", "3", "--batch-rows", "2"),
    *("--length", "16", "--eval-tokens", "64", "--device", "cpu", "--out", OUT),
]


@dataclass(frozen=True)
class Scenario:
    """Commands, what is run before them, and files that lie in the folder."""

    name: str
    steps: tuple[list[str], ...]
    before: tuple[list[str], ...] = ()
    foreign: bool = False  # a file of the user's lies in the run folder
    needs: str = ""  # a package without which it cannot run
    loose: bool = False  # two undisturbed runs differ in bytes: only names are compared

    @property
    def replaces(self) -> bool:
        """Whether it replaces a whole run, which must be kept until the new one is finished."""
        return "--overwrite" in self.steps[0]

    @property
    def over(self) -> bool:
        """Whether it works on a finished run that stays readable throughout."""
        return bool(self.before) and not self.replaces and self.before[0][0] == "run"


def _run(*more: str) -> list[str]:
    return [*RUN, *more]


ALLOCATE = ["allocate", OUT, "--budget", "kv=75%"]
HEAL, VERIFY, REPORT = ["heal", OUT], ["verify", OUT], ["report", OUT]
THINNER = ["allocate", OUT, "--budget", "kv=50%"]
OTHER = ["run", SOURCE, "--budget", "kv=50%", *SMALL, "--eval-tokens", "64", "--out", OUT, "--overwrite"]
VALUES = _run("--allow", "v")  # a cut that other engines can compute
SECOND = [*RUN[:-1], SECOND_OUT, "--heal", "none"]
COMPARE = ["report", OUT, SECOND_OUT, "--out", "compare.html"]
FIGURES = ["report", OUT, "--figures", "pictures"]
GGUF, ONNX = ["export", OUT, "--to", "gguf"], ["export", OUT, "--to", "onnx"]
HALVES = [*GGUF, "--type", "f16", "--overwrite"]
DESIGN = [
    *("design", "--budget", "params=200k", "--strategy", "uniform,taper", "--vocab", "100", "--length", "64"),
    *("--device", "cpu", "--out", OUT),
]
SEARCH = [
    *("search", "--budget", "params=400k", "--data", TEXT, "--tokenizer", SOURCE, "--trials", "2", "--steps", "2"),
    *("--batch", "2", "--length", "16", "--tokens", "512", "--depth", "1", "--device", "cpu", "--out", OUT),
]
REPRODUCE = ["reproduce", "a3", "--size", "tiny", "--device", "cpu", "--out", OUT]
ALL = (
    Scenario("run", (RUN,)),
    Scenario("run, pooled", (_run("--allow", "qk,v", "--pool", "all"),)),
    Scenario("run, two rounds", (_run("--allow", "qk,v", "--rounds", "2"),)),
    Scenario("run, blockwise", (_run("--heal", "blockwise", "--heal-option", "steps=2"),)),
    Scenario("run, distilled", (_run("--heal", "distill", "--heal-option", "tokens=256"),)),
    Scenario("run, streamed", (_run("--stream"),)),
    Scenario("probe", (PROBE,)),
    Scenario("allocate", (ALLOCATE,), (PROBE,)),
    Scenario("heal", (HEAL,), (PROBE, ALLOCATE)),
    Scenario("verify", (VERIFY,), (PROBE, ALLOCATE, HEAL)),
    Scenario("report", (REPORT,), (PROBE, ALLOCATE, HEAL, VERIFY)),
    Scenario("heal a finished run", (HEAL,), (RUN,), foreign=True),
    Scenario("reshape a finished run", (["reshape", OUT],), (RUN,)),
    Scenario("plan, heal and verify again", (THINNER, HEAL, VERIFY), (RUN,), foreign=True),
    Scenario("run --overwrite", (OTHER,), (RUN,), foreign=True),
    Scenario("report of two runs", (COMPARE,), (RUN, SECOND)),
    Scenario("report --figures", (FIGURES,), (RUN,), needs="matplotlib"),
    Scenario("export to GGUF", (GGUF,), (VALUES,), foreign=True, needs="gguf"),
    Scenario("export --overwrite", (HALVES,), (VALUES, GGUF), foreign=True, needs="gguf"),
    Scenario("export to ONNX", (ONNX,), (VALUES,), foreign=True, needs="onnxscript"),
    Scenario("export to ONNX --overwrite", ([*ONNX, "--overwrite"],), (VALUES, ONNX), needs="onnxscript"),
    Scenario("design", (DESIGN,)),
    Scenario("design --overwrite", ([*DESIGN, "--depth", "2", "--overwrite"],), (DESIGN,), foreign=True),
    Scenario("search", (SEARCH,), needs="optuna", loose=True),
    Scenario("reproduce", (REPRODUCE,), loose=True),
    Scenario("train", (TRAIN,)),
    Scenario("train --overwrite", ([*TRAIN, "--seed", "1", "--overwrite"],), (TRAIN,), foreign=True),
)
SCENARIOS = tuple(scenario for scenario in ALL if not scenario.needs or find_spec(scenario.needs))
LEFT_OUT = {scenario.name: scenario.needs for scenario in ALL if scenario not in SCENARIOS}
