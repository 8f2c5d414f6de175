"""What a family says about its models, and what follows for all of them: building, tailoring, layers, streams."""

import copy
from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import BARE, Architecture
from headwise.families._block import Block as Block
from headwise.families._config import NOT_COPIED, Sizes, ends_of, without
from headwise.families._streams import Captured as Captured
from headwise.families._streams import Streams
from headwise.families._tensors import Naming, fill
from headwise.families._tensors import Tensors as Tensors
from headwise.runtime import CODE
from headwise.runtime.modeling_headwise import body_of, part_at, tailor_layer
from headwise.types import LayerShape

Share = Literal["nothing", "ends", "all"]


class Family(Streams, Naming, Sizes, ABC):
    """Answers questions about the models of one family; holds no algorithm.

    A family is one file: data (`kinds`, `norms`, `ends`, `small`) and what data cannot say.
    """

    kinds: ClassVar[dict[str, Architecture]]  # model_type -> where its parts are
    summary: ClassVar[str]
    units: ClassVar[tuple[str, ...]] = ("qk", "v", "mlp", "heads", "kv_heads")
    portable: ClassVar[bool] = False
    package: ClassVar[str] = ""  # that its models need beside transformers
    images: ClassVar[bool] = False  # whether its models read images, not tokens
    audio: ClassVar[bool] = False  # whether they read sound
    keeps_first: ClassVar[bool] = False  # whether the first layer has to stay
    norms: ClassVar[dict[str, str]] = {}  # field of `Block` -> path of the norm or scale, from a layer
    ends: ClassVar[tuple[str, ...]] = ("model.norm", "lm_head")  # between the last stream and the logits, if present
    usual: ClassVar[dict[str, Any]] = {}  # settings of the tiny models of all families of this kind
    small: ClassVar[dict[str, Any]] = {}  # its own; None for one that is usual: stock code's default

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Logits from the residual stream after the last layer."""
        for path in self.ends:
            part = part_at(model, path)
            stream = stream if part is None else part(stream)
        return stream

    def to_stock(self, model: nn.Module) -> nn.Module:
        """The ordinary architecture that computes the same as a portable tailored model."""
        raise ModelError(f"a reshaped {self.name} model has no stock form; leave out --portable.")

    @property
    def model_types(self) -> tuple[str, ...]:
        """Stock model types of the family, and the names of our own kinds that share one of them."""
        return tuple(self.kinds)

    def kind(self, config: Any) -> str:
        """The model_type of the stock architecture behind a stock or tailored configuration."""
        return str(config.model_type).removeprefix("headwise_")

    def class_name(self, config: Any) -> str:
        """Of the model that a configuration belongs to; empty where it does not say."""
        names = getattr(config, "architectures", None)
        return str(names[0]) if isinstance(names, (list, tuple)) and names else ""

    def head(self, config: Any) -> str:
        """The Auto class of the model that a configuration belongs to; empty where it does not say."""
        name, kind = self.class_name(config), self.kinds[self.kind(config)]
        bare = BARE if kind.bare and name.endswith(kind.bare) else ""
        return next((auto for auto, end in kind.heads.items() if name.endswith(end)), bare)

    def stock_loader(self, config: Any, auto: str) -> Any:
        """The class that loads a model of this configuration with that head."""
        import transformers

        return getattr(transformers, auto)

    def anatomy(self, config: Any) -> Architecture:
        """Where the parts are."""
        return self.kinds[self.kind(config)]

    def body(self, model: nn.Module) -> nn.Module:
        """The model without its head; a bare model is its own body."""
        return body_of(model, self.anatomy(model.config))

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """All layers."""
        return list(self._list(model))

    def _list(self, model: nn.Module, index: int = 0) -> nn.ModuleList:
        """The list of the model that holds a layer."""
        return cast(nn.ModuleList, self.body(model).get_submodule(self.anatomy(model.config).layers))

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        anatomy = next(kind for kind in self.kinds.values() if part_at(layer, kind.mlp_out) is not None)
        return Block(
            attention=layer.get_submodule(anatomy.attention),
            output=layer.get_submodule(anatomy.output_at),
            inner=tuple(part_at(layer, path) for path in anatomy.mlp_in),
            down=layer.get_submodule(anatomy.mlp_out),
            activation=part_at(layer, anatomy.activation),
            **self.norms_of(layer),
        )

    def norms_of(self, layer: nn.Module) -> dict[str, Any]:
        """The norms of a layer, and what else is its own, by their field of a `Block`."""
        return {place: part_at(layer, path) for place, path in self.norms.items()}

    def blocks(self, model: nn.Module) -> list[Block]:
        """The layers of a tailored model."""
        return [self.block(layer) for layer in self.layers(model)]

    def is_tailored(self, model: nn.Module) -> bool:
        """Whether a model runs on our modules."""
        return str(model.config.model_type).startswith("headwise_")

    def tiny(self, model_type: str = "", head: str = "", **changes: Any) -> nn.Module:
        """A tiny random stock model for tests, with its first head unless another is named."""
        kind = self.kinds[model_type or self.model_types[0]]
        made = kind.stock_classes()
        torch.manual_seed(0)
        model = made[head or next(iter(kind.heads), BARE)](self.tiny_config(made["AutoConfig"], model_type, changes))
        model.config.architectures = [type(model).__name__]
        return unsettled(model)

    def tiny_config(self, made: Any, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a tiny model of a kind."""
        own = {**self.usual, **self.small}
        own = {name: size for name, size in own.items() if size is not None or name not in self.usual}
        return made(**{**own, **changes})

    def build(self, like: nn.Module, layers: tuple[LayerShape, ...], tensors: Tensors) -> nn.Module:
        """A tailored model with the given layers and tensors; everything else as in `like`, which stays as it is.

        Layers that are gone leave no trace but the numbers of those that were kept, for healing.
        """
        model = self.frame(like, layers)
        kept = [index for index, layer in enumerate(layers) if not layer.gone]
        if len(kept) < len(layers):
            tensors = self._renumbered(like, tensors, kept)
        missing, unexpected = fill(model, tensors)
        if unexpected or set(missing) - set(getattr(model, "all_tied_weights_keys", None) or ()):
            raise ModelError(f"the reshaped model misses {missing} or has no place for {unexpected}.")
        model.tie_weights()
        self._copy_unsaved(like, model)
        model.config.architectures = [type(model).__name__]
        return model.train(like.training)

    def frame(self, like: nn.Module, layers: tuple[LayerShape, ...]) -> nn.Module:
        """A tailored model with the given layers, on the meta device: without numbers."""
        if self.keeps_first and layers[0].gone:
            raise ModelError(f"the first layer of {self.name} models is unlike the others and has to stay.")
        auto = self.auto_class_of(like)
        made = self.anatomy(like.config).tailored_classes(self.kind(like.config))
        settings = {k: v for k, v in like.config.to_dict().items() if k not in NOT_COPIED}
        kept = [index for index, layer in enumerate(layers) if not layer.gone]
        if len(kept) < len(layers):
            settings = self._shortened(settings, layers)
        origin = (getattr(like.config, "headwise", None) or {}).get("kept", list(range(len(layers))))
        settings["headwise"] = {
            "version": 1,
            "layers": [layers[index].to_json() for index in kept],
            "kept": [origin[index] for index in kept],  # of the source's layers
            **ends_of(like.config),
            **self.noted(like),
        }
        config = self.configured(made["AutoConfig"], settings)
        config._attn_implementation = like.config._attn_implementation
        config.headwise_anatomy = self.anatomy(like.config).to_json()
        config.auto_map = {auto: f"{Path(CODE).stem}.{cls.__name__}" for auto, cls in made.items()}
        with torch.device("meta"):
            model = made[auto](config)
        model.tie_weights()
        if getattr(like, "generation_config", None) is not None:
            model.generation_config = copy.deepcopy(like.generation_config)
        return model.train(like.training)

    def auto_class_of(self, model: nn.Module) -> str:
        """The name of the Auto class that loads a model like this one."""
        stock = self.anatomy(model.config).stock_classes()
        return next(auto for auto, cls in stock.items() if isinstance(model, cls))

    def configured(self, config_class: Any, settings: dict[str, Any]) -> Any:
        """A configuration with the settings of another."""
        return config_class(**settings)

    def noted(self, like: nn.Module) -> dict[str, Any]:
        """What else a tailored configuration must say about a model."""
        return {}

    def may_go(self, layers: Sequence[LayerShape]) -> bool:
        """Whether a model works with these layers, those that are gone included; one is always left."""
        return True

    def _shortened(self, settings: dict[str, Any], layers: tuple[LayerShape, ...]) -> dict[str, Any]:
        """A configuration for the layers that are not gone."""
        return without(settings, [index for index, layer in enumerate(layers) if not layer.gone], len(layers))

    def _copy_unsaved(self, like: nn.Module, model: nn.Module) -> None:
        """Buffers that no state dictionary holds, such as rotary frequencies, under each of their names."""
        theirs = dict(like.named_buffers(remove_duplicate=False))
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            if buffer.is_meta and name in theirs:
                parent, _, last = name.rpartition(".")
                model.get_submodule(parent).register_buffer(last, theirs[name].clone(), persistent=False)

    def tailor(self, model: nn.Module, pooled: int = 1, share: Share = "nothing") -> nn.Module:
        """A stock model on our modules, bit for bit the same, and with the same tensors: none is copied.

        A tailored model is copied, so that the copy can be changed in place, except for what both are to share: all, or
        what is not in layers (the ends: embeddings, head). `pooled` key/value heads share a row of the cache: above 1,
        results differ by rounding alone.
        """
        tensors = self.state_of(model, clone=False)
        if not self.is_tailored(model):
            tensors = self.apart(tensors, model.config)
        elif share != "all":
            own = {tensor.data_ptr() for layer in self.layers(model) for tensor in layer.state_dict().values()}
            copied = (share == "nothing" or tensor.data_ptr() in own for tensor in tensors.values())
            pairs = zip(tensors.items(), copied, strict=True)
            tensors = {name: tensor.clone() if copy else tensor for (name, tensor), copy in pairs}
        layers = self.shape_of(model.config).layers
        return self.build(model, tuple(layer.pooling(pooled) for layer in layers), tensors)

    def build_layer(self, model: nn.Module, index: int, shape: LayerShape, tensors: Tensors) -> nn.Module:
        """One layer with its own sizes and tensors (by our names), for a model that stays as it is."""
        own = self.layers(model)[index]
        large = (tensor for tensor in own.parameters() if tensor.dim() > 1)  # which are replaced below
        shared = {id(tensor): tensor for tensor in large}
        layer: Any = copy.deepcopy(own, shared)
        with torch.device("meta"):
            tailor_layer(layer, self.anatomy(model.config), shape.to_json())
        places = self.tensors(model.config)
        copies = {places[name]: tensor.clone() for name, tensor in tensors.items()}  # the model keeps its own
        fill(layer, copies)
        return layer.train(model.training)

    @contextmanager
    def replaced(self, model: nn.Module, index: int, layer: nn.Module) -> Iterator[None]:
        """Put another layer in a layer's place; the model's own is put back in any case."""
        layers, own = self._list(model, index), self.layers(model)[index]
        place = next(i for i, found in enumerate(layers) if found is own)
        layers[place] = layer
        try:
            yield
        finally:
            layers[place] = own


def unsettled(model: nn.Module) -> nn.Module:
    """A new model whose biases and norms differ from zeros and ones, which would hide a mistake with them."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter.data)
    return model.eval()
