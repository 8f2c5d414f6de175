"""Configurations of new models: stock where all layers are alike, tailored where they differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise import families
from headwise.cuts import write_folder
from headwise.cuts._save import add_code
from headwise.errors import ModelError, OutputError, ShapeError
from headwise.families import CAUSAL, IMAGE_CLASSIFIER, MASKED, register
from headwise.registry import find
from headwise.research.designs.shapes import Make, Rules, Sketch
from headwise.research.train.model import loading
from headwise.types import LayerShape, ModelShape

NOT_SIZES = ("architectures", "auto_map", "headwise", "headwise_anatomy", "transformers_version", "dtype")


class Kind(NamedTuple):
    """How a family's configurations are written."""

    stock: str  # model_type
    auto: str  # class that trains it
    mlp_ratio: float
    sizes: dict[str, str]  # setting -> what it is of a sketch
    vocabulary: int = 0  # as published; 0: none
    longest: str = "max_position_embeddings"
    fixed_heads: bool = False  # heads must share the width, unless tailored
    architecture: str | None = None  # written into the configuration, where its family has several


PLAIN = dict(hidden_size="width", num_hidden_layers="depth", num_attention_heads="heads", intermediate_size="mlp")
LLAMA = PLAIN | dict(head_dim="head_dim", num_key_value_heads="heads")
GPT2 = dict(n_embd="width", n_layer="depth", n_head="heads", n_inner="mlp")
KINDS = {
    "llama": Kind("llama", CAUSAL, 8 / 3, LLAMA, 32_000),
    "gpt2": Kind("gpt2", CAUSAL, 4.0, GPT2, 50_257, "n_positions", True),
    "bert": Kind("bert", MASKED, 4.0, PLAIN, 30_522, fixed_heads=True, architecture="BertForMaskedLM"),
    "vit": Kind(
        "vit", IMAGE_CLASSIFIER, 4.0, PLAIN, longest="", fixed_heads=True, architecture="ViTForImageClassification"
    ),
    "nystromformer": Kind(
        "nystromformer", MASKED, 4.0, PLAIN, 30_522, fixed_heads=True, architecture="NystromformerForMaskedLM"
    ),
}


class Nystromformer:
    """Prices of a stock Nystromformer. Headwise cannot reshape one: its layers are alike, its heads share the width."""

    @staticmethod
    def shape_of(config: Any) -> ModelShape:
        """BERT's formulas, and a convolution beside every head."""
        from transformers import BertConfig

        bert = find("headwise.families", "bert").FAMILY
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        same = {name: getattr(config, name) for name in (*names, "type_vocab_size")}
        positions = config.max_position_embeddings + 2
        stock = BertConfig(**same, max_position_embeddings=positions, architectures=["BertForMaskedLM"])
        shape: ModelShape = bert.shape_of(stock)
        norms = shape.layer_norms + config.num_attention_heads * (config.conv_kernel_size or 0)
        return replace(shape, family="nystromformer", layer_norms=norms)


class Maker:
    """Makes the configurations of one family; everything but sizes comes from `like`, or from the family's defaults."""

    def __init__(self, family: str, vocab: int | None = None, length: int = 1024, like: str | None = None) -> None:
        if family not in KINDS:
            find("headwise.families", family)  # an unknown name is refused with the nearest
            raise ModelError(f"{family} models cannot be designed yet; those that can: {', '.join(KINDS)}.")
        self.family, self.kind = family, KINDS[family]
        self.own: Any = Nystromformer if family == "nystromformer" else find("headwise.families", family).FAMILY
        self.base = self._base(vocab, length, like)

    def _base(self, vocab: int | None, length: int, like: str | None) -> dict[str, Any]:
        """Every setting that is not a size."""
        if like is None:
            found: dict[str, Any] = {self.kind.longest: length} if self.kind.longest else {}
            return found | ({"vocab_size": vocab or self.kind.vocabulary} if self.kind.vocabulary else {})
        config = self.like = _read(like)
        kind = str(config.model_type).removeprefix("headwise_")
        if kind != self.kind.stock:
            raise ModelError(
                f"{like} is a {kind} model, not {self.kind.stock}; give --family {kind} or another --like."
            )
        settings = {k: v for k, v in config.to_dict().items() if k not in NOT_SIZES and k != "model_type"}
        return settings | ({"vocab_size": vocab} if vocab else {})

    def source(self) -> ModelShape:
        """The shape of the model that designs should be like."""
        return self.own.shape_of(self.like)

    def stock(self, sketch: Sketch) -> Any:
        """The stock configuration of a model whose layers are alike."""
        from transformers import AutoConfig

        settings = self.base | {name: getattr(sketch, size) for name, size in self.kind.sizes.items()}
        settings |= {"tie_word_embeddings": True} if self.family == "llama" else {}
        if self.kind.fixed_heads and sketch.heads * sketch.head_dim != sketch.width:
            raise ShapeError(
                f"{sketch.heads} heads cannot share the width {sketch.width} evenly, as {self.family} models must."
            )
        config = AutoConfig.for_model(self.kind.stock, **settings)
        if self.kind.architecture:
            config.architectures = [self.kind.architecture]
        return config

    def read(self, length: int) -> int:
        """How many tokens a model reads at once: so many of a text, or all patches of an image and its class."""
        if self.kind.auto != IMAGE_CLASSIFIER:
            return length
        config = self.stock(Sketch(64, 1, 1, 64, 64))
        return int((config.image_size // config.patch_size) ** 2 + 1)

    @property
    def make(self) -> Make:
        """Sketch to shape, for the strategies."""
        return lambda sketch: self.own.shape_of(self.stock(sketch))

    def rules(self, like: bool, **given: Any) -> Rules:
        """What the family settles; a model that designs should be like settles width, depth and MLP ratio."""
        uneven, ratio = self.own is not Nystromformer, self.kind.mlp_ratio
        if not like:
            return Rules(ratio, uneven=uneven, **given)
        source = self.source()
        ratio = source.layers[0].mlp_width / source.hidden_size or ratio
        given["width"] = given.get("width") or source.hidden_size
        return Rules(ratio, uneven=uneven, usual_depth=len(source.layers), **given)

    def config(self, shape: ModelShape) -> Any:
        """The configuration of a shape: stock if stock code can have it."""
        first = shape.layers[0]
        alike = len(set(shape.layers)) == 1 and first.qk_dim == first.v_dim == first.qk_width
        widest = max(shape.layers, key=lambda layer: (layer.qk_width, layer.query_heads))
        if self.kind.fixed_heads:
            alike = alike and first.query_heads * first.qk_dim == shape.hidden_size
        if alike and (self.family == "llama" or first.query_heads == first.kv_heads):
            config = self.stock(_sketch(shape, first))
            if self.family == "llama":
                config.num_key_value_heads = first.kv_heads
            return config
        return self._tailored(shape, widest)

    def _tailored(self, shape: ModelShape, widest: LayerShape) -> Any:
        """A configuration with a size per layer; the stock sizes in it are those that attention is scaled by."""
        able = [n for n in range(1, shape.hidden_size + 1) if shape.hidden_size % n == 0]
        heads = max(n for n in able if shape.hidden_size // n >= widest.qk_width)
        dim = shape.hidden_size // heads if self.kind.fixed_heads else widest.qk_width
        sketch = _sketch(shape, widest)._replace(heads=heads, head_dim=dim)
        stock = self.stock(sketch)
        settings = {k: v for k, v in stock.to_dict().items() if k not in NOT_SIZES and k != "model_type"}
        sizes = {"version": 1, "layers": [layer.to_json() for layer in shape.layers], "kept": list(range(sketch.depth))}
        config = self.own.kinds[self.kind.stock].tailored_classes(self.kind.stock)["AutoConfig"](
            **settings, headwise=sizes
        )
        if stock.architectures:
            config.architectures = [f"Headwise{stock.architectures[0]}"]
        return config


def _read(where: str) -> Any:
    """The configuration of a model by folder or hub id."""
    register()
    place, extra = families.locate(where)
    with loading(f"{where} holds no configuration that can be read"):
        return families.read_config(place, **extra)


def _sketch(shape: ModelShape, layer: LayerShape) -> Sketch:
    return Sketch(shape.hidden_size, len(shape.layers), layer.query_heads, layer.qk_width, layer.mlp_width)


def build(config: Any, auto: str, device: str = "cpu") -> nn.Module:
    """The model of a configuration, with random weights; on the device "meta" without any."""
    import transformers

    register()
    with families.quietly(), torch.device(device):
        return getattr(transformers, auto).from_config(config)


def write(config: Any, auto: str, folder: Path, overwrite: bool = False) -> None:
    """A folder with config.json, and with the runtime beside it where layers differ; whole or not at all."""
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise OutputError(f"{folder} exists and is not empty; add --overwrite or give another --out.")

    def fill(target: Path) -> None:
        config.save_pretrained(target)
        if str(config.model_type).startswith("headwise_"):
            add_code(target, build(config, auto, "meta"))

    with families.quietly():
        write_folder(folder, fill)
