"""What a cut model learns from: how far its answers to some rows are from the source's.

Of decoders the logits of a long batch are the largest thing by far, so they are made for some tokens at a time and
made again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwise.errors import HeadwiseError
from headwise.families import Family
from headwise.heal._job import origins
from headwise.tasks import Prepared, Task
from headwise.tasks.causal import Causal
from headwise.training import shards

AT_ONCE = {"cuda": 1 << 29, "cpu": 1 << 24}  # logits of one piece


class Known(NamedTuple):
    """The source's likeliest next tokens (B, T, K), stored; `rest` (B, T) is what all others have together."""

    logs: torch.Tensor
    tokens: torch.Tensor
    rest: torch.Tensor

    def to(self, device: torch.device) -> Known:
        """The same on a device, in single precision."""
        return Known(self.logs.to(device).float(), self.tokens.to(device).long(), self.rest.to(device).float())


class Part(NamedTuple):
    """Rows of one length, and the source's answers to them where they are stored."""

    batch: Prepared
    known: Known | None = None
    weight: float = 1.0  # 0: read only because other processes have something to read


class Lesson(nn.Module):
    """The cut model as that which is trained: its forward pass is the divergence of its answers.

    `match` adds the relative squared error of the streams behind its layers, `truth` the surprise at the text itself.
    The source is no part of the module, so that nothing trains, moves or saves it.
    """

    def __init__(
        self,
        family: Family,
        task: Task,
        source: nn.Module,
        student: nn.Module,
        match: float = 0.0,
        recompute: bool = False,
        truth: float = 0.0,
    ) -> None:
        super().__init__()
        self.student, self.match, self.recompute, self.truth = student, match, recompute, truth
        self._told = (family, task, source)
        if truth and not isinstance(task, Causal):
            raise HeadwiseError("only models that write text have a next token to learn; leave out truth.")
        if recompute:
            if not getattr(student, "supports_gradient_checkpointing", False):
                raise HeadwiseError(f"{family.name} models cannot compute their layers again; leave out recompute=1.")
            cast(Any, student).gradient_checkpointing_enable({"use_reentrant": False})

    def spread(self) -> None:
        """Leave each process a part of both models; the source's are those of a copy.

        Its embeddings and head stay whole: they are asked outside of any layer.
        """
        family, task, source = self._told
        device = next(self.parameters()).device
        teacher = family.tailor(source).requires_grad_(False)
        shards.spread(device, family.layers(teacher))
        self._told = (family, task, teacher.to(device))
        shards.spread(device, family.layers(self.student), self)

    def train(self, mode: bool = True) -> Lesson:
        """No dropout: the source has none, and what is drawn would drown what was lost.

        Layers that are to compute again what they do not keep look whether they are in training; their parts do not.
        """
        super().train(False)
        for layer in self._told[0].layers(self.student):
            layer.training = mode and self.recompute
        return self

    def forward(self, parts: Sequence[Part], judging: bool = False) -> torch.Tensor:
        """The sum over rows of what each is to be blamed for.

        Judging: of every row (B, 2) the divergence, and what states are chosen by: that, and the text where it counts.
        """
        if judging:
            pairs = torch.cat([self.divergences(part, matched=False) for part in parts])
            return torch.stack((pairs[:, 0], self._both(pairs)), 1)
        return torch.stack([self._both(self.divergences(part)).sum() * part.weight for part in parts]).sum()

    def _both(self, pairs_B2: torch.Tensor) -> torch.Tensor:
        return pairs_B2[:, 0] + self.truth * pairs_B2[:, 1] if self.truth else pairs_B2[:, 0]

    def divergences(self, part: Part, matched: bool = True) -> torch.Tensor:
        """Of every row (B, 2), and its surprise at the text if that counts, else 0.

        `matched`: streams count as divergence too, if they are to be matched.
        """
        family, task, source = self._told
        if part.known is not None and isinstance(task, Causal) and not self.match:
            return self._by_known(part.batch, part.known)
        with streams(family.layers(self.student)) as ours, streams(family.layers(source)) as theirs:
            found = self._plain(part.batch) if not isinstance(task, Causal) else self._causal(part.batch, ours, theirs)
        if self.match and matched:
            found = found + nn.functional.pad(self.match * self._apart(ours, theirs)[:, None], (0, 1))
        return found

    def _plain(self, batch: Prepared) -> torch.Tensor:
        family, task, source = self._told
        with torch.no_grad():
            reference = task.outputs(family, source, batch)
        found = task.divergence(reference, task.outputs(family, self.student, batch))
        return nn.functional.pad(found[:, None], (0, 1))

    def _causal(self, batch: Prepared, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
        family, _, source = self._told
        with torch.no_grad():
            family.call(family.body(source), batch.inputs)
        family.call(family.body(self.student), batch.inputs)

        def lost(stream: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = _logs(family, source, reference)
            found = _logs(family, self.student, stream)
            apart = nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
            return torch.stack((apart, self._surprise(found, following)), -1)

        return self._in_pieces(lost, ours[-1], theirs[-1], _following(batch.inputs)).mean(1)

    def _surprise(self, found: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """At the tokens that follow, where the text counts."""
        if not self.truth:
            return torch.zeros_like(found[..., 0])
        at = found.gather(-1, following.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return torch.where(following >= 0, -at, 0.0)

    def _by_known(self, batch: Prepared, known: Known) -> torch.Tensor:
        """KL of the distribution over the stored tokens and all others together."""
        family, _, _ = self._told
        with streams(family.layers(self.student)) as ours:
            family.call(family.body(self.student), batch.inputs)

        def lost(
            stream: torch.Tensor, logs: torch.Tensor, tokens: torch.Tensor, rest: torch.Tensor, following: torch.Tensor
        ) -> torch.Tensor:
            whole = _logs(family, self.student, stream)
            found = whole.gather(-1, tokens)
            others = torch.log1p(-found.exp().sum(-1).clamp_max(1 - 1e-6))
            kept = (logs.exp() * (logs - found)).sum(-1)
            apart = kept + torch.where(rest > 0, rest * (rest.clamp_min(1e-30).log() - others), 0.0)
            return torch.stack((apart, self._surprise(whole, following)), -1)

        return self._in_pieces(lost, ours[-1], *known, _following(batch.inputs)).mean(1)

    def _in_pieces(self, lost: Any, *values_BTX: torch.Tensor) -> torch.Tensor:
        """`lost` of values whose first axes are rows and tokens, some tokens at a time (B, T, 2)."""
        rows, tokens = values_BTX[0].shape[:2]
        size = self._tokens_at_once(values_BTX[0].device)
        again = rows * tokens > size and torch.is_grad_enabled()
        found = [
            checkpoint(lost, *(v[None] for v in piece), use_reentrant=False, preserve_rng_state=False)
            if again
            else lost(*(v[None] for v in piece))
            for piece in zip(*(values.flatten(0, 1).split(size) for values in values_BTX), strict=True)
        ]
        return torch.cat(found, 1).view(rows, tokens, 2)

    def _tokens_at_once(self, device: torch.device) -> int:
        return max(1, AT_ONCE.get(device.type, 1 << 28) // int(cast(Any, self.student).config.vocab_size))

    def _apart(self, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
        """How far the streams behind the layers that are left are from the source's, relative to them (B,)."""
        _, _, source = self._told
        same = [theirs[number] for number in origins(source, self.student)]
        errors = [
            (a.float() - b.float()).square().flatten(1).sum(1) / b.float().square().flatten(1).sum(1)
            for a, b in zip(ours, same, strict=True)
        ]
        return torch.stack(errors).mean(0)

    @torch.no_grad()
    def likeliest(self, batch: Prepared, count: int) -> Known:
        """What to store of the source's answers to rows of a decoder."""
        family, _, source = self._told
        with streams(family.layers(source)) as theirs:
            family.call(family.body(source), batch.inputs)
        size = self._tokens_at_once(theirs[-1].device)
        found: list[list[torch.Tensor]] = [[], [], []]
        for piece in theirs[-1].flatten(0, 1).split(size):
            logs, tokens = _logs(family, source, piece[None])[0].topk(count, -1)
            rest = (1 - logs.double().exp().sum(-1)).clamp_min(0)
            for column, value in zip(found, (logs.half(), tokens.int(), rest.float()), strict=True):
                column.append(value)
        shape = batch.inputs.shape
        logs, tokens, rest = (torch.cat(column) for column in found)
        return Known(logs.view(*shape, count), tokens.view(*shape, count), rest.view(shape))


def _following(inputs_BT: torch.Tensor) -> torch.Tensor:
    """The token that comes after each; -1 after the last."""
    return nn.functional.pad(inputs_BT[:, 1:], (0, 1), value=-1)


def _logs(family: Family, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
    """Log-probabilities in single precision: bfloat16 rounds large logits by more than a small damage moves them."""
    with torch.autocast(stream.device.type, enabled=False):
        return family.logits(model, stream.float()).log_softmax(-1)


@contextmanager
def streams(layers: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The streams behind some layers, as the next forward pass makes them, once each."""
    seen: dict[int, torch.Tensor] = {}
    found: list[torch.Tensor] = []

    def look(number: int) -> Any:
        def see(_module: nn.Module, _args: Any, output: Any) -> None:
            if number not in seen:  # a pass that is made again for its gradients tells nothing new
                seen[number] = output[0] if isinstance(output, tuple) else output
                found.append(seen[number])

        return see

    hooks = [layer.register_forward_hook(look(number)) for number, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
