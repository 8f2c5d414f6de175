"""What an error in a weight would cost, and so what storing a matrix in few bits does: from one backward pass.

An error dW of a matrix changes its output by `dW x`, and the loss by `1/2 E[(g' dW x)^2]`, where g is the gradient at
the output with labels drawn from the model itself. That is about `1/2 tr(G dW C dW')` with the squares G of the
gradients, output by output, and the second moment C of the inputs. Some inputs are large where no gradient is, such as
those of a text's first token, so every token counts in C by the size of its gradient. dW is that of the rounding that
will be used. A table of words is read by tokens in proportion to their number, and writes with the output's own prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headwise import processes
from headwise.families import Family
from headwise.linalg import Rounded, rounded, rounding_cost, two_factors
from headwise.probes._backward import drawn_labels, passes
from headwise.probes._layers import LayerRunner, Row, reading
from headwise.probes._products import Gram
from headwise.progress import Track, silently
from headwise.tasks import Task
from headwise.tasks.causal import Causal
from headwise.types import LayerShape, ModelShape, Reading
from headwise.types.unit import UNIT_OF
from headwise.types.weights import MATRICES, WHOLE, WIDTHS, group_of, ranks

NAME = "weights"
MEANING = "what weights stored in few bits cost, from gradients"
INPUTS = {
    "q": "in",
    "k": "in",
    "v": "in",
    "o": "z",
    "gate": "mid",
    "up": "mid",
    "down": "hidden",
}  # that matrices share
PACKED = WIDTHS[1:]
Moments = dict[str, torch.Tensor]


class _Sums:
    """Running sums of one place: moments of inputs, and squares of gradients by matrix."""

    def __init__(self) -> None:
        self.inputs: dict[str, Gram] = {}
        self.squares: dict[str, torch.Tensor] = {}
        self.seen: dict[str, float] = {}  # tokens that were added to the moments

    def add(self, matrix: str, source: str, x: torch.Tensor, grad: torch.Tensor) -> None:
        """One batch of a matrix: its inputs, counted by the size of their gradients, and these squared."""
        x, grad = (t.flatten(0, -2).float() for t in (x, grad))
        size = grad.square().mean(1)
        x = x * (size / size.mean().clamp_min(1e-30)).sqrt()[:, None]
        self.inputs.setdefault(source, Gram()).add(x)
        self.seen[source] = self.seen.get(source, 0.0) + len(x)
        self._square(matrix, grad.square().sum(0))

    def add_stream(self, grad: torch.Tensor) -> None:
        """Gradients of the stream before the first layer: errors of embeddings in any two columns go together."""
        self.inputs.setdefault("embed", Gram()).add(grad.flatten(0, -2).float())

    def _square(self, matrix: str, part: torch.Tensor) -> None:
        self.squares[matrix] = self.squares[matrix] + part if matrix in self.squares else part

    def means(self, terms: int) -> Moments:
        """Over all processes; sums are freed."""
        found = {}
        for name in sorted(self.inputs):
            count = float(processes.total(torch.tensor(self.seen.get(name, 0.0)))) or float(terms)
            found[f"w_{name}"] = self.inputs[name].total() / count
        return found | {f"g_{name}": processes.total(self.squares[name]) / terms for name in sorted(self.squares)}


def modules(family: Family, model: nn.Module, index: int) -> dict[str, nn.Linear]:
    """The matrices of a layer by our names."""
    return matrices(family, family.layers(model)[index])


def matrices(family: Family, layer: nn.Module) -> dict[str, nn.Linear]:
    """The matrices of a layer by our names."""
    block = family.block(layer)
    found = {name: getattr(block.attention, f"{name}_proj") for name in "qkv"} | {"o": block.output}
    found |= dict(zip(("gate", "up")[-len(block.inner) :], block.inner, strict=True))
    return found | ({} if block.down is None else {"down": block.down})


@contextmanager
def watching(family: Family, model: nn.Module) -> Iterator[list[_Sums]]:
    """Sum over the matrices of all layers, and last over the tables of words, until the end."""
    count = len(family.layers(model))
    sums, handles = [_Sums() for _ in range(count + 1)], []

    def hook(place: int, matrix: str, source: str) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            if out.requires_grad:  # else it will be computed again
                x = args[0].detach()
                out.register_hook(lambda grad: sums[place].add(matrix, source, x, grad))

        return see

    def first(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        if stream.requires_grad and torch.is_grad_enabled():
            stream.register_hook(sums[-1].add_stream)

    try:
        for index in range(count):
            for name, module in modules(family, model, index).items():
                handles.append(module.register_forward_hook(hook(index, name, INPUTS[name])))
        handles.append(family.layers(model)[0].register_forward_hook(first, with_kwargs=True))
        head = model.get_output_embeddings()
        handles.append(head.register_forward_hook(hook(count, "head", "head")))
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def collect(
    family: Family,
    model: nn.Module,
    tokens: torch.Tensor,
    seed: int,
    track: Track = silently,
    task: Task | None = None,
    recompute: bool | None = None,
) -> list[Moments]:
    """Per layer `w_*`, moments of inputs, and `g_*`, gradients squared; the tables' own are with the first layer."""
    task, terms = task or Causal(), 0
    with watching(family, model) as sums:
        labels = drawn_labels(seed)
        for batch, run in passes(
            family, model, task, tokens, seed, track, "damage of weight bits", recompute, labels=labels
        ):
            run()
            terms += task.terms(batch)
    terms = int(processes.total(torch.tensor(terms)))
    *layers, ends = (one.means(terms) for one in sums)
    used = torch.bincount(tokens.flatten().cpu(), minlength=int(model.config.vocab_size)).float()
    layers[0] |= {**ends, "g_embed": used / used.sum()}
    return layers


def table_metric(moments: Moments, tied: bool) -> dict[str, torch.Tensor]:
    """What the rounding of each table goes by: the second moment that its errors meet, over all words."""
    head = moments["w_head"] * moments["g_head"].sum()
    return {"w_embed": moments["w_embed"] + head} if tied else {"w_embed": moments["w_embed"], "w_head": head}


def table_cost(name: str, weight: torch.Tensor, new: Rounded, moments: Moments, tied: bool) -> float:
    """Predicted loss increase with a table of words in few bits; one that is tied reads and writes."""
    reads = rounding_cost(weight, new, moments["w_embed"], moments["g_embed"]) if name == "w_embed" else 0.0
    writes = rounding_cost(weight, new, moments["w_head"], moments["g_head"]) if tied or name == "w_head" else 0.0
    return reads + writes


def measure(
    family: Family, model: nn.Module, moments: Sequence[Moments], shape: ModelShape, tokens: int, seed: int,
    track: Track = silently,
) -> list[Reading]:  # fmt: skip
    """Predicted damage of every width of every matrix, and of the tables of words."""
    rows: dict[str, list[Row]] = {name: [] for name in MATRICES}
    for index in track(range(len(shape.layers)), "rounding of weights"):
        found = modules(family, model, index)
        for name in MATRICES:
            if name in found:
                damages = _costs(name, found[name].weight, moments[index])
                rows[name].append((WIDTHS, (0.0, *damages), None))
            else:
                rows[name].append((WIDTHS[:1], (0.0,), None))
    curves = [_reading(f"damage.w_{name}", row, tokens, seed) for name, row in rows.items()]
    for name, metric in table_metric(moments[0], shape.tied_embeddings).items():
        if type(table_of(model, name)) not in (nn.Embedding, nn.Linear):  # one that computes more cannot be unpacked
            continue
        weight = table_of(model, name).weight
        news = rounded(weight, metric, PACKED, group_of(weight.shape[1]))
        damages = rising([table_cost(name, weight, new, moments[0], shape.tied_embeddings) for new in news])
        curves.append(_reading(f"damage.{name}", [(WIDTHS, (0.0, *damages), None)], tokens, seed))
    return curves


def measure_ranks(
    family: Family, model: nn.Module, moments: Sequence[Moments], shape: ModelShape, tokens: int, seed: int
) -> Reading:
    """Predicted damage of every rank of the projection of queries."""
    rows: list[Row] = []
    for layer, block, moment in zip(shape.layers, family.blocks(model), moments, strict=True):
        attention = block.attention
        weight = (
            attention.q_proj.weight @ attention.q_proj.first.weight if attention.q_rank else attention.q_proj.weight
        )
        lost = two_factors(weight.detach(), moment["w_in"], moment["g_q"])[1].square().flip(0).cumsum(0).flip(0)
        sizes = ranks(weight.shape[0], weight.shape[1], layer.query_rank)
        rows.append((sizes, (0.0, *(0.5 * float(lost[rank]) for rank in sizes[1:])), None))
    unit = UNIT_OF["damage.q_rank"]
    meaning = f"Predicted loss increase with {unit.cut}, by rank."
    return reading(NAME, unit.kind, "rank", rows, Causal.unit, meaning, tokens, seed)


def table_of(model: Any, name: str) -> Any:
    """The module that holds the table of words, or that of the output."""
    return model.get_input_embeddings() if name == "w_embed" else model.get_output_embeddings()


def _costs(name: str, weight: torch.Tensor, moments: Moments) -> list[float]:
    moment = moments[f"w_{INPUTS[name]}"]
    news = rounded(weight, moment, PACKED, group_of(weight.shape[1]))
    return rising([rounding_cost(weight, new, moment, moments[f"g_{name}"]) for new in news])


def round_layer(family: Family, layer: nn.Module, target: LayerShape, moments: Moments) -> None:
    """Give a layer's matrices the target's widths, by what a probing found of their inputs."""
    for name, module in matrices(family, layer).items():
        if (bits := getattr(target, f"w_{name}")) != WHOLE:
            round_matrix(module, moments[f"w_{INPUTS[name]}"], bits)


def round_matrix(module: Any, moment: torch.Tensor, bits: int) -> Rounded:
    """Round one matrix; the tensor itself may belong to another model too, and stays."""
    weight = module.weight
    (new,) = rounded(weight, moment, (bits,), group_of(weight.shape[1]))
    module.weight = nn.Parameter(new.dense().to(weight), requires_grad=weight.requires_grad)
    return new


def measured_table(
    family: Family, model: nn.Module, tokens: torch.Tensor, moments: Moments, tied: bool, seed: int, name: str
) -> dict[int, tuple[float, float]]:
    """Measured damage of a table of words in few bits, with its standard error, by bits."""
    runner = LayerRunner(family, model, tokens, seed=seed)
    layers = range(len(runner.shapes))
    runner.reference = [runner.answers(batch, layers) for batch in range(len(runner.batches))]
    weight, found = table_of(model, name).weight, {}
    before, metric = weight.data, table_metric(moments, tied)[name]
    for new in rounded(weight, metric, UNIT_OF[f"damage.{name}"].tried, group_of(weight.shape[1])):
        try:
            weight.data = new.dense().to(before)
            found[new.bits] = runner.divergence(lambda batch: runner.answers(batch, layers))
        finally:
            weight.data = before
    return found


def rising(damages: Sequence[float]) -> list[float]:
    """Damages of falling widths, none below the one before it."""
    return [max(damages[: place + 1]) for place in range(len(damages))]


def _reading(kind: str, rows: Sequence[Row], tokens: int, seed: int) -> Reading:
    unit = UNIT_OF[kind]
    meaning = f"Predicted loss increase with {unit.cut}, by bits."
    return reading(NAME, kind, "bits of a weight", rows, Causal.unit, meaning, tokens, seed)
