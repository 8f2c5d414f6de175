"""More heads, fewer layers, the same width: vision models of timm built anew, as the second paper redesigns them.

Models come from scratch, by timm's own arguments; on the device "meta" they take no memory and can only be counted.
"""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from headwise.errors import ModelError, ShapeError
from headwise.families.timm import installed

Sizes = int | tuple[int, ...]


class StageSizes(NamedTuple):
    """Depth, heads and width, stage by stage (one where a model has no stages), and what timm calls them."""

    depth: tuple[int, ...]
    heads: tuple[int, ...]
    width: tuple[int, ...]
    depth_argument: str = "depth"
    heads_argument: str = "num_heads"
    multiple: int = 1  # of a head's dimension


def redesign(
    name: str,
    depth: Sizes | None = None,
    heads: Sizes | None = None,
    mlp_ratio: float | None = None,
    device: str = "cpu",
) -> nn.Module:
    """A fresh model of timm with another depth, other heads or another MLP; what is not given stays.

    Depth and heads are one number, or one per stage where a model has stages (DaViT, VOLO). TNT's heads are those
    that attend to patches.
    """
    name = name.removeprefix("timm:")
    build = build_of(stock(name))
    arguments: dict[str, Any] = {} if mlp_ratio is None else {"mlp_ratio": mlp_ratio}
    if mlp_ratio is not None and mlp_ratio <= 0:
        raise ShapeError(f"an MLP ratio of {mlp_ratio:g} leaves no MLP; give a positive number.")
    if depth is not None:
        arguments[build.depth_argument] = _stages(name, "depth", depth, build.depth)
    if heads is not None:
        found = _stages(name, "heads", heads, build.heads)
        for count, width in zip((found,) if isinstance(found, int) else found, build.width, strict=True):
            _divides(name, count, width, build.multiple)
        arguments[build.heads_argument] = found
    return _made(name, arguments, device)


def stock(name: str) -> nn.Module:
    """The model as timm has it, without storage."""
    return _made(name, {}, "meta")


def parameters(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def build_of(model: nn.Module) -> StageSizes:
    """Depth, heads and width of a model; one that is none of those known is refused with the list."""
    kind = type(model).__name__
    if kind not in KNOWN:
        raise ModelError(f"{kind} models cannot be redesigned; those that can: {', '.join(KNOWN)}.")
    return KNOWN[kind](model)


def _plain(model: Any, multiple: int = 1) -> StageSizes:
    return StageSizes((len(model.blocks),), (model.blocks[0].attn.num_heads,), (model.embed_dim,), multiple=multiple)


def _eva(model: Any) -> StageSizes:
    return _plain(model, 1 if model.rope is None else 4)  # two axes, two coordinates each


def _tnt(model: Any) -> StageSizes:
    heads = model.blocks[0].attn_out.num_heads
    return StageSizes((len(model.blocks),), (heads,), (model.embed_dim,), heads_argument="num_heads_outer")


def _davit(model: Any) -> StageSizes:
    stages = [stage.blocks for stage in model.stages]
    attention: list[Any] = [next(m for m in stage.modules() if hasattr(m, "qkv")) for stage in stages]
    return _staged(stages, attention, [found.qkv.in_features for found in attention], "depths")


def _volo(model: Any) -> StageSizes:
    stages: list[Any] = [stage for stage in model.network if isinstance(stage, nn.Sequential)]
    attention = [stage[0].attn for stage in stages]
    return _staged(stages, attention, [found.proj.in_features for found in attention], "layers")


def _staged(stages: list[Any], attention: list[Any], widths: list[int], argument: str) -> StageSizes:
    return StageSizes(tuple(map(len, stages)), tuple(found.num_heads for found in attention), tuple(widths), argument)


KNOWN: dict[str, Callable[[Any], StageSizes]] = {
    "VisionTransformer": _plain, "VisionTransformerDistilled": _plain, "Eva": _eva, "Xcit": _plain, "TNT": _tnt,
    "DaVit": _davit, "VOLO": _volo,
}  # fmt: skip


def _stages(name: str, what: str, wanted: Sizes, present: tuple[int, ...]) -> Sizes:
    """The sizes as timm takes them: one, or one per stage."""
    sizes = (wanted,) if isinstance(wanted, int) else tuple(wanted)
    if len(sizes) != len(present):
        stages = "no stages" if len(present) == 1 else f"{len(present)} stages"
        shown = present[0] if len(present) == 1 else present
        given = "one number was" if len(sizes) == 1 else f"{len(sizes)} numbers were"
        raise ShapeError(f"{name} has {stages}, with {what} {shown}; {given} given.")
    if small := [size for size in sizes if size < 1]:
        raise ShapeError(f"{what} {small[0]} leaves nothing; give at least 1.")
    return sizes[0] if len(present) == 1 else sizes


def _divides(name: str, heads: int, width: int, multiple: int) -> None:
    """Refuse heads that do not share a width evenly, and name those next to it that do."""
    legal = [n for n in range(1, width // multiple + 1) if width % (n * multiple) == 0]
    if heads not in legal:
        below, above = [n for n in legal if n < heads][-1:], [n for n in legal if n > heads][:1]
        evenly = "evenly" if multiple == 1 else f"in multiples of {multiple}"
        near = " and ".join(map(str, below + above))
        raise ShapeError(
            f"{heads} heads cannot share the width {width} of {name} {evenly}; the nearest counts that can are {near}."
        )


def _made(name: str, arguments: dict[str, Any], device: str) -> nn.Module:
    timm = installed()
    if not timm.is_model(name):
        every = timm.list_models()
        near = [full for full in every if full.startswith(name)][:3] or difflib.get_close_matches(name, every, 3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ModelError(f"timm {timm.__version__} knows no model called '{name}'.{hint}")
    with torch.device(device):
        if arguments and name.startswith("volo_"):  # whose names take no other sizes
            return _volo_with(name, arguments)
        return timm.create_model(name, pretrained=False, **arguments)


def _volo_with(name: str, arguments: dict[str, Any]) -> nn.Module:
    from timm.models.volo import VOLO

    model: Any = stock(name)
    build = _volo(model)
    mlp = model.network[0][0].mlp
    same = dict(
        layers=build.depth,
        num_heads=build.heads,
        embed_dims=build.width,
        img_size=int(model.default_cfg["input_size"][-1]),
        mlp_ratio=mlp.fc1.out_features / mlp.fc1.in_features,
        stem_hidden_dim=model.patch_embed.conv[0].out_channels,
    )
    return VOLO(**{**same, **arguments})
