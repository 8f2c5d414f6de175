"""What several test files share: legal shapes, and readings invented at random for planning without a model."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import Forking
from hypothesis import settings
from hypothesis import strategies as some

from headwise import families
from headwise.checks import _fresh, quality, speed
from headwise.families.llama import FAMILY as llama
from headwise.heal import refit
from headwise.stages import frontier
from headwise.types import Grain, LayerShape, ModelShape, Reading, Readings

settings.register_profile("headwise", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("headwise")


@pytest.fixture(scope="session", autouse=True)
def _short_verifications() -> Iterator[None]:
    """Runs load their models again in forked processes (see `forked`), write short samples, and are timed once.

    How long a sample is and how often a model is timed changes no figure that a test looks at.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fresh, "subprocess", Forking())
        patch.setattr(quality, "SAMPLE_TOKENS", 8)
        patch.setattr(refit, "WORTHWHILE", None)  # tiny models have hardly any damage
        patch.setattr(speed.measure.__wrapped__, "__defaults__", (256, 8, 1, speed.PLAIN))
        yield


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs load their models again in processes that start from nothing, as they do for users."""
    monkeypatch.setattr(_fresh, "subprocess", subprocess)


@pytest.fixture(scope="module", autouse=True)
def _few_points(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frontiers of a few limits, also in the runs that a module's tests share; those of the report show them all."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.startswith(("test_report", "test_browser")):
            patch.setattr(frontier, "LEAST", 8)
        yield


@pytest.fixture(autouse=True)
def _few_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's frontier of a few limits: forty take seconds, and a test that minds them asks for them."""
    monkeypatch.setattr(frontier, "LEAST", 8)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny stock Llama with the embedded tokenizer, in a folder that no test writes to."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    llama.tiny("llama", vocab_size=4096, tie_word_embeddings=True).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(families.locate("embedded")[0]) / name, path / name)
    return path


GRAIN = Grain(qk_step=2, v_step=2, mlp_step=8, qk_floor=2, v_floor=2, mlp_floor=8, rotary=True, projectable=True)


@some.composite
def layer_shapes(draw: some.DrawFn) -> LayerShape:
    """Any legal layer that has attention and an MLP."""
    kv_heads, width = draw(some.integers(1, 8)), 2 * draw(some.integers(1, 32))
    return LayerShape(
        query_heads=kv_heads * draw(some.integers(1, 8)),
        kv_heads=kv_heads,
        qk_dim=draw(some.integers(1, width)),
        v_dim=draw(some.integers(1, 64)),
        mlp_width=draw(some.integers(1, 512)),
        qk_width=width,
    )


@dataclass(frozen=True)
class Invented:
    """How large an invented model is and how many sizes each of its units has."""

    layers: int = 3
    kv_heads: int = 2
    queries_per_group: int = 2
    dim: int = 8
    mlp_width: int = 32
    sizes: int = 3  # of queries/keys, values and MLPs, the full one included


def shape_of(model: Invented, rng: random.Random) -> ModelShape:
    """A small model with equal layers; whatever plans do not decide is drawn."""
    heads = model.kv_heads * model.queries_per_group
    layer = LayerShape(heads, model.kv_heads, model.dim, model.dim, model.mlp_width, model.dim)
    return ModelShape(
        family="llama",
        hidden_size=heads * model.dim,
        vocab_size=rng.choice((10, 50)),
        tied_embeddings=rng.random() < 0.5,
        layers=(layer,) * model.layers,
        grain=GRAIN,
        qkv_bias=rng.random() < 0.5,
        other_parameters=rng.randrange(100),
    )


def curve(rng: random.Random, kind: str, ticks: Sequence[int], layers: int) -> Reading:
    """Damage that grows as sizes fall, by steps that differ thousandfold between layers and sizes."""
    rows = []
    for _ in range(layers):
        row = [0.0]
        for _ in ticks[1:]:
            row.append(row[-1] + 10 ** rng.uniform(-4, -1))
        rows.append(tuple(row))
    return Reading(
        probe="invented",
        kind=f"damage.{kind}",
        axis=kind,
        ticks=(tuple(ticks),) * layers,
        values=tuple(rows),
        standard_error=None,
        unit="nats per token",
        meaning="Invented for a test.",
        tokens=1,
        seed=0,
    )


def diagnostics(rng: random.Random, model: Invented, dims: Sequence[int]) -> list[Reading]:
    """What the probes of the first paper's quantities would have found, as far as a strategy asks for it."""
    heads = model.kv_heads * model.queries_per_group

    def reading(kind: str, ticks: Sequence[int], row: Callable[[], Sequence[float]]) -> Reading:
        rows = tuple(tuple(row()) for _ in range(model.layers))
        all_ticks = (tuple(ticks),) * model.layers
        return Reading("invented", kind, "", all_ticks, rows, None, "", "Invented for a test.", 1, 0)

    lost = [1 - size / model.dim for size in dims]
    return [
        reading("lags.contribution", range(5), lambda: [0.3, *(rng.uniform(0.05, 0.15) for _ in range(4))]),
        reading("saturation.slope", range(heads), lambda: [rng.uniform(-1, 0) for _ in range(heads)]),
        reading("saturation.jacobian_norm", (4, 8), lambda: [0.2, rng.uniform(0.01, 0.2)]),
        reading("saturation.logit_growth", (4, 8), lambda: [1.0, rng.uniform(1, 3)]),
        reading("spectrum.logit_energy_lost", dims, lambda: [x * rng.uniform(0.1, 1) for x in lost]),
        reading("spectrum.output_energy_lost", dims, lambda: [x * rng.uniform(0.1, 1) for x in lost]),
    ]


def invent(seed: int, model: Invented | None = None) -> Readings:
    """Readings of a model that does not exist: every curve and every order a strategy may ask for."""
    model, rng = model or Invented(), random.Random(seed)
    shape = shape_of(model, rng)
    down = range(model.sizes)
    dims = [model.dim - 2 * i for i in down]
    ticks = {
        "qk_projected": dims,
        "qk_pairs": dims,
        "qk_pairs_shared": dims,
        "v": dims,
        "mlp": [model.mlp_width - 8 * i for i in down],
        "heads": list(range(model.queries_per_group, 0, -1)),
        "kv_heads": list(range(model.kv_heads, 0, -1)),
    }

    def order(groups: int, units: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.sample(range(units), units)) for _ in range(groups))

    orders = tuple(
        {
            "qk_pairs": order(model.kv_heads, model.dim // 2),
            "qk_pairs_shared": order(1, model.dim // 2) * model.kv_heads,
            "qk_pairs_power": order(model.kv_heads, model.dim // 2),
            "mlp": order(1, model.mlp_width),
            "heads": order(model.kv_heads, model.queries_per_group),
            "kv_heads": order(1, model.kv_heads),
        }
        for _ in range(model.layers)
    )
    curves = tuple(curve(rng, kind, sizes, model.layers) for kind, sizes in ticks.items())
    curves += tuple(diagnostics(rng, model, dims))
    order = tuple(rng.sample(range(model.layers), model.layers // 2))
    steps = curve(rng, "depth", range(len(order) + 1), 1)
    return Readings(
        model="invented",
        shape=shape,
        curves=(*curves, steps),
        orders=orders,
        tokens=1,
        seed=seed,
        depth=order,
    )


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """A table of attention paths of its own: no test sees or changes what the user's machine measured."""
    from headwise.fast import choice

    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    choice.forget()
    yield tmp_path / "cache" / "kernels.json"
    choice.forget()
