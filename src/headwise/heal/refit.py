"""Refit: take the cut model's layers in order and solve for weights that make up for what was cut before.

At every layer least-squares problems are solved from second moments of the cut model's own activations: the projections
of queries and keys, so that logits come out as the source's; the value directions and the output projection, so that
the residual stream after attention does; the MLP's first projections, so that its channels do; and the down projection,
so that the stream after the MLP does. When the next layer is solved, only the streams behind this one are in memory.
Solving also for the scales of the MLP's norm and the projections before rotary positions gained nothing on held-out
text.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.families import Family
from headwise.families._watch import batches, places
from headwise.heal._job import Job, origins, with_removed
from headwise.heal._layer_refit import LayerRefit, RefitBatch, heads_out
from headwise.progress import Track, silently
from headwise.types import Healing

NAME = "refit"
MEANING = "least squares in closed form, no gradients; the fastest"
AFTER = None
OPTIONS = ("ridge",)
WORTHWHILE = 1e-3  # nats: of less damage a closed form repairs nothing that outweighs its own noise


def heal(job: Job) -> tuple[nn.Module, Healing]:
    """The cut model refitted on all calibration rows, with the ridge that was asked for or suits the task."""
    strength = job.options.ridge or job.task.refit_strength
    return refit(job.family, job.source, job.cut, job.calibration.inputs, strength, job.track)


@torch.no_grad()
def refit(
    family: Family,
    source: nn.Module,
    cut: nn.Module,
    tokens: torch.Tensor,
    strength: float = 1e-2,
    track: Track = silently,
) -> tuple[nn.Module, Healing]:
    """A healed copy of `cut` and what every layer gained; neither model is changed."""
    healed = family.tailor(cut, share="ends")
    image = family.row_tokens(source.config, tokens)
    parts = [part.to(healed.device) for part in batches(tokens, row=image)]
    contexts = family.contexts(source, parts)
    ours, theirs = family.blocks(healed), family.blocks(source)
    spans = with_removed(origins(source, healed), len(theirs))
    rows = [
        RefitBatch(family.embed(source, part), family.embed(healed, part), context)
        for part, context in zip(parts, contexts, strict=True)
    ]
    for row in rows:
        for index in range(spans[0].start):  # removed before the first layer that is left
            row.source = theirs[index](row.source, row.contexts[index])
    gains = []
    for index in track(range(len(ours)), "refit"):
        worker = LayerRefit(ours[index], theirs, spans[index].start, rows, strength)
        gains.append(worker.all(spans[index][1:]))
    return healed, Healing(NAME, places(tokens, image), strength, layers=tuple(gains))


class LayerHealer:
    """Refits single cut layers among whole ones, so that the damage of a cut is measured as it will be after healing.

    Before healing an uneven cut looks cheaper than it is: no refit brings back what one layer lost as a whole.
    """

    def __init__(self, family: Family, model: nn.Module, tokens: torch.Tensor, strength: float = 1e-2) -> None:
        self.family, self.strength = family, strength
        self.whole = family.blocks(model)
        self.known: tuple[int, list[RefitBatch]] = (-1, [])  # what one whole layer computes
        row = family.row_tokens(model.config, tokens)
        parts = [part.to(model.device) for part in batches(tokens, row=row)]
        self.contexts = family.contexts(model, parts)
        self.streams: list[list[torch.Tensor]] = [[] for _ in self.whole]
        with torch.no_grad():
            for part, contexts in zip(parts, self.contexts, strict=True):
                stream = family.embed(model, part)
                for index, context in enumerate(contexts):
                    self.streams[index].append(stream)
                    stream = family.run_layer(model, index, stream, context)

    @torch.no_grad()
    def heal(self, index: int, layer: nn.Module) -> nn.Module:
        """The layer with values, output and down projection refitted; changes and returns `layer`."""
        if index != self.known[0]:  # several cuts of a layer are tried in turn
            pairs = zip(self.streams[index], self.contexts, strict=True)
            self.known = (index, [self._computed(index, stream, contexts) for stream, contexts in pairs])
        rows = [replace(row) for row in self.known[1]]
        worker = LayerRefit(self.family.block(layer), self.whole, index, rows, self.strength)
        worker.values()
        worker.output_and_down()
        return layer

    def _computed(self, index: int, stream: torch.Tensor, contexts: list[dict[str, Any]]) -> RefitBatch:
        """What a whole layer's heads put out, and its own tokens after attention and, if it has one, after the MLP."""
        block, context = self.whole[index], contexts[index]
        own, z = block.own(stream, context), heads_out(block, stream, context)
        middle = block.middle(own, z)
        end = block.end(middle, block.channels(own, middle)) if block.down else None
        return RefitBatch(stream, stream, contexts, z, source_middle=middle, source_end=end)
