"""A tailored model whose weights stay on disk: a frame without numbers, filled one layer at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import families
from headwise.errors import ModelError
from headwise.families import CAUSAL, Family
from headwise.families._folder import check_sizes, check_values
from headwise.families._tensors import fill
from headwise.memory import available_bytes
from headwise.stream._checkpoint import Checkpoint

Tensors = dict[str, torch.Tensor]
OLDER = {"lm_head.weight": "embed_out.weight"}  # names in files of GPT-NeoX
HEAD_ROWS = 8_192  # of the output table that are held at a time
KEPT_SHARE = 0.1  # of a GPU's free memory that the whole table may take


class EmptyModel:
    """A tailored model on the meta device, and its layers filled with tensors for as long as they are used."""

    def __init__(self, family: Family, model: nn.Module, device: str) -> None:
        self.family, self.model, self.device = family, model, device
        self.config: Any = model.config
        self.layers = family.layers(model)
        self.shape = family.shape_of(model.config)

    def prefix(self, index: int) -> str:
        """What the names of a layer's tensors begin with."""
        return self.family._prefix(self.config, index)

    @contextmanager
    def filled(self, index: int, tensors: Tensors) -> Iterator[nn.Module]:
        """A layer filled with tensors (by their full names) for as long as the context is open."""
        layer, prefix = self.layers[index], self.prefix(index)
        own = {name.removeprefix(prefix): tensor.to(self.device) for name, tensor in tensors.items()}
        missing, unexpected = fill(layer, own)
        if missing or unexpected:
            raise ModelError(f"layer {index}: {missing} are missing, {unexpected} are unexpected.")
        try:
            yield layer.eval().requires_grad_(False)
        finally:
            layer.load_state_dict({name: tensor.to("meta") for name, tensor in own.items()}, assign=True)

    def run(self, index: int, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """A stream through a layer that is filled."""
        return self.family.run_layer(self.model, index, stream, context)


class Streamed(EmptyModel):
    """A model in a folder. What is small and outside its layers is in memory; embedding tables are read by rows.

    `pooled` says of the empty stock model how many of its key/value heads share a row of the cache.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        trust_remote_code: bool = False,
        dtype: torch.dtype = torch.float32,
        pooled: Callable[[nn.Module], int] = lambda stock: 1,
    ) -> None:
        self.files, self.dtype = Checkpoint(folder), dtype
        stock = _empty(folder, trust_remote_code)
        family = families.family_of(stock.config)
        heads, layers = pooled(stock), family.shape_of(stock.config).layers
        super().__init__(family, family.frame(stock, tuple(layer.pooling(heads) for layer in layers)), device)
        self.stored = families.saved_dtype(str(folder), stock.config)
        self.stock = None if family.is_tailored(stock) else stock.config
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        self.places = self._places(stock, tied)
        output = self.model.get_output_embeddings()
        at = self._path(output)
        self.table = self._path(self.model.get_input_embeddings()) + ".weight"
        self.head = self.table if f"{at}.weight" in tied else f"{at}.weight"
        _settle_buffers(self.model, device)
        small = [name for name in self.outside() if name not in (self.table, self.head)]
        tensors = {name: self._read(self.places[name], torch.float32) for name in small}
        fill(self.model, tensors)
        self.model.set_submodule(at, _Head(self, output.bias))
        self.model.eval().requires_grad_(False)

    def _path(self, wanted: nn.Module) -> str:
        return next(name for name, module in self.model.named_modules() if module is wanted)

    def _places(self, stock: nn.Module, tied: set[str]) -> dict[str, str]:
        """Name in the model -> name in the files, where the name of the body may be left out.

        A missing tensor is an error: nothing is ever initialised. Tensors that the model has no place for are ignored.
        """
        body = self.family.anatomy(stock.config).body_at + "."
        wanted = [name for name in stock.state_dict() if name not in tied]
        found = {}
        for name in wanted:
            known = (name, name.removeprefix(body), OLDER.get(name, ""))
            if place := next((place for place in known if place in self.files.entries), None):
                found[name] = place
        if lost := sorted(set(wanted) - set(found)):
            raise ModelError(
                f"{self.files.folder} is damaged: {len(lost)} tensors are missing, first {lost[0]}. Fetch it again."
            )
        return found

    def outside(self) -> list[str]:
        """The names of all tensors that belong to no layer, tied ones once."""
        every = self.prefix(0).removesuffix("0.")
        return [name for name in self.places if not name.startswith(every)]

    def tensors(self, index: int) -> Tensors:
        """The tensors of a layer by their full names in the tailored model, as it computes."""
        prefix = self.prefix(index)
        named = [(name, place) for name, place in self.places.items() if name.startswith(prefix)]
        if self.stock is None:
            return {name: self._read(place, self.dtype) for name, place in named}
        found: Tensors = {}
        for name, place in named:  # one at a time: what is taken apart is there twice
            found |= self.family.apart({name: self._read(place, self.dtype)}, self.stock)
        return found

    def _read(self, place: str, dtype: torch.dtype) -> torch.Tensor:
        found = self.files.tensor(place, self.device)
        if not found.is_floating_point():
            return found
        check_values(found, place, str(self.files.folder))
        return found.to(dtype)

    def layer(self, index: int) -> AbstractContextManager[nn.Module]:
        """A layer with its weights."""
        return self.filled(index, self.tensors(index))

    @contextmanager
    def _embedding(self, rows: torch.Tensor) -> Iterator[None]:
        """These rows as the input table."""
        module = self.model.get_input_embeddings()
        module.weight = nn.Parameter(rows, requires_grad=False)
        try:
            yield
        finally:
            module.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer; of the table only the rows that occur are read."""
        known, place = ids.cpu().unique(return_inverse=True)
        with self._embedding(self.files.rows(self.places[self.table], known, torch.float32).to(self.device)):
            return self.family.embed(self.model, place.to(self.device)).to(self.dtype)

    @torch.no_grad()
    def contexts(
        self, parts: Sequence[torch.Tensor], reader: Family | None = None, dtype: torch.dtype | None = None
    ) -> list[list[dict[str, Any]]]:
        """The other arguments of layers (masks, positions), by batch and layer; `reader` may let rows begin anywhere.

        They do not depend on the stream, so every token has the same embedding, which takes no memory. They come in the
        number format of the layers, or in `dtype`.
        """
        words, width = self.files.entries[self.places[self.table]].shape
        blank = torch.zeros(1, 1, device=self.device).expand(words, width)
        with self._embedding(blank), _passing(self.layers), families.quietly():
            found = (reader or self.family).contexts(self.model, [part.to(self.device) for part in parts])
        return [_converted(batch, dtype or self.dtype) for batch in found]


def _converted(batch: list[dict[str, Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """The layers' arguments with their numbers in a format; what layers share stays shared."""
    done: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        if id(value) not in done:
            done[id(value)] = value.to(dtype)
        return done[id(value)]

    return [{name: convert(value) for name, value in context.items()} for context in batch]


class _Head(nn.Module):
    """The output table, read in parts; a GPU with room keeps it, as it is stored."""

    def __init__(self, owner: Streamed, bias: Any) -> None:
        super().__init__()
        self.files, self.name, self.bias = owner.files, owner.places[owner.head], bias
        self.kept: torch.Tensor | None = None

    def _slices(self, device: torch.device) -> Iterable[torch.Tensor]:
        size = self.files.entries[self.name].bytes
        if self.kept is None and device.type == "cuda" and size <= KEPT_SHARE * available_bytes(device):
            self.kept = self.files.tensor(self.name, str(device))
        return self.files.slices(self.name, HEAD_ROWS) if self.kept is None else self.kept.split(HEAD_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with all rows."""
        found = torch.cat([nn.functional.linear(x, rows.to(x)) for rows in self._slices(x.device)], -1)
        return found if self.bias is None else found + self.bias


def refuse_config(config: Any) -> None:
    """Models that cannot be streamed."""
    family = families.family_of(config)
    if families.task_of(config) != "causal" or family.images or family.audio:
        raise ModelError(
            f"{family.name} models cannot be streamed: only decoders that write text can. Leave out --stream."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError("this checkpoint is quantised; streaming reads plain weights. Give the original model.")


def _empty(folder: Path, trust_remote_code: bool) -> Any:
    """The model of a folder without its numbers; what cannot be streamed is refused."""
    import transformers

    with families.explained(str(folder)), families.quietly():
        config = families.read_config(str(folder), trust_remote_code=trust_remote_code)
        check_sizes(str(folder), families.family_of(config).shape_of(config))
        refuse_config(config)
        with torch.device("meta"):
            model = getattr(transformers, CAUSAL).from_config(config, trust_remote_code=trust_remote_code)
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.config.dtype, model.config.architectures = config.dtype or torch.float32, [type(model).__name__]
    return model.eval()


def _settle_buffers(model: nn.Module, device: str) -> None:
    """Initialise buffers that no file holds, such as rotary frequencies, as loading does."""
    persistent = set(model.state_dict())
    for path, module in model.named_modules():
        lost = [n for n, b in module.named_buffers(recurse=False) if b.is_meta and f"{path}.{n}" not in persistent]
        for name in lost:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if lost:
            with torch.no_grad():
                model._init_weights(module)


@contextmanager
def _passing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers that return their stream unchanged, so that a model without weights can run."""
    for layer in layers:  # whose arguments keep their names
        layer.forward = wraps(layer.forward)(lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"])
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
