"""What flows between the layers of a model: how to read it, replace it, and run single layers on it."""

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from headwise.families._rows import Reader


class Captured(Exception):
    """Raised to end a forward pass once what was wanted has been seen."""


class Streams(Reader):
    """Residual streams of a family's models."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[nn.Module]:
        """All layers."""

    @abstractmethod
    def body(self, model: nn.Module) -> nn.Module:
        """The model without its head."""

    def run(self, model: nn.Module, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
        """What a model says about unpadded rows, with `stream` in place of what the embeddings give the first layer.

        Logits or, of a model without a head, embeddings.
        """
        with self._from(model, stream, ids):
            out = self.call(model, ids)
        return out["logits"] if "logits" in out else self.pooled(model, out)

    def pooled(self, model: nn.Module, out: Any) -> torch.Tensor:
        """The embeddings that a model without a head puts out."""
        return out["last_hidden_state"]

    def last_stream(self, model: nn.Module, ids: torch.Tensor, stream: torch.Tensor | None = None) -> torch.Tensor:
        """The residual stream after the last layer, for rows or, as in `run`, from a stream: `logits` reads it."""
        seen: list[torch.Tensor] = []
        hook = self.layers(model)[-1].register_forward_hook(lambda _module, _args, out: seen.append(stream_of(out)))
        with hook, self._from(model, stream, ids):
            self.read(model, ids)
        return seen[0]

    @contextmanager
    def _from(self, model: nn.Module, stream: torch.Tensor | None, ids: torch.Tensor) -> Iterator[None]:
        """The first layer reads a stream, if one is given, in place of what the embeddings give it."""
        if stream is None:
            yield
            return
        with self.layers(model)[0].register_forward_pre_hook(
            lambda _m, args, kwargs: ((stream, *args[1:]), {k: v for k, v in kwargs.items() if k != "hidden_states"}),
            with_kwargs=True,
        ):
            yield

    def read(self, model: nn.Module, ids: torch.Tensor) -> None:
        """Pass rows through all layers, for hooks that record them; no logits are computed."""
        self.call(self.body(model), ids)

    @torch.no_grad()
    def embed(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer."""
        return self._handed(model, ids, 1)[0][0]

    def _handed(self, model: nn.Module, ids: torch.Tensor, count: int) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The arguments of the first `count` layers: the stream, and everything else by name."""
        seen: list[tuple[torch.Tensor, dict[str, Any]]] = []

        def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            more = bound.pop("kwargs", {})
            seen.append((bound.pop(next(iter(bound))), {**bound, **more}))  # the stream comes first
            if len(seen) == count:
                raise Captured

        with ExitStack() as hooks, suppress(Captured):
            for layer in self.layers(model)[:count]:
                hooks.enter_context(layer.register_forward_pre_hook(look, with_kwargs=True))
            self.call(self.body(model), ids)
        return seen

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """The keyword arguments (mask, positions) that the model hands each layer: of one row, if all begin alike."""
        drop = ("past_key_values", "layer_past", "use_cache", "cache_position")
        found = self._handed(model, ids if self.context else ids[:1], len(self.layers(model)))
        contexts = [{k: v for k, v in context.items() if k not in drop} for _, context in found]
        for context in contexts:
            if isinstance(mask := context.get("attention_mask"), torch.Tensor):
                context["attention_mask"] = mask[:1]  # whole rows of one length have the same
        return contexts

    def contexts(self, model: nn.Module, parts: Sequence[torch.Tensor]) -> list[list[dict[str, Any]]]:
        """`layer_contexts` for batches of rows: one for all of the same length, if they all begin at one position."""
        if self.context:
            return [self.layer_contexts(model, part) for part in parts]
        made = {part.shape[1:]: part for part in parts}
        found = {length: self.layer_contexts(model, part) for length, part in made.items()}
        return [found[part.shape[1:]] for part in parts]

    def run_layer(self, model: nn.Module, index: int, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """One layer on a residual stream."""
        return stream_of(self.layers(model)[index](stream, **context))


def stream_of(out: Any) -> torch.Tensor:
    """The stream in what a layer puts out, alone or with more behind it."""
    return out[0] if isinstance(out, tuple) else out
