"""ViT, DeiT and EVA of timm, by way of transformers' TimmWrapper, which loads what timm saved.

A configuration names an architecture and its arguments; timm says what that looks like, so sizes are read off a model
without storage. Queries and keys of EVA are turned by the place of a patch, each coordinate along one axis: they are
projected after that. Not supported: whatever norms or gates the heads' outputs, and positions learned per head.
"""

import difflib
import functools
import json
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.errors import WRONG_TORCHVISION, ModelError, is_wrong_torchvision
from headwise.families._architecture import BARE, IMAGE_CLASSIFIER, Architecture
from headwise.families._block import Block, Norm
from headwise.families._config import grain_of
from headwise.families._family import Family, Tensors, unsettled
from headwise.families._rows import ImageReader
from headwise.families._vision import HEADS, IMAGES
from headwise.types import Grain, LayerShape

MODELS = ("VisionTransformer", "VisionTransformerDistilled", "Eva")
LAYERS = ("Block", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm")
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
MLPS = ("Mlp", "GluMlp", "SwiGLU")
SUPPORTED = "vit_*, deit_* and deit3_*, eva_* and eva02_* with plain layers"
GATED = ("GluMlp", "SwiGLU", "GatedMLP")
PLAIN = Architecture(
    stem="TimmWrapper",
    heads=HEADS,
    body_at="",
    layers="timm_model.blocks",
    attention="attn",
    names={
        "q": "qkv|q_proj", "k": "qkv|k_proj", "v": "qkv|v_proj", "o": "proj", "bias": "q_bias",
        "hidden": "proj.out_features", "scaling": "scale", "dropout": "attn_drop.p", "resid_dropout": "proj_drop",
    },
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
    activation="mlp.act",
    scales_queries=True,
    patches=True,
)  # fmt: skip
WITH_GATE = replace(
    PLAIN,
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    fused_mlp={"at": "mlp", "inner": "fc1|fc1_g", "down": "fc2", "act": "act", "norm": "norm"},
)
INSTALL = "pip install 'headwise[timm]'"


class Timm(ImageReader, Family):
    """Vision Transformers of timm, as classifiers or bare."""

    name = "timm"
    kinds = {"timm_wrapper": PLAIN}
    summary = "ViT, DeiT and EVA of timm (needs timm: the extra `timm`)"
    package = "timm"
    images = True
    quiet: ClassVar[dict[str, Any]] = {}

    def class_name(self, config: Any) -> str:
        """Of the model that a configuration belongs to; where timm wrote it, the number of classes tells."""
        name = super().class_name(config)
        return name or f"TimmWrapper{'ForImageClassification' if config.num_labels else 'Model'}"

    def outline(self, config: Any) -> nn.Module:
        """The stock model without storage; one that cannot be reshaped is refused with the reason."""
        labels = 0 if self.head(config) == BARE else config.num_labels
        return outline(config.architecture, json.dumps(config.model_args or {}), labels)

    def anatomy(self, config: Any) -> Architecture:
        """Where the parts are; MLPs may be gated, and are then kept with gate and up apart."""
        return WITH_GATE if _gated(self.outline(config).blocks[0].mlp) else PLAIN

    def stock_layers(self, config: Any) -> tuple[LayerShape, ...]:
        """All layers before any cut."""
        return tuple(_layer_shape(block) for block in self.outline(config).blocks)

    def grain(self, config: Any) -> Grain:
        """Which sizes are legal."""
        return _grain(self.outline(config))

    def costs(self, config: Any) -> dict[str, Any]:
        """Biases, norms and other parameters, as the stock model has them."""
        model = self.outline(config)
        layer, inner = model.blocks[0], _inner(model.blocks[0].mlp)
        every = [part for block in model.blocks for part in block.parameters()]
        return IMAGES | dict(
            hidden_size=model.embed_dim,
            qkv_bias=_biased(layer.attn),
            k_bias=type(layer.attn).__name__ != "EvaAttention",
            o_bias=layer.attn.proj.bias is not None,
            mlp_bias=inner[0].bias is not None,
            mlp_matrices=3 if _gated(layer.mlp) else 2,
            layer_norms=sum(part.numel() for name, part in layer.named_parameters() if not _cuttable(name)),
            other_parameters=sum(p.numel() for p in model.parameters()) - sum(part.numel() for part in every),
            row_tokens=self.longest(config),
        )

    def longest(self, config: Any) -> int:
        """Tokens of an image: its patches and what comes before them."""
        model = self.outline(config)
        return int(model.patch_embed.num_patches + model.num_prefix_tokens)

    def row_tokens(self, config: Any, rows: torch.Tensor) -> int:
        """Tokens that an image makes; one of a size that the model does not take is refused."""
        model: Any = self.outline(config)
        size, taken = tuple(rows.shape[-2:]), tuple(model.patch_embed.img_size)
        if size != taken and not model.dynamic_img_size:
            made, wanted = ("x".join(map(str, pair)) for pair in (size, taken))
            raise ModelError(f"images are prepared as {made}, but {config.architecture} takes {wanted}.")
        high, wide = model.patch_embed.dynamic_feat_size(size)
        return int(model.num_prefix_tokens + high * wide)

    def embedding_width(self, config: Any) -> int:
        """Of what a model without a head puts out."""
        return int(self.outline(config).embed_dim)

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        mlp, after = layer.mlp, type(layer).__name__ in ("ResPostBlock", "EvaBlockPostNorm")
        gated, scales = _gated(mlp), (_scale(layer, 1), _scale(layer, 2))
        return Block(
            attention=layer.attn,
            output=layer.attn.o_proj,
            inner=(mlp.gate_proj, mlp.up_proj) if gated else (mlp.fc1,),
            down=mlp.down_proj if gated else mlp.fc2,
            activation=mlp.act_fn if gated else mlp.act,
            attention_norm=None if after else layer.norm1,
            mlp_norm=None if after else layer.norm2,
            attention_scale=layer.norm1 if after else scales[0],
            mlp_scale=layer.norm2 if after else scales[1],
            by_channel=not after and None not in scales,
            channel_norm=None if isinstance(mlp.norm, nn.Identity) else mlp.norm,
        )

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary with queries, keys and values apart, and gate and up of a gated MLP."""
        mlp, found = self.outline(config).blocks[0].mlp, dict(tensors)
        gates = ("up_proj", "gate_proj") if getattr(mlp, "gate_last", False) else ("gate_proj", "up_proj")
        for name in [name for name in found if _gated(mlp) and ".mlp.fc1." in name]:
            parts = zip(gates, found.pop(name).chunk(2), strict=True)
            found |= {name.replace("fc1", part): piece.clone() for part, piece in parts}
        for theirs, ours in RENAMED.items():
            found = {name.replace(theirs, ours): tensor for name, tensor in found.items()}
        return super().apart(found, config)

    def configured(self, config_class: Any, settings: dict[str, Any]) -> Any:
        """A configuration with the settings of another, whose labels only `from_dict` reads.

        It also says how images are prepared; for models of its own transformers would know which class reads that.
        """
        return config_class.from_dict({**settings, "image_processor_type": "TimmWrapperImageProcessor"})

    def build(self, like: nn.Module, layers: tuple[LayerShape, ...], tensors: Tensors) -> nn.Module:
        """A tailored model with the head of `like`, and attention by the same kernel: timm chooses its own."""
        model = super().build(like, layers, tensors)
        if not self.is_tailored(like):
            model.config._attn_implementation = "sdpa" if self.layers(like)[0].attn.fused_attn else "eager"
        return model

    def logits(self, model: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        """Classes from the residual stream after the last layer; without a head, what the model pools out of it."""
        return model.timm_model.forward_head(model.timm_model.norm(stream))

    def pooled(self, model: nn.Module, out: Any) -> torch.Tensor:
        """One vector for every image (B, D), out of what a model without a head puts out."""
        return model.timm_model.forward_head(out["last_hidden_state"])

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """Positions of patches, where layers turn them."""
        found = self._handed(model, ids[:1], len(self.layers(model)))
        return [{"position_embeddings": context.get("rope")} for _, context in found]

    def run_layer(self, model: nn.Module, index: int, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """One layer on a residual stream."""
        table = context.get("position_embeddings")
        return self.layers(model)[index](stream, **({} if table is None else {"rope": table}))

    def example(self, config: Any, count: int = 2, length: int = 20) -> torch.Tensor:
        """Images of random pixels, for tests."""
        model: Any = self.outline(config)
        channels = getattr(model, "in_chans", None) or model.patch_embed.proj.in_channels
        return torch.randn((count, channels, *model.patch_embed.img_size), generator=torch.Generator().manual_seed(0))

    def tiny(
        self, model_type: str = "", head: str = IMAGE_CLASSIFIER, architecture: str = "", **changes: Any
    ) -> nn.Module:
        """A tiny random stock model for tests, computed by plain attention."""
        made = PLAIN.stock_classes()
        sizes = dict(embed_dim=32, depth=3, num_heads=4, img_size=16, patch_size=4)
        torch.manual_seed(0)
        config = made["AutoConfig"](
            architecture=architecture or "vit_tiny_patch16_224", model_args={**sizes, **changes}, num_labels=5
        )
        model = made[head](config)
        model.config.architectures = [type(model).__name__]
        for block in model.timm_model.blocks:
            block.attn.fused_attn = False
        for parameter in model.parameters():
            parameter.data *= 4 if parameter.dim() == 2 else 1  # as drawn, heads would hardly differ
        return unsettled(model)


RENAMED = {
    ".attn.q_bias": ".attn.q_proj.bias", ".attn.v_bias": ".attn.v_proj.bias",
    ".mlp.fc1_g.": ".mlp.gate_proj.", ".mlp.fc1_x.": ".mlp.up_proj.",
}  # fmt: skip


@functools.lru_cache(maxsize=32)
def outline(architecture: str, arguments: str, classes: int) -> nn.Module:
    """A model of timm without storage; `arguments` are JSON."""
    timm = installed()
    try:
        with torch.device("meta"):
            model = timm.create_model(architecture, pretrained=False, num_classes=classes, **json.loads(arguments))
    except RuntimeError as error:
        if "Unknown model" not in str(error):
            raise
        raise ModelError(f"timm {timm.__version__} knows no model called '{architecture}'.") from None
    if reason := _unsupported(model):
        raise ModelError(f"{architecture} of timm cannot be reshaped: {reason}. Supported are {SUPPORTED}.")
    return model


def hub_id(name: str) -> str:
    """Where the weights of a model of timm lie; without a tag those that timm would load."""
    timm = installed()
    try:
        found = timm.models.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:  # no such name, or no such tag
        found = None
    if found is None or not found.has_weights:
        near = difflib.get_close_matches(name, timm.list_models(pretrained=True), 3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ModelError(f"timm {timm.__version__} has no weights for '{name}'.{hint}")
    tagged = name.partition(".")[0] + (f".{found.tag}" if found.tag else "")
    home = found.hf_hub_id or "timm/"
    return f"{home}{tagged}" if home.endswith("/") else str(home)


def installed() -> Any:
    """The package timm, or an error that says how to get it."""
    try:
        import timm
    except ImportError as error:
        raise ModelError(f"timm models need the package timm ({error}): {INSTALL}") from None
    except RuntimeError as error:
        if not is_wrong_torchvision(error):
            raise
        raise ModelError(WRONG_TORCHVISION) from None
    return timm


def _unsupported(model: nn.Module) -> str:
    """Why a model cannot be reshaped; empty where it can."""
    if type(model).__name__ not in MODELS:
        return f"it is a {type(model).__name__}, no plain Vision Transformer"
    for block in model.blocks:
        if type(block).__name__ not in LAYERS:
            return f"its layers are of the kind {type(block).__name__}"
        attention, mlp = block.attn, block.mlp
        if type(attention).__name__ not in ATTENTIONS:
            return f"its attention is of the kind {type(attention).__name__}"
        if type(mlp).__name__ not in MLPS:
            return f"its MLPs are of the kind {type(mlp).__name__}"
        if not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
            return "a norm lies between its heads and their output projection"
        if getattr(attention, "gate", None) is not None:
            return "its heads are gated"
        if _gated(mlp) and mlp.drop1.p:
            return "its gated MLPs drop channels while training"
    return "its rotary positions were learned for every head" if getattr(model, "rope_mixed", False) else ""


def _gated(mlp: nn.Module) -> bool:
    return type(mlp).__name__ in GATED


def _inner(mlp: Any) -> tuple[nn.Linear, int]:
    """A stock MLP's first projection, and its channels."""
    first = mlp.fc1_g if hasattr(mlp, "fc1_g") else mlp.fc1
    return first, first.out_features // (2 if type(mlp).__name__ == "GluMlp" else 1)


def _biased(attention: nn.Module) -> bool:
    """Whether queries and values have biases."""
    made = attention.qkv if getattr(attention, "q_proj", None) is None else attention.q_proj
    return made.bias is not None or getattr(attention, "q_bias", None) is not None


def _layer_shape(block: nn.Module) -> LayerShape:
    """A stock layer before any cut."""
    attention = block.attn
    groups, dim = getattr(attention, "num_kv_heads", attention.num_heads), attention.head_dim
    return LayerShape(attention.num_heads, groups, dim, dim, _inner(block.mlp)[1], dim)


def _cuttable(name: str) -> bool:
    """Whether a parameter of a stock layer is one that shapes account for."""
    return name.startswith(("attn.q", "attn.k", "attn.v", "attn.proj.", "mlp.fc")) and "_norm." not in name


def _grain(model: nn.Module) -> Grain:
    """Steps and floors; where a norm is over all channels of an MLP, none of them can go."""
    attention, mlp, layer = model.blocks[0].attn, model.blocks[0].mlp, _layer_shape(model.blocks[0])
    normed = not isinstance(getattr(attention, "q_norm", nn.Identity()), nn.Identity)
    turned = getattr(model, "rope", None) is not None
    grain = grain_of(layer.qk_dim, layer.mlp_width, pairs=False, folds=not (normed or turned))
    if isinstance(mlp.norm, nn.Identity):
        return grain
    return replace(grain, mlp_floor=layer.mlp_width)


def _scale(layer: nn.Module, number: int) -> Norm | None:
    """The layer scale behind attention (1) or the MLP (2)."""
    gamma = getattr(layer, f"gamma_{number}", None)
    if gamma is not None:
        return lambda x: gamma * x
    scale = getattr(layer, f"ls{number}", None)
    return None if scale is None or isinstance(scale, nn.Identity) else scale


FAMILY = Timm()
