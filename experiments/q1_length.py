"""Open question: should the allocation depend on the length of the context?

Under a latency budget it must: at short contexts a decoding step is bound by weights, at long ones by the cache. A
table of times is measured: one layer's attention block at every query/key and value dimension and its MLP at every
width, one token per sequence, for a short and a long context. The exact solver spends the same share of the time at
either length, with the same measured damage prices; the two plans are compared, and each is timed at both lengths.
The damage of both is measured on the same text. Times that were predicted by adding up are checked on whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments._models import LABELS, available, settings_for
from headwise import pipeline
from headwise.checks import quality
from headwise.cuts import Moments, reshape
from headwise.errors import BudgetError
from headwise.heal.refit import refit
from headwise.progress import Track
from headwise.research.designs.proposals import median_seconds
from headwise.strategies import _program
from headwise.strategies._options import finish, menus, with_choices
from headwise.types import LayerShape, ModelShape, Plan, Readings

CLAIM = "Length"
TITLE = "Plans for short and for long contexts"
ALLOW = ("qk", "v", "mlp")


@dataclass(frozen=True)
class Size:
    """How much is done."""

    model: str
    lengths: tuple[int, int]
    batch: int
    share: float  # of the step's time that may be spent
    tokens: tuple[int, int, int]
    length: int  # of blocks of text
    repeats: int


SIZES = {
    "tiny": Size("embedded", (32, 256), 1, 0.9, (128, 128, 0), 32, 1),
    "small": Size("embedded", (256, 4096), 4, 0.8, (24_576, 16_384, 1_024), 256, 10),
    "full": Size("embedded", (1024, 16_384), 128, 0.8, (131_072, 65_536, 8_192), 512, 30),
}


def run(size: str, device: str, assets: Path | None, track: Track) -> dict[str, Any]:
    """Measure times and prices, plan for both lengths, compare."""
    sizes = SIZES[size]
    name = sizes.model if sizes.model in available(assets) else "embedded"
    settings = settings_for(name, assets, device, sizes.tokens, sizes.length, allow=ALLOW)
    bench = pipeline.load_source(settings, track)
    readings, moments = pipeline.probe(settings, bench, track)
    shape = bench.family.shape_of(bench.model.config)
    tables = {n: Table.measured(shape, n, sizes, bench.model.device, track) for n in sizes.lengths}
    plans = {n: plan_for(shape, readings, tables[n], sizes.share) for n in sizes.lengths}
    return {
        "seeds": [0],
        "model": LABELS[name],
        "batch": sizes.batch,
        "share": sizes.share,
        "lengths": list(sizes.lengths),
        "source_milliseconds": {str(n): table.model(shape.layers) for n, table in tables.items()},
        "plans": {str(n): _described(n, plans[n], tables, bench, moments, sizes) for n in sizes.lengths},
    }


def _described(
    length: int, plan: Plan, tables: dict[int, Table], bench: pipeline.Source, moments: list[Moments], sizes: Size
) -> dict[str, Any]:
    """What a plan costs at both lengths, added up and on whole layers, and what it damages."""
    layers = plan.target.layers
    cut = reshape(bench.family, bench.model, plan, moments)
    healed, _ = refit(bench.family, bench.model, cut, bench.calibration)
    found = quality.compare(bench.family, bench.model, healed, bench.evaluation).damage()
    whole = {str(n): table.whole(layers) / table.whole(plan.source.layers) for n, table in tables.items()}
    return {
        "planned_for": length,
        "time_ratio_predicted": {str(n): t.model(layers) / t.model(plan.source.layers) for n, t in tables.items()},
        "time_ratio_measured": whole,
        "within_budget": _fits(plan, tables[length], sizes.share),
        "kv_kept": _kept(plan, lambda s: s.kv_heads * (s.qk_dim + s.v_dim)),
        "mlp_kept": _kept(plan, lambda s: s.mlp_width),
        "sizes": [[s.qk_width, s.qk_dim, s.v_dim, s.mlp_width] for s in layers],
        "predicted_damage": plan.predicted_damage,
        **found,
    }


def _fits(plan: Plan, table: Table, share: float) -> bool:
    """Whether the allowed time could be met at all."""
    return table.model(plan.target.layers) <= share * table.model(plan.source.layers) * (1 + 1e-6)


def _kept(plan: Plan, size: Callable[[LayerShape], int]) -> float:
    return sum(map(size, plan.target.layers)) / sum(map(size, plan.source.layers))


def plan_for(shape: ModelShape, readings: Readings, table: Table, share: float) -> Plan:
    """The exact solver with measured milliseconds as its budget."""
    offered = menus(shape, readings, ALLOW, ("qk_projected",))
    program = _program.build(shape, offered, lambda layer: [table.layer(layer)])
    least = program.cheapest(program.price[0])[0]
    limit = np.array([max(share * table.model(shape.layers), least * (1 + 1e-6))])  # as far as sizes go
    solved = _program.select(program, limit, np.zeros(len(program.damage), dtype=bool))
    if solved is None:
        raise BudgetError(f"no plan meets {limit[0]:.3f} ms at length {table.length}; allow a larger share.")
    rows = _program.chosen(program, solved[0], len(shape.layers))
    targets = [with_choices(layer, *row) for layer, row in zip(shape.layers, rows[:-1], strict=True)]
    damage = sum(choice.damage for row in rows for choice in row)
    return finish(shape, readings, targets, damage, "exact", (), 0, gap=solved[1])


@dataclass(frozen=True)
class Table:
    """Milliseconds of a decoding step, per size of one layer; `whole` times complete layers."""

    length: int
    qk: dict[tuple[int, int], float]  # attention block at (qk_width, qk_dim) and full values
    v: dict[int, float]  # attention block at full queries and keys
    mlp: dict[int, float]
    full: LayerShape
    whole: Callable[[tuple[LayerShape, ...]], float]

    @classmethod
    def measured(cls, shape: ModelShape, length: int, sizes: Size, device: torch.device, track: Track) -> Table:
        """Time every size of the model's (equal) layers."""
        full, grain = shape.layers[0], shape.grain
        clock = Clock(shape, length, sizes.batch, device, sizes.repeats)
        qk = {}
        for size in track(grain.qk_sizes(full.qk_dim), f"times at {length}: qk"):
            qk[full.qk_width, size] = clock.attention(replace(full, qk_dim=size))
        v = {size: clock.attention(replace(full, v_dim=size)) for size in grain.v_sizes(full.v_dim)}
        widths = track(grain.mlp_sizes(full.mlp_width), f"times at {length}: mlp")
        mlp = {size: clock.mlp(replace(full, mlp_width=size)) for size in widths}

        def whole(layers: tuple[LayerShape, ...]) -> float:
            return sum(clock.attention(layer) + clock.mlp(layer) for layer in layers)

        return cls(length, qk, v, mlp, full, whole)

    def layer(self, layer: LayerShape) -> float:
        """Predicted by adding up what each size changes."""
        attention = self.qk[layer.qk_width, layer.qk_dim] + self.v[layer.v_dim] - self.v[self.full.v_dim]
        return attention + self.mlp[layer.mlp_width]

    def model(self, layers: tuple[LayerShape, ...]) -> float:
        """All layers."""
        return sum(self.layer(layer) for layer in layers)


class Clock:
    """Times parts of one layer on this device: one new token for each of `batch` sequences of `length` tokens."""

    def __init__(self, shape: ModelShape, length: int, batch: int, device: torch.device, repeats: int) -> None:
        self.hidden, self.length, self.batch, self.device, self.repeats = (
            shape.hidden_size,
            length,
            batch,
            device,
            repeats,
        )
        self.cuda = device.type == "cuda"
        self.kind = torch.bfloat16 if self.cuda else torch.float32
        self.known: dict[tuple[int, ...], float] = {}

    def _new(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.kind) * 0.02

    def attention(self, layer: LayerShape) -> float:
        """Projections, projection after rotary, attention over the cache, output projection."""
        key = (0, layer.query_heads, layer.kv_heads, layer.qk_width, layer.qk_dim, layer.v_dim)
        if key not in self.known:
            self.known[key] = self._time(self._attention(layer))
        return self.known[key]

    def _attention(self, layer: LayerShape) -> Callable[[], torch.Tensor]:
        heads, groups, width, dim = layer.query_heads, layer.kv_heads, layer.qk_width, layer.qk_dim
        x = self._new(self.batch, self.hidden)
        fused = self._new(self.hidden, (heads + groups) * width + groups * layer.v_dim)
        q_down, k_down = self._new(groups, width, dim), self._new(groups, width, dim)
        k = self._new(self.batch, groups, self.length, dim)
        v = self._new(self.batch, groups, self.length, layer.v_dim)
        out = self._new(heads * layer.v_dim, self.hidden)

        def step() -> torch.Tensor:
            made = x @ fused
            q = made[:, : heads * width].view(self.batch, groups, heads // groups, width)
            new = made[:, heads * width : (heads + groups) * width].view(self.batch, groups, 1, width)
            if layer.projected:
                q, new = q @ q_down, new @ k_down
            k[:, :, -1:] = new
            q = q.reshape(self.batch, heads, 1, dim)
            z = functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads > groups)
            return z.reshape(self.batch, -1) @ out

        return step

    def mlp(self, layer: LayerShape) -> float:
        """Gate, up and down."""
        key = (1, layer.mlp_width)
        if key not in self.known:
            x, both = self._new(self.batch, self.hidden), self._new(self.hidden, 2 * layer.mlp_width)
            down = self._new(layer.mlp_width, self.hidden)

            def step() -> torch.Tensor:
                gate, up = (x @ both).chunk(2, dim=-1)
                return (functional.silu(gate) * up) @ down

            self.known[key] = self._time(step)
        return self.known[key]

    @torch.no_grad()
    def _time(self, step: Callable[[], torch.Tensor]) -> float:
        """Median milliseconds; on CUDA of a captured graph of ten steps, so that launching does not count."""
        if not self.cuda:
            return 1e3 * median_seconds(step, self.device, self.repeats)
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], True
        ):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(10):
                    step()
        return 1e3 * median_seconds(graph.replay, self.device, self.repeats) / 10


def measured(result: dict[str, Any]) -> str:
    """Both plans at both lengths."""
    short, long = map(str, result["lengths"])
    lines = []
    for own, other in ((short, long), (long, short)):
        plan = result["plans"][own]
        half = (plan["measured_high"] - plan["measured_low"]) / 2
        lines.append(
            f"Planned for {int(own):,} tokens of context: keeps {plan['kv_kept']:.0%} of the cache and "
            f"{plan['mlp_kept']:.0%} of the MLP, measured damage {plan['measured']:.4f} ± {half:.4f} nats per token, "
            f"time {plan['time_ratio_measured'][own]:.2f} of the source's there (predicted "
            f"{plan['time_ratio_predicted'][own]:.2f}) and {plan['time_ratio_measured'][other]:.2f} at {int(other):,}"
            + ("." if plan["within_budget"] else "; no sizes are faster.")
        )
    lines.append(
        f"{result['model']}, batch {result['batch']}, {result['share']:.0%} of a decoding step's time allowed; the "
        f"source's layers take {result['source_milliseconds'][short]:.2f} ms at {int(short):,} and "
        f"{result['source_milliseconds'][long]:.2f} ms at {int(long):,}."
    )
    return "\n".join(f"- {line}" for line in lines)


def draw(result: dict[str, Any], figure: Any) -> None:
    """What each plan keeps of every layer's cache and MLP."""
    from headwise.report.plots import PALETTE

    axes = figure.subplots(1, 2)
    for colour, (length, plan) in zip(PALETTE, result["plans"].items(), strict=False):
        layers = range(len(plan["sizes"]))
        label = f"planned for {int(length):,}"
        axes[0].plot(layers, [qk + v for _, qk, v, _ in plan["sizes"]], color=colour, marker="o", label=label)
        axes[1].plot(layers, [mlp for *_, mlp in plan["sizes"]], color=colour, marker="o", label=label)
    for axis, name in zip(axes, ("key + value dimensions per head", "MLP width"), strict=True):
        axis.set_xlabel("layer")
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
