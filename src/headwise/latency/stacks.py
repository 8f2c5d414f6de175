"""Random models with given layers, to be timed: the time of a layer does not depend on its weights."""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from headwise.cost import layer_kv_bytes_per_token, layer_parameters
from headwise.errors import BudgetError
from headwise.families import Family
from headwise.fast import choice
from headwise.latency import measuring
from headwise.types import GONE, LayerShape, Workload

Stack = tuple[LayerShape, ...]
CHAIN = {("cuda", "decode"): 8, ("cuda", "prefill"): 4, ("cpu", "decode"): 4, ("cpu", "prefill"): 4}  # layers at most


class Stacks:
    """Builds models of one family and workload with given layers, and times them in turns."""

    def __init__(self, family: Family, like: nn.Module, work: Workload, repeats: int = 5) -> None:
        self.family, self.like, self.work, self.repeats = family, like, work, repeats
        self.device, self.dtype = next(like.parameters()).device, measuring.timed_dtype(like)
        self.shape, self.captured = family.shape_of(like.config), True  # unless a step is not
        self.chain = self._chain()
        self.shared: dict[str, torch.Tensor] = {}  # what is not in layers: embeddings and the head are large
        self.kept: tuple[Stack, measuring.TimedStep] | None = None  # the first stack, which is timed with every call

    def _chain(self) -> int:
        """Layers in a stack: enough that caches and weights do not stay near the processor, as far as they fit."""
        most = min(len(self.shape.layers), CHAIN[self.device.type, self.work.phase])
        if self.device.type == "cuda":
            _tidy()
            free = torch.cuda.mem_get_info(self.device)[0]
            each = max(self._bytes(layer) for layer in self.shape.layers)
            most = min(most, max(1, int(free / 8 / each)))
        return most

    def _bytes(self, layer: LayerShape) -> int:
        cache = layer_kv_bytes_per_token(self.shape, layer) // self.shape.cache_bytes
        tokens = self.work.batch * self.work.length
        return int(self.dtype.itemsize * (layer_parameters(self.shape, layer) + cache * tokens))

    @torch.no_grad()
    def __call__(self, stacks: Sequence[Stack]) -> list[list[float]]:
        """Milliseconds of every stack, once per repeat."""
        if self.device.type == "cuda":
            _tidy()
        try:
            return measuring.in_turns(
                [self._step(stack, not at) for at, stack in enumerate(stacks)], self.device, self.repeats
            )
        except torch.cuda.OutOfMemoryError:
            raise BudgetError(
                f"{self.work} does not fit on {measuring.device_name(self.device)}; use a smaller batch or length."
            ) from None

    def ahead(self, layers: Iterable[LayerShape]) -> None:
        """Build and choose the kernels of layers that will be timed, all at once: one by one takes minutes."""
        if (
            self.device.type == "cuda"
            and self.work.phase == "decode"
            and measuring.runtime_of(self.like) == measuring.FAST
        ):
            whole = [layer for layer in layers if not layer.coded]  # kernels for rows in bits are built as they run
            choice.choose(measuring.cases(self.like, whole, self.work.batch, self.work.length, self.dtype))

    def _step(self, stack: Stack, first: bool) -> measuring.TimedStep:
        if self.kept is not None and self.kept[0] == stack:
            return self.kept[1]
        step = measuring.prepare(self.family, self.model(stack), self.work)
        self.captured = self.captured and step.captured
        if first:
            self.kept = stack, step
        return step

    def model(self, stack: Stack) -> nn.Module:
        """A random model with these layers, its other parts as in the source; kinds of layers are spread evenly."""
        layers = [GONE] * len(self.shape.layers)
        for place, layer in enumerate(stack):
            layers[place * len(layers) // len(stack)] = layer
        model = self.family.frame(self.like, tuple(layers))
        self.family._copy_unsaved(self.like, model)
        self._fill(model)
        return model.eval()

    def _fill(self, model: nn.Module) -> None:
        """Random weights; integer buffers, such as indices of rotary pairs, are zero."""
        layers = self.family._prefix(model.config, 0).removesuffix("0.")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_meta:
                continue
            ours = self.shared.get(name)
            if ours is None:
                ours = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
                if tensor.is_floating_point():
                    ours = ours.to(self.dtype).normal_(0.0, 0.02)
                if not name.startswith(layers):
                    self.shared[name] = ours
            parent, _, last = name.rpartition(".")
            owner = model.get_submodule(parent)
            if last in owner._parameters:
                owner._parameters[last] = nn.Parameter(ours, requires_grad=False)
            else:
                owner._buffers[last] = ours
        model.tie_weights()


def as_it_came(model: nn.Module, family: Family, work: Workload) -> nn.Module:
    """The model to whose time shares refer: itself, or with random weights as it was before its heads were pooled."""
    shape = family.shape_of(model.config)
    return model if shape.apart is shape else Stacks(family, model, work).model(shape.apart.layers)


def _tidy() -> None:
    """Free the memory of timed models: captured steps and their caches refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()
