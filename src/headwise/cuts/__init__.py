"""Carry out a plan: build the smaller model. No decision is made here, and the source is left as it was.

What a plan leaves as it is, both models hold together: only what is cut takes memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from headwise.cuts._code import code
from headwise.cuts._dims import cut_values, fold, keep_pairs, pair_columns, project
from headwise.cuts._heads import Tensors, keep_heads
from headwise.cuts._mlp import keep_channels
from headwise.cuts._rank import factor_queries
from headwise.cuts._save import save, write_folder
from headwise.cuts._weights import weight_moments
from headwise.errors import PlanError
from headwise.families import Family
from headwise.types import LayerKeep, LayerShape, Plan

__all__ = ["Moments", "blind_moments", "cut_layer", "reshape", "reshape_layer", "save", "write_folder"]

Moments = dict[str, torch.Tensor]  # second moments of one layer: gram_q, gram_k, gram_z, and gram_mlp where probed


def reshape(family: Family, model: nn.Module, plan: Plan, moments: list[Moments]) -> nn.Module:
    """The model that the plan describes, built from a tailored `model` and its moments."""
    shape = family.shape_of(model.config)
    if shape.layers != plan.source.layers:
        raise PlanError("this plan was made for a model with other sizes; allocate again for this one.")
    tensors = family.state_of(model, clone=False)
    for index, target in enumerate(plan.target.layers):
        if target.gone:
            continue
        layer = family.take_layer(tensors, index, model.config)
        cut = cut_layer(layer, shape.layers[index], target, plan.keep[index], moments[index])
        family.put_layer(tensors, index, cut, model.config)
    return family.build(model, plan.target.layers, tensors)


def blind_moments(family: Family, model: nn.Module) -> list[Moments]:
    """Moments that the weights of a tailored model alone give, for cuts that read no data."""
    shape, state = family.shape_of(model.config), family.state_of(model, clone=False)
    layers = [family.take_layer(dict(state), index, model.config) for index in range(len(shape.layers))]
    return [weight_moments(*pair, shape.grain.rotary) for pair in zip(layers, shape.layers, strict=True)]


def reshape_layer(
    family: Family, model: nn.Module, index: int, target: LayerShape, keep: LayerKeep, moments: Moments
) -> nn.Module:
    """One layer of the model, cut."""
    layer = family.take_layer(family.state_of(model, clone=False), index, model.config)
    shape = family.shape_of(model.config).layers[index]
    return family.build_layer(model, index, target, cut_layer(layer, shape, target, keep, moments))


def cut_layer(tensors: Tensors, shape: LayerShape, target: LayerShape, keep: LayerKeep, moments: Moments) -> Tensors:
    """One layer, cut to its target sizes: ranks first, then heads, dimensions and channels."""
    if target.q_rank and target.q_rank != shape.q_rank:
        tensors = factor_queries(tensors, target.q_rank, moments)
    tensors, shape, moments = _cut_heads(tensors, shape, target, keep, moments)
    if target.qk_width < shape.qk_width and keep.rotary_pairs is not None:
        tensors = keep_pairs(tensors, shape, keep.rotary_pairs)
        if not shape.projected:
            columns = pair_columns(keep.rotary_pairs, shape.qk_width)
            moments = {**moments, **{name: _select(moments[name], columns) for name in ("gram_q", "gram_k")}}
        qk_dim = shape.qk_dim if shape.projected else target.qk_width
        shape = replace(shape, qk_width=target.qk_width, qk_dim=qk_dim)
    if target.coded:
        tensors = code(tensors, shape, target, moments)
        shape = replace(shape, qk_dim=target.qk_dim, v_dim=target.v_dim)
    if target.qk_dim < shape.qk_dim:
        folded = target.qk_width < shape.qk_width  # no position lies between the weights and the softmax
        narrow = fold if folded else project
        tensors = narrow(tensors, moments["gram_q"], moments["gram_k"], target.qk_dim)
    if target.v_dim < shape.v_dim:
        tensors = cut_values(tensors, shape, moments["gram_z"], target.v_dim)
    if keep.mlp_channels is not None and shape.mlp_width:
        tensors = keep_channels(tensors, keep.mlp_channels, moments.get("gram_mlp"))
    return tensors


def _cut_heads(
    tensors: Tensors, shape: LayerShape, target: LayerShape, keep: LayerKeep, moments: Moments
) -> tuple[Tensors, LayerShape, Moments]:
    if keep.query_heads is None and keep.kv_heads is None:
        return tensors, shape, moments
    groups = list(keep.kv_heads if keep.kv_heads is not None else range(shape.kv_heads))
    heads = list(keep.query_heads if keep.query_heads is not None else range(shape.query_heads))
    per_group = shape.queries_per_group
    if [head // per_group for head in heads] != [g for g in groups for _ in range(len(heads) // len(groups))]:
        raise PlanError("keep.query_heads must name the same number of heads of each kept key/value head, in order.")
    tensors = keep_heads(tensors, (shape.query_heads, shape.kv_heads), tuple(heads), tuple(groups))
    kept = {**moments, "gram_z": moments["gram_z"][heads]}
    by_row = ("gram_q", "gram_k", "k_basis", "k_mean", "v_basis", "v_mean")
    kept |= {name: moments[name][groups] for name in by_row if name in moments}
    return tensors, replace(shape, query_heads=target.query_heads, kv_heads=target.kv_heads), kept


def _select(gram: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([g[index][:, index] for g, index in zip(gram, columns.to(gram.device), strict=True)])
