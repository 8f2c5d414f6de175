"""A plug-in is one file: put into a temporary folder it is found, offered in help texts, and works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import invent
from typer.testing import CliRunner

from headwise import budgets as prices
from headwise import cli, probes, registry, strategies, tasks
from headwise.families import _known
from headwise.families.llama import FAMILY as llama
from headwise.types import UNITS, ModelShape, Readings

Add = Callable[[str, str, str], ModuleType]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Writes a file into a folder that a package of plug-ins looks into as well."""
    written: list[str] = []

    def write(package: str, name: str, code: str) -> ModuleType:
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{name}.py").write_text(code)
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(folder)])
        registry.names.cache_clear()
        written.append(f"{package}.{name}")
        return registry.find(package, name)

    yield write
    for name in written:
        sys.modules.pop(name, None)
    registry.names.cache_clear()


def source_of(readings: Readings) -> ModelShape:
    return ModelShape.from_json(readings.shape) if isinstance(readings.shape, dict) else readings.shape


def help_of(command: str) -> str:
    return " ".join(CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"}).output.split())


BUDGET = """
from headwise.types import LayerShape, ModelShape

NAME = "query_heads"
MEANING = "number of query heads"
EXAMPLE = "query_heads=80%"
UNIT = "heads"
PER_LENGTH = False

def model_cost(model: ModelShape, length: int) -> float:
    return sum(layer.query_heads for layer in model.layers)

def layer_cost(model: ModelShape, layer: LayerShape, length: int) -> float:
    return layer.query_heads
"""


def test_a_budget(add: Add) -> None:
    add("headwise.budgets", "query_heads", BUDGET)
    readings = invent(1)
    plan = strategies.allocate(readings, (prices.parse("query_heads=80%", source_of(readings)),), "exact", UNITS)
    kept, had = (sum(layer.query_heads for layer in shape.layers) for shape in (plan.target, plan.source))
    assert kept <= 0.8 * had and plan.spent["query_heads"] == kept, "the solver keeps to it"
    assert "number of query heads: query_heads=80%" in help_of("allocate")


STRATEGY = """
from dataclasses import replace

from headwise.strategies import exact

NAME = "signed"
MEANING = "the exact plan under another name"

def allocate(source, readings, budgets, allow, seed):
    return replace(exact.allocate(source, readings, budgets, allow, seed), strategy=NAME)
"""


def test_a_strategy(add: Add) -> None:
    add("headwise.strategies", "signed", STRATEGY)
    readings = invent(1)
    budgets = (prices.parse("kv=80%", source_of(readings)),)
    plan = strategies.allocate(readings, budgets, "signed", UNITS)
    assert plan.strategy == "signed" and plan.target == strategies.allocate(readings, budgets, "exact", UNITS).target
    assert "the exact plan under another name" in help_of("run")


TASK = """
from headwise.tasks.causal import Causal

class AllTokens(Causal):
    name = "all_tokens"
    unit = "nats per token, scaled"

MEANING = "every token counts"
AUTO = "AutoModelForCausalLM"
TASK = AllTokens
"""


def test_a_task(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add("headwise.tasks", "all_tokens", TASK)
    monkeypatch.setattr(_known, "TASKS", registry.texts("headwise.tasks", "AUTO"))  # read when the package starts
    model = llama.tiny()
    task = tasks.of(model, None)  # of two tasks for one head, the first by name
    assert task.name == "all_tokens" and "all_tokens" in tasks.known()
    batch = task.prepare(torch.arange(12).view(2, 6), seed=0)
    with torch.no_grad():
        outputs = task.outputs(llama, model, batch)
    assert float(task.compare(outputs, outputs, batch.labels).divergence.max()) == 0
    assert "every token counts" in help_of("run")


PROBE = """
from headwise.types import Reading

NAME = "norms"
MEANING = "norm of a layer's parameters"
NEEDS_PAST = False

def measure(family, model, tokens, seed, track):
    layers = family.layers(model)
    values = tuple((float(sum(p.detach().norm() for p in layer.parameters())),) for layer in layers)
    return [Reading(NAME, "norms.all", "", ((0,),) * len(layers), values, None, "", MEANING, tokens.numel(), seed)]
"""


def test_a_probe(add: Add) -> None:
    add("headwise.probes", "norms", PROBE)
    model = llama.tailor(llama.tiny())
    found = {reading.kind: reading for reading in probes.describe(llama, model, torch.arange(12).view(2, 6), 0)}
    assert len(found["norms.all"].values) == model.config.num_hidden_layers, "the stage runs it"
