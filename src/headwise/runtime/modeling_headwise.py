"""Transformers whose layers have their own sizes. Needs transformers and torch only; lies beside every tailored model.

A layer may have its own number of query and key/value heads, its own query/key and value dimensions, its own kept
rotary pairs for every key/value head, a projection of queries and keys after rotary, a cache in few bits, and its own
MLP width. Where a stock architecture keeps its parts is data (`Anatomy`) in the model's `config.json`.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, T tokens, H query heads, G key/value heads,
W width of queries and keys before projection, K after it, V width of values, P rotary pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

from .cache_headwise import Rows, append, remembered
from .coder_headwise import RowCoder
from .hub_headwise import packed_ends, recording, saving, telling
from .packed_headwise import loading
from .prompt_headwise import apart
from .softmax_headwise import PAGED, added, eager, filled, linear, paged, paged_size, refuse_paged, served, tell_engine


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Where a stock architecture keeps its parts. The model's family writes it into `config.json`.

    Paths of modules lead from a layer, paths in `names` from its attention. A path may list alternatives
    ("q_proj|attention.query"), because versions of transformers differ. Whatever a stock layer fuses (queries with keys
    and values, gate with up) is kept apart in a tailored model, under our names.
    """

    body_at: str = "model"  # from a model with a head to its body
    layers: str = "layers"  # from the body
    attention: str = "self_attn"
    output: str = ""  # output projection of attention, where it lies outside the attention
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    names: dict[str, str] = field(default_factory=dict)  # part of attention -> its path, where not as in `STOCK`
    fused_mlp: dict[str, str] = field(default_factory=dict)  # an MLP that fuses gate and up: part -> its path
    scales_queries: bool = False  # scales queries before the product with keys, not the product
    patches: bool = False  # a model of timm: a layer takes the attention's output alone
    roles: dict[str, dict[str, str]] = field(default_factory=dict)  # of an encoder-decoder: role -> our part -> path
    handed: tuple[str, ...] = ()  # arguments that its stacks hand a layer by position, after stream and mask
    settings: dict[str, str] = field(default_factory=dict)  # names of its activation and dropouts in a configuration
    post_norm: bool = False  # its norms come after the sums
    position_bias: bool = False  # its positions are a bias on the logits


STOCK = {  # part of a stock attention -> its path; empty where most have none
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm", "bias": "",
    "config": "config", "hidden": "config.hidden_size", "head_dim": "head_dim", "layer_idx": "layer_idx",
    "scaling": "scaling", "dropout": "attention_dropout", "is_causal": "is_causal", "sliding_window": "sliding_window",
    "softcap": "", "resid_dropout": "", "use_rope": "use_rope", "rotary": "",
}  # fmt: skip
INNER = ("config", "scaling", "is_causal", "sliding_window", "softcap")  # held by the softmax inside our attention
OURS = {**{part: part for part in STOCK}, **{part: f"attend.{part}" for part in INNER}}
OURS |= {**{part: f"{part}_proj" for part in "qkvo"}, "dropout": "attend.attention_dropout"}


def describe(config: Any) -> Anatomy:
    """The anatomy of a configuration's model. In a process with headwise its families answer in place of this."""
    return Anatomy(**config.headwise_anatomy)


def part_at(module: nn.Module, path: str) -> Any:
    """What lies at a path below a module: the first of its alternatives that is there, else None."""
    for way in filter(None, path.split("|")):
        try:
            found = attrgetter(way)(module)
        except AttributeError:
            continue
        if found is not None:
            return found
    return None


def body_of(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    """The model without its head; a model that has none is its own body."""
    found = part_at(model, anatomy.body_at)
    return model if found is None else found


def _signed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A table of sines by its halves, as `_turned` takes it."""
    return torch.cat((-first, second), dim=-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs that the tables cover; coordinate j pairs with j + half. What lies beyond stays as it is.

    The sines carry the signs that stock code gives coordinates: the same to the last bit, in fewer steps.
    """
    width = cos.shape[-1]
    turning = x if width == x.shape[-1] else x[..., :width]
    turned = (turning * cos + turning.roll(width // 2, -1) * sin).to(x.dtype)
    return turned if turning is x else torch.cat((turned, x[..., width:]), dim=-1)


class SoftmaxAttention(nn.Module):
    """Softmax attention by whatever kernel the configuration names. A module of its own, for hooks."""

    def __init__(self, part: Callable[[str], Any], sharing: int, scales_queries: bool) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = part("config"), part("layer_idx"), bool(part("is_causal"))
        self.scaling = part("scaling") or part("head_dim") ** -0.5  # stays the original's
        self.attention_dropout = float(part("dropout"))
        self.scales_queries = scales_queries
        self.num_key_value_groups = sharing  # query heads that share one key/value head
        self.pooled = False  # whether that is a row of several heads, which the fused CPU kernel reads for every query
        self.softcap, self.sliding_window = part("softcap"), part("sliding_window")
        self.paged = paged(self.config)  # an engine owns the cache; a configuration takes long to ask

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads' outputs (B, T, H, V) before the output projection, and the weights if the kernel gives them."""
        # A mask of ours (`masked=True`) is no common one: few kernels take it.
        name, masked = PAGED if self.paged else self.config._attn_implementation, kwargs.pop("masked", False)
        if masked and name == "eager":
            attention_mask = added(attention_mask, q_BHTK, k_BGTK, self.is_causal)
        elif masked:
            name = "sdpa"
        qk_dim, v_dim = q_BHTK.shape[-1], v_BGTV.shape[-1]
        if name == "sdpa" and self.softcap is not None:  # that kernel knows no cap
            name, attention_mask = "eager", added(attention_mask, q_BHTK, k_BGTK, self.is_causal)
        # No fused CPU kernel takes unequal dimensions, and on CUDA the fast one with a gradient does not either.
        cpu = q_BHTK.device.type == "cpu"
        if name == "sdpa" and (qk_dim != v_dim or self.pooled) and (cpu or q_BHTK.requires_grad):
            if q_BHTK.shape[2] == 1 and not self.training:
                return self._one_token(q_BHTK, k_BGTK, v_BGTV, attention_mask), None
            # Zeros at the end of the smaller dimension change nothing.
            width = max(qk_dim, v_dim)
            q_BHTK, k_BGTK, v_BGTV = (filled(x, width) for x in (q_BHTK, k_BGTK, v_BGTV))
        if self.scales_queries:
            q_BHTK, k_BGTK = q_BHTK * self.scaling, k_BGTK.contiguous()  # in memory as stock code has them
        if self.paged:
            q_BHTK, k_BGTK, v_BGTV = (filled(x, paged_size(qk_dim, v_dim)) for x in (q_BHTK, k_BGTK, v_BGTV))
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # vLLM finds this name and its one call
        z_BTHV, weights = kernel(
            self, q_BHTK, k_BGTK, v_BGTV, attention_mask, scaling=self.softmax_scaling,
            sliding_window=self.sliding_window, dropout=self.attention_dropout if self.training else 0.0,
            **({} if self.softcap is None else {"softcap": self.softcap}), **kwargs,
        )  # fmt: skip
        if self.paged:  # which returns a row for every token
            z_BTHV = z_BTHV.view(1, -1, q_BHTK.shape[1], q_BHTK.shape[3])
        return (z_BTHV if z_BTHV.shape[-1] == v_dim else z_BTHV[..., :v_dim]), weights

    @property
    def softmax_scaling(self) -> float:
        """What the product with keys is scaled by."""
        return 1.0 if self.scales_queries else self.scaling

    def _one_token(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, mask: Any) -> torch.Tensor:
        """One new token against the cache, in few steps and without repeating keys for the queries that share them."""
        batch, heads = q_BHTK.shape[:2]
        q, k = q_BHTK.reshape(-1, self.num_key_value_groups, q_BHTK.shape[3]), k_BGTK.flatten(0, 1)
        logits = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=self.scaling)
        if mask is not None:
            mask = mask.expand(batch, heads, 1, -1).reshape(logits.shape)
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        return torch.bmm(logits.softmax(-1), v_BGTV.flatten(0, 1)).view(batch, 1, heads, -1)


@torch.no_grad()
def _linear(stock: nn.Module, columns: int, rows: int, bias: bool, rank: int = 0) -> nn.Linear:
    """A new matrix whose random entries spread as those of the stock one that it replaces, whatever rule drew them."""
    new = linear(columns, rows, bias, rank)
    for name in ("weight", "bias"):
        ours, theirs = getattr(new, name), getattr(stock, name, None)
        if ours is not None and theirs is not None and theirs.numel() and not (ours.is_meta or theirs.is_meta):
            spread, mean = torch.std_mean(theirs.float(), correction=0)
            ours.normal_(0.0 if name == "weight" else float(mean), float(spread))
    return new


class TailoredAttention(nn.Module):
    """Attention with its own sizes; a drop-in for the stock attention of a layer.

    `stock` is the attention that it replaces, stock or tailored: everything but the sizes is taken from there.
    """

    def __init__(self, stock: nn.Module, anatomy: Anatomy, sizes: dict[str, Any], biased: bool = False) -> None:
        super().__init__()
        names = OURS if isinstance(stock, TailoredAttention) else {**STOCK, **anatomy.names}

        def part(name: str) -> Any:
            return part_at(stock, names[name])

        self.layer_idx, self.head_dim, self.hidden = part("layer_idx"), part("head_dim"), part("hidden")
        self.query_heads, self.kv_heads = sizes["query_heads"], sizes["kv_heads"]
        self.qk_width, self.qk_dim, self.v_dim = sizes["qk_width"], sizes["qk_dim"], sizes["v_dim"]
        self.pooled = sizes.get("pooled", 1)  # key/value heads of which one row of the cache is made
        self.v_width, self.q_rank = sizes["v_width"] if self.pooled > 1 else self.v_dim, sizes.get("q_rank", 0)
        self.head_width, self.out_dim = self.qk_width // self.pooled, self.v_width // self.pooled
        coded = sizes.get("k_code") and sizes.get("v_code")
        both = (("k_code", self.qk_dim), ("v_code", self.v_dim))
        self.coders = tuple(RowCoder(sizes[name], size) for name, size in both) if coded else None
        self.projects = self.qk_dim < self.qk_width or bool(coded)  # queries and keys after rotary
        self.v_projects = self.pooled > 1 and (self.v_dim < self.v_width or bool(coded))
        self.by_rows = paged(part("config"))  # whether many queries look at whole rows too: for probes that record them
        if self.by_rows:  # and where an engine owns the cache
            refuse_paged(sizes)
        self._set_projections(part)
        sharing = self.query_heads // self.kv_heads
        self.attend = SoftmaxAttention(part, sharing, anatomy.scales_queries)
        self.attend.pooled = self.pooled > 1
        if self.pooled > 1 and not self.by_rows:
            self.attend_apart = SoftmaxAttention(part, sharing // self.pooled, anatomy.scales_queries)
        turning = part("rotary")  # coordinates that turn with the position
        self.rotary = self._stock_rotary(part) if turning is None else turning
        self.q_norm, self.k_norm, self.resid_dropout = part("q_norm"), part("k_norm"), part("resid_dropout")
        self.biased = biased
        self._set_own_tensors()

    def _set_projections(self, part: Callable[[str], Any]) -> None:
        """Projections without weights worth keeping; a stock matrix may hold queries, keys and values."""
        queries, keys, values, output = (part(name) for name in "qkvo")
        bias = queries.bias is not None or part("bias") is not None
        self.q_proj = _linear(queries, self.hidden, self.query_heads * self.head_width, bias, self.q_rank)
        self.k_proj = _linear(keys, self.hidden, self.kv_heads * self.qk_width, keys.bias is not None)
        centred = self.coders is not None  # coded values have no mean: biases take it off and add it again
        self.v_proj = _linear(values, self.hidden, self.kv_heads * self.v_dim, bias or centred)
        if output is not None:  # some layers keep the output projection elsewhere
            biased = output.bias is not None or centred
            self.o_proj = _linear(output, self.query_heads * self.out_dim, self.hidden, biased)

    def _stock_rotary(self, part: Callable[[str], Any]) -> int:
        """Coordinates of a stock head that turn with the position; some layers turn none."""
        settings = getattr(part("config"), "rope_parameters", None)
        still = settings is None or part("use_rope") in (0, False)
        return 0 if still else int(self.head_dim * settings.get("partial_rotary_factor", 1.0))

    def _set_own_tensors(self) -> None:
        """Tensors that no stock attention has: kept pairs, projections after rotary, columns of a position bias."""
        if self.rotary and self.head_width < self.head_dim:
            # Spread over all speeds, as those of a smaller stock head are; a model from a file brings its own.
            kept = torch.arange(self.qk_width // 2) * (self.rotary // 2) // (self.qk_width // 2)
            self.register_buffer("pairs_GP", kept.expand(self.kv_heads, -1).clone())
        if self.projects:
            # Random, so that queries and keys keep their size; zeros could never be trained.
            down = (torch.randn(2, self.kv_heads, self.qk_width, self.qk_dim) * self.qk_width**-0.5).unbind()
            self.q_down_GWK, self.k_down_GWK = (nn.Parameter(matrix.clone()) for matrix in down)
        if self.coders is not None:  # the mean of all keys, which softmax ignores; factors of what is coded
            self.k_mean_GK = nn.Parameter(torch.zeros(self.kv_heads, self.qk_dim))
            self.register_buffer("k_gain_GK", torch.ones(self.kv_heads, self.qk_dim))
            self.register_buffer("v_gain_GV", torch.ones(self.kv_heads, self.v_dim))
        if self.v_projects:  # from a row's values to those of each of its heads
            up = torch.randn(self.kv_heads * self.pooled, self.v_dim, self.out_dim) * self.v_dim**-0.5
            self.v_up_NVO = nn.Parameter(up)
        if self.biased:  # which columns of the stack's position bias are those of the heads
            self.register_buffer("heads_H", torch.arange(self.query_heads))

    def heads(self, hidden: torch.Tensor, position_embeddings: Any = None, memory: Any = None) -> Any:
        """Queries and keys after norms and rotary, before projection, and values; of the memory where one is given.

        Keys of pooled heads lie side by side in a row; queries are as wide as their own head's part of it.
        """
        q, k, v = self._apart(hidden, position_embeddings, hidden if memory is None else memory)
        if self.pooled > 1:
            k = k.unflatten(1, (self.kv_heads, self.pooled)).transpose(2, 3).flatten(3)
        return q, k, v

    def _apart(self, hidden: torch.Tensor, position_embeddings: Any, seen: torch.Tensor) -> Any:
        """Queries, keys and values with every head's keys apart, also those of pooled heads."""
        key_heads = self.kv_heads * self.pooled
        q_BHTW = self._normed(self.q_proj(hidden), self.q_norm, self.query_heads)
        k_BGTW = self._normed(self.k_proj(seen), self.k_norm, key_heads)
        v_BGTV = self.v_proj(seen).view(*seen.shape[:-1], self.kv_heads, self.v_dim).transpose(1, 2)
        if not self.rotary or position_embeddings is None:
            return q_BHTW, k_BGTW, v_BGTV
        cos, sin = position_embeddings
        if self.head_width == self.head_dim:
            if hidden.shape[1] == 1 and cos.shape[-1] == self.head_width:  # all at once, in few steps
                x, half = torch.cat((q_BHTW, k_BGTW), dim=1), self.head_width // 2
                across = torch.cat((-x.narrow(-1, half, half), x.narrow(-1, 0, half)), dim=-1)
                x = (x * cos.unsqueeze(1) + across * sin.unsqueeze(1)).to(x.dtype)
                return x.narrow(1, 0, self.query_heads), x.narrow(1, self.query_heads, key_heads), v_BGTV
            cos, sin = cos.unsqueeze(1), _signed(*sin.unsqueeze(1).chunk(2, -1))
            return _turned(q_BHTW, cos, sin), _turned(k_BGTW, cos, sin), v_BGTV
        cos_BGTP, sin_BGTP = self._kept(cos), self._kept(sin)
        cos, sin = torch.cat((cos_BGTP, cos_BGTP), dim=-1), _signed(sin_BGTP, sin_BGTP)
        grouped = q_BHTW.view(q_BHTW.shape[0], self.kv_heads, -1, *q_BHTW.shape[2:])  # sharing their key's tables
        q_BHTW = _turned(grouped, cos.unsqueeze(2), sin.unsqueeze(2)).flatten(1, 2)
        return q_BHTW, _turned(k_BGTW, cos, sin), v_BGTV

    def _normed(self, x: torch.Tensor, norm: nn.Module | None, heads: int) -> torch.Tensor:
        """Heads apart (B, heads, T, W); a norm of queries or keys is over a head or over all of them together."""
        if norm is not None and norm.weight.numel() > self.head_width:
            x, norm = norm(x), None
        x = x.view(*x.shape[:-1], heads, self.head_width)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _kept(self, table_BTW: torch.Tensor) -> torch.Tensor:
        """The columns of the stock rotary table that each key/value head kept (B, G, T, P)."""
        columns = table_BTW.index_select(-1, self.pairs_GP.flatten())
        return columns.view(*columns.shape[:-1], self.kv_heads, -1).transpose(1, 2)

    def project(self, q_BHTW: torch.Tensor, k_BGTW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as the softmax and the cache see them."""
        if not self.projects:
            return self.spread(q_BHTW), k_BGTW
        k_BGTK = self._project_keys(k_BGTW)
        batch, heads, tokens, width = q_BHTW.shape
        q_down, groups = self.q_down_GWK.view(-1, width, self.qk_dim), self.kv_heads * self.pooled
        if tokens == 1:  # one product for each group: a plain one would copy the matrices for every text
            q_GhW = q_BHTW.reshape(batch, groups, -1, width).transpose(0, 1).reshape(groups, -1, width)
            q_GBhK = torch.bmm(q_GhW, q_down).view(groups, batch, -1, self.qk_dim)
            return q_GBhK.transpose(0, 1).reshape(batch, heads, 1, self.qk_dim), k_BGTK
        few = not torch.compiler.is_exporting() and tokens < width  # one graph for any number of tokens
        if few:  # one product for all queries of a group
            q_BHTK = q_BHTW.reshape(batch, groups, -1, width) @ q_down
        else:
            q_BHTK = q_BHTW.view(batch, groups, -1, tokens, width) @ q_down.unsqueeze(1)
        return q_BHTK.view(batch, heads, tokens, self.qk_dim), k_BGTK

    def _project_keys(self, k_BGTW: torch.Tensor) -> torch.Tensor:
        if not self.projects:
            return k_BGTW
        if k_BGTW.shape[2] == 1:
            k_BGTK = torch.bmm(k_BGTW.squeeze(2).transpose(0, 1), self.k_down_GWK).transpose(0, 1).unsqueeze(2)
        else:
            k_BGTK = k_BGTW @ self.k_down_GWK
        mean_GK = self._parameters.get("k_mean_GK")
        return k_BGTK if mean_GK is None else k_BGTK - mean_GK.unsqueeze(1)

    def looked_up(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as `attended` takes them: keys in their cached form."""
        return (q, self._project_keys(k)) if self._many(q) else self.project(q, k)

    def remembered(self, k: torch.Tensor, v: torch.Tensor, mask: Any = None, cache: Any = None) -> Any:
        """Keys and values as the cache gives them back, after those that it holds; without one, as it would."""
        if self.coders is None:
            return Rows(*((k, v) if cache is None else append(cache, k, v, self.layer_idx)))
        gains = self._buffers.get("k_gain_GK"), self._buffers.get("v_gain_GV")
        whole = self.attend.sliding_window is None
        return remembered(self.coders, k, v, cache, self.layer_idx, mask, whole, gains)

    def _many(self, q: torch.Tensor) -> bool:
        """Whether it costs less to rebuild every head's own keys and values from rows than to attend to whole rows."""
        alike = self.pooled == 1 or self.by_rows or torch.compiler.is_exporting()  # one graph for any number of tokens
        return not alike and q.shape[2] > self.head_width

    def attended(self, q: torch.Tensor, rows: Any, mask: Any, **kwargs: Any) -> Any:
        """What the heads give the output projection (B, T, H O), and the weights if the kernel gives them."""
        if not self._many(q):
            z, weights = rows.read(self.attend, q, mask, **kwargs)
            return self.own_values(z), weights
        keys = self.q_down_GWK.mT if self.projects else None
        values = self.v_up_NVO.unflatten(0, (self.kv_heads, -1)).transpose(1, 2).flatten(2) if self.v_projects else None
        z, weights = apart(rows, (keys, values), self._own).read(self.attend_apart, q, mask, **kwargs)
        return z.flatten(2), weights

    def _own(self, x: torch.Tensor, basis: Any) -> torch.Tensor:
        """What every head has of the rows that heads share."""
        return (x if basis is None else x @ basis).unflatten(-1, (self.pooled, -1)).transpose(2, 3).flatten(1, 2)

    def spread(self, q_BHTW: torch.Tensor) -> torch.Tensor:
        """Queries as wide as the rows of pooled heads: zero beside their own head's part."""
        if self.pooled == 1:
            return q_BHTW
        own = torch.eye(self.pooled, dtype=q_BHTW.dtype, device=q_BHTW.device).view(self.pooled, 1, 1, self.pooled, 1)
        return (q_BHTW.unflatten(1, (self.kv_heads, self.pooled, -1)).unsqueeze(-2) * own).flatten(-2).flatten(1, 3)

    def own_values(self, z_BTHV: torch.Tensor) -> torch.Tensor:
        """What every head is given of its row's values, as the output projection takes it (B, T, H O)."""
        if self.pooled == 1:
            return z_BTHV.flatten(2)
        if self.v_projects:  # one product for each head: a plain one would copy the matrices for every token
            z_NBThV = z_BTHV.unflatten(2, (self.kv_heads * self.pooled, -1)).movedim(2, 0)
            own = torch.bmm(z_NBThV.flatten(1, 3), self.v_up_NVO)
            return own.view(*z_NBThV.shape[:-1], -1).movedim(0, 2).flatten(2)
        z = z_BTHV.unflatten(2, (self.kv_heads, self.pooled, -1)).unflatten(-1, (self.pooled, -1))
        return z.diagonal(dim1=3, dim2=5).movedim(-1, 3).flatten(2)

    def added(self, q: torch.Tensor, k: torch.Tensor, mask: Any, position_bias: torch.Tensor | None) -> Any:
        """The mask, plus the bias of this layer's own heads where positions are a bias (1, all heads, T, T)."""
        if position_bias is None:
            return mask
        mask, bias = added(mask, q, k, self.attend.is_causal), position_bias[:, self.heads_H]
        if k.shape[2] > bias.shape[3]:  # places of a static cache that nothing fills yet
            bias = nn.functional.pad(bias, (0, k.shape[2] - bias.shape[3]))
        return bias if mask is None else bias + mask

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None,
        past_key_values: Any = None, layer_past: Any = None, encoder_hidden_states: Any = None,
        key_value_states: torch.Tensor | None = None, position_bias: torch.Tensor | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """As the stock attention's."""
        cache = past_key_values if past_key_values is not None else layer_past
        both = cache if isinstance(cache, EncoderDecoderCache) else None
        if both is not None:
            cache = both.self_attention_cache if key_value_states is None else both.cross_attention_cache
        if both is not None and key_value_states is not None and both.is_updated.get(self.layer_idx):
            q = self._normed(self.q_proj(hidden_states), self.q_norm, self.query_heads)
            rows = Rows(cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values)
        else:
            q, k, v = self.heads(hidden_states, position_embeddings, key_value_states)
            q, k = self.looked_up(q, k)
            rows = self.remembered(k, v, attention_mask, cache)
            if both is not None and key_value_states is not None:
                both.is_updated[self.layer_idx] = True
        z, weights = self.attended(q, rows, self.added(q, rows.k, attention_mask, position_bias), **kwargs)
        output = self._modules.get("o_proj")
        z = z if output is None else output(z)
        return (z if self.resid_dropout is None else self.resid_dropout(z)), weights


class PatchAttention(TailoredAttention):
    """Attention of timm: a layer takes the output alone, and positions turn patches but not the tokens before them."""

    def __init__(self, stock: nn.Module, *more: Any) -> None:
        super().__init__(stock, *more)
        self.num_prefix_tokens = getattr(stock, "num_prefix_tokens", 0)
        self.rotate_half = getattr(stock, "rotate_half", False)
        if isinstance(self.q_norm, nn.Identity):
            self.q_norm = self.k_norm = None

    def heads(self, hidden: torch.Tensor, position_embeddings: Any = None, memory: Any = None) -> Any:
        """As the others'; positions are one table, sines beside cosines."""
        q_BHTW, k_BGTW, v_BGTV = super().heads(hidden)
        if position_embeddings is None:
            return q_BHTW, k_BGTW, v_BGTV
        return self._turned(q_BHTW, position_embeddings), self._turned(k_BGTW, position_embeddings), v_BGTV

    def _turned(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Patches turned: coordinate j pairs with its neighbour, or with j + half."""
        (sin, cos), still, x = table.chunk(2, -1), x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        first, second = x.chunk(2, -1) if self.rotate_half else (x[..., ::2], x[..., 1::2])
        across = torch.stack((-second, first), -2 if self.rotate_half else -1).flatten(-2)
        return torch.cat((still, x * cos + across * sin), dim=2).to(x.dtype)

    def forward(self, x: Any, rope: Any = None, attn_mask: Any = None, is_causal: bool = False) -> Any:  # type: ignore[override]
        """As the stock attention's."""
        q, k, v = self.heads(x, rope)
        q, k = self.project(q, k)
        z, _ = self.attend(q, k, v, added(attn_mask, q, k, is_causal))
        return self.resid_dropout(self.o_proj(z.flatten(2)))


class StackAttention(TailoredAttention):
    """Attention of a stack to itself."""


class CrossAttention(TailoredAttention):
    """Attention of a decoder to its encoder's output."""


class RelativeBias(nn.Module):
    """The bias that a stack adds to its logits, by the distance of two tokens, for all heads that the source had."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        table = getattr(stock, "relative_attention_bias", None)  # there unless the first layer is gone
        self.table = nn.Embedding(stock.relative_attention_num_buckets, stock.n_heads) if table is None else table
        self.bucket, self.options = stock._relative_position_bucket, {"bidirectional": not stock.is_decoder}
        self.options |= {n: getattr(stock, f"relative_attention_{n}") for n in ("num_buckets", "max_distance")}

    def forward(self, queries: int, keys: int, past: Any = 0) -> Any:
        """The bias (1, H, queries, keys) of tokens that come after `past` others."""
        device = self.table.weight.device
        asking = torch.arange(queries, device=device)[:, None] + past
        apart = torch.arange(keys, device=device)[None, :] - asking
        return self.table(self.bucket(apart, **self.options)).permute(2, 0, 1).unsqueeze(0)


class StackLayer(GradientCheckpointingLayer):
    """A layer of an encoder-decoder. A stock decoder block is two: attention to itself, then to the memory and the MLP.

    So either half can go alone. `hidden_states` of a decoder have one entry for each half. The first layer of a stack
    holds the table of its relative positions, where it has one, and hands the bias on to all others.
    """

    def __init__(self, stock: nn.Module, role: str, anatomy: Anatomy, first: bool, config: Any) -> None:
        super().__init__()
        self.role, self.handed, self.post_norm = role, anatomy.handed, anatomy.post_norm
        for ours, path in anatomy.roles[role].items():
            if (found := part_at(stock, path)) is not None:  # an MLP may have no gate
                setattr(self, ours, found)
        if first and anatomy.position_bias:
            self.positions = RelativeBias(self.attention)
        self.activation = ACT2FN[getattr(config, anatomy.settings["activation"])]
        self.dropout = float(getattr(config, anatomy.settings["dropout"]))
        self.inner_dropout = float(getattr(config, anatomy.settings["inner_dropout"]))

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *more: Any, **kwargs: Any) -> Any:
        """As the stock layer's; architectures differ in what they hand it by position."""
        given = {**dict(zip(self.handed, more, strict=False)), **kwargs}
        names = ("encoder_hidden_states", "encoder_attention_mask", "position_bias")
        memory, seen, bias, *_ = [given.pop(n, None) for n in (*names, "encoder_decoder_position_bias", "use_cache")]
        if hasattr(self, "positions") and bias is None:
            bias = self._bias(hidden_states.shape[1], attention_mask, given.get("past_key_values"))
        if self.role != "cross":
            hidden_states = self._attended(hidden_states, attention_mask=attention_mask, position_bias=bias, **given)
        elif memory is not None:
            hidden_states = self._attended(hidden_states, attention_mask=seen, key_value_states=memory, **given)
        if hasattr(self, "wo"):
            hidden_states = self._mlp(hidden_states)
        return (hidden_states, bias, None) if "position_bias" in self.handed else hidden_states

    def _bias(self, queries: int, mask: Any, cache: Any) -> Any:
        past = 0 if cache is None else cache.get_seq_length()
        past = past.clone() if isinstance(past, torch.Tensor) else past  # a static cache changes its count in place
        return self.positions(queries, past + queries if mask is None else mask.shape[-1], past)

    def _attended(self, stream: torch.Tensor, **given: Any) -> torch.Tensor:
        x = stream if self.post_norm else self.attention_norm(stream)
        return self._sum(stream, self.attention(x, **given)[0], self.attention_norm)

    def _mlp(self, stream: torch.Tensor) -> torch.Tensor:
        x = stream if self.post_norm else self.mlp_norm(stream)
        gated = hasattr(self, "gate_proj")
        inner = self.activation(self.gate_proj(x)) * self.up_proj(x) if gated else self.activation(self.up_proj(x))
        inner = nn.functional.dropout(inner, p=self.inner_dropout, training=self.training)
        return self._sum(stream, self.wo(inner.to(self.wo.weight.dtype)), self.mlp_norm)

    def _sum(self, stream: torch.Tensor, part: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        stream = stream + nn.functional.dropout(part, p=self.dropout, training=self.training)
        stream = norm(stream) if self.post_norm else stream
        if stream.dtype == torch.float16:  # as stock code keeps half precision finite
            largest = torch.finfo(stream.dtype).max
            most = torch.where(torch.isinf(stream).any(), largest - 1000, largest)
            stream = torch.clamp(stream, min=-most, max=most)
        return stream


class GatedMLP(nn.Module):
    """A gated MLP with gate and up apart, in place of one that fuses them; `tailor_layer` sets its projections."""

    def __init__(self, stock: nn.Module, names: dict[str, str]) -> None:
        super().__init__()
        self.gate_proj = self.up_proj = part_at(stock, names["inner"])
        self.down_proj = part_at(stock, names["down"])
        self.act_fn = part_at(stock, names.get("act", "")) or nn.functional.silu
        self.norm, self.drop = (part_at(stock, names.get(name, "")) or nn.Identity() for name in ("norm", "drop"))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the fused one's."""
        # Side by side, as one product gives them: how some activations round depends on where their input lies.
        gate, up = torch.cat((self.gate_proj(hidden_states), self.up_proj(hidden_states)), -1).chunk(2, -1)
        return self.down_proj(self.drop(self.norm(up * self.act_fn(gate))))


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    """Set a module below a layer by its path."""
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, module)


def _output_alone(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return args[0][:1] if isinstance(args[0], tuple) else None


ATTENTIONS = {"encoder": StackAttention, "self": StackAttention, "cross": CrossAttention}  # by the role of a layer


def tailor_layer(layer: nn.Module, anatomy: Anatomy, sizes: dict[str, int]) -> None:
    """Give a stock (or tailored) layer its own sizes, with new weights."""
    role = getattr(layer, "role", "")
    own = PatchAttention if anatomy.patches else ATTENTIONS.get(role, TailoredAttention)
    biased, stock = anatomy.position_bias and role != "cross", layer.get_submodule(anatomy.attention)
    own = served(own) if paged(part_at(stock, "attend.config|config")) else own
    attention = own(stock, anatomy, sizes, biased)
    hidden, width = attention.hidden, sizes["mlp_width"]
    if anatomy.output:
        out = layer.get_submodule(anatomy.output)
        width_in = attention.query_heads * attention.out_dim
        _put(layer, anatomy.output, _linear(out, width_in, hidden, out.bias is not None))
    _put(layer, anatomy.attention, attention)
    if hasattr(layer, "layer_scale1"):  # DINOv2 before transformers 5.20 expects the attention's output alone
        layer.layer_scale1.register_forward_pre_hook(_output_alone)
    if anatomy.fused_mlp and not hasattr(fused := layer.get_submodule(anatomy.fused_mlp["at"]), "gate_proj"):
        _put(layer, anatomy.fused_mlp["at"], GatedMLP(fused, anatomy.fused_mlp))
    for path, columns, rows in (*((p, hidden, width) for p in anatomy.mlp_in), (anatomy.mlp_out, width, hidden)):
        if not role or hasattr(layer, path):
            stock = layer.get_submodule(path)
            _put(layer, path, _linear(stock, columns, rows, stock.bias is not None))


def _tailor_stacks(model: Any, body: nn.Module, anatomy: Anatomy) -> None:
    """Put our layers in the place of a stock encoder's and decoder's."""
    model._no_split_modules = ["StackLayer"]
    for name, roles in (("encoder", ("encoder",)), ("decoder", ("self", "cross"))):
        stack = body.get_submodule(name)
        stock, made, counts = getattr(stack, anatomy.layers), nn.ModuleList(), dict.fromkeys(roles, 0)
        for sizes in model.config.headwise["layers"]:
            if (role := sizes["role"]) in roles:
                layer = StackLayer(stock[counts[role]], role, anatomy, not made, model.config)
                tailor_layer(layer, anatomy, sizes)
                layer.attention.layer_idx = layer.attention.attend.layer_idx = counts[role]  # its place in the cache
                counts[role] += 1
                made.append(layer)
        setattr(stack, anatomy.layers, made)
        crossing = {"cross_attentions": OutputRecorder(CrossAttention, index=1)} if "cross" in roles else {}
        _let_record(stack, hidden_states=StackLayer, attentions=StackAttention, **crossing)


def _tailor(model: Any, anatomy: Anatomy) -> None:
    """Give every layer the sizes that the configuration names. Runs before weights are loaded."""
    body = body_of(model, anatomy)
    if anatomy.roles:
        return _tailor_stacks(model, body, anatomy)
    layers: Any = body.get_submodule(anatomy.layers)
    kept = model.config.headwise.get("kept", range(len(layers)))
    for index, (layer, sizes) in enumerate(zip(layers, model.config.headwise["layers"], strict=True)):
        if anatomy.patches:
            layer.get_submodule(anatomy.attention).config = model.config  # which timm does not tell its layers
        tailor_layer(layer, anatomy, sizes)
        if getattr(model.config, "scale_attn_by_inverse_layer_idx", False):  # by the number that it had in the source
            for part in layer.get_submodule(anatomy.attention).modules():
                if isinstance(part, SoftmaxAttention):
                    part.scaling *= (index + 1) / (kept[index] + 1)
    owner = body.get_submodule(anatomy.layers.rpartition(".")[0])
    if not anatomy.patches:  # whose models give no attention weights
        _let_record(owner if isinstance(owner, PreTrainedModel) else body)


def _let_record(body: nn.Module, **more: Any) -> None:
    """Let `output_attentions=True` find our attention: transformers looks it up by the class of the body."""
    recorded = {**(getattr(body, "_can_record_outputs", None) or {}), "attentions": TailoredAttention, **more}
    registry = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        body.__class__ = recording(type(body), recorded, registry)


@functools.cache
def tailored(stock: Any, kind: str = "") -> Any:
    """The tailored class of a stock model or configuration class, made once.

    `kind` is the model_type that it stands for, where several of our kinds share a stock one.
    """
    is_config = issubclass(stock, PreTrainedConfig)
    stock_type = (stock if is_config else stock.config_class).model_type
    kind = "" if kind == stock_type else kind
    name = f"Headwise_{kind}__{stock.__name__}" if kind else f"Headwise{stock.__name__}"
    if name not in globals():
        doc = f"{stock.__name__} with sizes per layer: `config.headwise['layers'][i]` holds them."
        space = {"__module__": __name__, "__doc__": doc, "__qualname__": name}
        more = _config_space(stock, kind or stock_type) if is_config else _model_space(stock, kind)
        globals()[name] = type(stock)(name, (stock,), {**space, **more})
    return globals()[name]


def _config_space(stock: Any, kind: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__annotations__": {"headwise": dict[str, Any] | None}, "headwise": None}
    if stock.is_encoder_decoder:  # a cache has as many layers as the decoder, which stock code does not always tell it
        decoder = "num_decoder_layers" if hasattr(stock, "num_decoder_layers") else "decoder_layers"
        space["attribute_map"] = {**stock.attribute_map, "num_hidden_layers": decoder}

    def __post_init__(self: Any, **kwargs: Any) -> None:
        stock.__post_init__(self, **kwargs)
        tell_engine(self)

    return {"model_type": f"headwise_{kind}", "__post_init__": __post_init__, "to_dict": telling(stock), **space}


def _model_space(stock: Any, kind: str) -> dict[str, Any]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        anatomy = describe(config)
        if config.headwise.get("own_head"):  # an output table that stock code ties all the same
            tied = {k: v for k, v in type(self)._tied_weights_keys.items() if k != "lm_head.weight"}
            self.__dict__["_tied_weights_keys"] = tied
        if parts := config.headwise.get("packed_table"):  # one table for words in and out, in few bits
            self.__dict__["_tied_weights_keys"] = packed_ends(type(self)._tied_weights_keys, parts)
        if anatomy.patches:  # timm does not always state it
            self.__dict__["_supports_sdpa"] = True
        stock.__init__(self, config, *args, **kwargs)
        _tailor(self, anatomy)

    __init__.__annotations__ = {}  # vLLM reads them, and knows no names

    def _initialize_weights(self: Any, module: nn.Module, *custom: bool) -> None:
        """By the rules of stock code: transformers skips some of them for code that it does not know."""
        stock._initialize_weights(self, module, *(False for _ in custom))

    config = tailored(stock.config_class, kind)
    more = {"_initialize_weights": _initialize_weights, "save_pretrained": saving(stock)}
    return {"config_class": config, "__init__": __init__, "from_pretrained": loading(stock), **more}


def __getattr__(name: str) -> Any:
    """Tailored classes are made when they are first used: no other architecture is imported."""
    kind, _, stock = name.removeprefix("Headwise").rpartition("__")
    found = getattr(transformers, stock, None) if name.startswith("Headwise") else None
    if isinstance(found, type) and issubclass(found, (PreTrainedConfig, PreTrainedModel)):
        return tailored(found, kind.removeprefix("_"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
