"""Softmax attention in plain steps, and what a paged cache must know. Lies beside every tailored model.

An engine such as vLLM owns the cache. It takes a few head sizes only, one for keys and values of a layer, and asks the
configuration for them. So rows are filled up with zeros there, which changes no answer, and their outputs are cut back.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, T tokens, H query heads, G key/value heads, W width
of queries and keys before projection, K after it, V width of values, P rotary pairs.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PAGED = "vllm"  # the name of its attention
# Sizes of heads in its cache. vLLM does not name 48 for a CPU, but its kernels there take it, as those of GPUs do.
PAGED_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
FEW = 128  # tokens: on a CPU, copies of more of them take longer than a product for every head


@functools.cache
def paged_size(qk_dim: int, v_dim: int) -> int:
    """The head size at which a paged cache holds keys and values of these widths; 0 where it has none."""
    return next((size for size in PAGED_SIZES if size >= max(qk_dim, v_dim)), 0)


def paged(config: Any) -> bool:
    """Whether a model is built for an engine that owns the cache."""
    return getattr(config, "_attn_implementation", None) == PAGED


def refuse_paged(sizes: dict[str, Any]) -> None:
    """Refuse a layer whose cache the engine cannot hold."""
    if sizes.get("k_code"):
        raise ValueError(
            "the cache of this model is coded in bits, which vLLM cannot hold. Make a model for vLLM: add --serve vllm "
            "to the headwise run command that made it."
        )
    if sizes.get("q_rank"):
        raise ValueError(
            "queries of this model are computed by two factors, which vLLM does not run. Make a model for vLLM: leave "
            "rank out of --allow in the headwise run command that made it."
        )
    if not paged_size(sizes["qk_dim"], sizes["v_dim"]):
        raise ValueError(
            f"cached rows of this model have {max(sizes['qk_dim'], sizes['v_dim']):,} numbers, and vLLM takes at most "
            f"{PAGED_SIZES[-1]}. Make a model for vLLM: add --serve vllm to the headwise run command that made it."
        )


def tell_engine(config: Any) -> None:
    """Tell vLLM the sizes of every layer's cache, where it is there to ask. Others ask the layers themselves."""
    layers = (config.headwise or {}).get("layers") if "vllm" in sys.modules else None
    if not layers or any(layer.get("role") for layer in layers):
        return
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = {
        index: {
            "head_dim": paged_size(layer["qk_dim"], layer["v_dim"]) or layer["qk_dim"],
            "qk_head_dim": layer["qk_dim"],  # says that keys and values differ: transformers' static cache asks
            "num_key_value_heads": layer["kv_heads"],
            "num_attention_heads": layer["query_heads"],
        }
        for index, layer in enumerate(layers)
    }


def filled(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros after the last dimension up to a width."""
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def share() -> tuple[int, int]:
    """How many processes of an engine share the heads of every layer (tensor parallel), and which of them this is."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")  # an import would be asked of every user
    if state is None or not state.model_parallel_is_initialized():
        return 1, 0
    return state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()


class TwoFactors(nn.Linear):
    """A matrix of low rank: its own weight (rows, rank) after that of `first` (rank, columns)."""

    def __init__(self, columns: int, rows: int, bias: bool, rank: int) -> None:
        super().__init__(rank, rows, bias=bias)
        self.first = nn.Linear(columns, rank, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows of `columns` numbers."""
        return super().forward(self.first(x))


def linear(columns: int, rows: int, bias: bool, rank: int) -> nn.Linear:
    """A matrix, or two factors of one where a rank is given."""
    return TwoFactors(columns, rows, bias, rank) if rank else nn.Linear(columns, rows, bias=bias)


class Paged:
    """What an attention does in place of its own steps where an engine owns the cache: the same in fewer of them.

    Tokens of all texts come as one row. vLLM reads the source of `forward`: it makes one product of the three there.
    Where processes share the heads, the engine gives each its part of the projections; `own` gives the rest.
    """

    def __init__(self: Any, *args: Any) -> None:
        super().__init__(*args)
        self.parts, self.part = share()
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        across = any(norm.weight.numel() > self.head_width for norm in norms)  # over all heads together
        if self.parts > 1 and (self.kv_heads % self.parts or across):
            raise ValueError(
                f"--tensor-parallel-size {self.parts} cannot share out this model: layer {self.layer_idx} caches "
                f"{self.kv_heads} row(s) for a token" + (", and its norms go over all heads" if across else "") + ". "
                "Take a size that divides the rows of every layer; 1 always does."
            )
        self.query_heads, self.kv_heads = self.query_heads // self.parts, self.kv_heads // self.parts

    def own(self: Any, every: torch.Tensor) -> torch.Tensor:
        """This process's part of what all heads have."""
        return every if self.parts == 1 else every.chunk(self.parts)[self.part]

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As the stock attention's; the engine remembers keys and values."""
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.paged_output(q, k, v, attention_mask, position_embeddings, **kwargs)

    def paged_output(
        self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, positions: Any, **kwargs: Any
    ) -> Any:
        """What follows the projections: token by token, so that heads lie side by side as the engine takes them."""
        tokens, size = q.shape[-2], paged_size(self.qk_dim, self.v_dim)
        own = self.query_heads * self.head_width, self.kv_heads * self.qk_width, self.kv_heads * self.v_dim
        if (q.shape[-1], k.shape[-1], v.shape[-1]) != own:
            raise ValueError("vLLM does not share out the heads of this model; use --tensor-parallel-size 1.")
        q_THK, k_TGK = self.paged_rows(*self.paged_heads(q, k, positions))
        if self.attend.scales_queries:
            q_THK = q_THK * self.attend.scaling
        rows = (filled(x, size) for x in (q_THK, k_TGK, v.view(tokens, self.kv_heads, self.v_dim)))
        q_BHTK, k_BGTK, v_BGTK = (x.transpose(0, 1).unsqueeze(0) for x in rows)
        kernel = ALL_ATTENTION_FUNCTIONS[PAGED]  # which `attend` would call with the same, after some questions
        scaling = self.attend.softmax_scaling
        z, weights = kernel(self.attend, q_BHTK, k_BGTK, v_BGTK, mask, scaling=scaling, **kwargs)
        z_THV = z.view(tokens, self.query_heads, size)[..., : self.v_dim]
        if self.v_projects:
            z = by_group(z_THV, self.own(self.v_up_NVO)).flatten(1).unsqueeze(0)
        else:
            z = self.own_values(z_THV.unsqueeze(0))
        output = self._modules.get("o_proj")
        z = z if output is None else output(z)
        return (z if self.resid_dropout is None else self.resid_dropout(z)), weights

    def paged_rows(self: Any, q_THW: torch.Tensor, k_TGW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as the softmax and the cache see them."""
        k_TGW = k_TGW.reshape(-1, self.kv_heads, self.qk_width)  # rows that heads share
        if self.projects:
            down = self.own(self.q_down_GWK).reshape(-1, self.head_width, self.qk_dim)
            return by_group(q_THW, down), by_group(k_TGW, self.own(self.k_down_GWK))
        if self.pooled == 1:
            return q_THW, k_TGW
        return self.spread(q_THW.transpose(0, 1).unsqueeze(0))[0].transpose(0, 1), k_TGW

    def paged_heads(self: Any, q: torch.Tensor, k: torch.Tensor, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys after norms and rotary, token by token (T, heads, W)."""
        groups = self.kv_heads * self.pooled
        both = ((q, self.q_norm, self.query_heads), (k, self.k_norm, groups))
        q_THW, k_TGW = (self._normed(x, norm, heads)[0].transpose(0, 1) for x, norm, heads in both)
        if not self.rotary or positions is None:
            return q_THW, k_TGW
        step = Step.of(*positions)
        if self.head_width == self.head_dim:
            return step.turn(q_THW, k_TGW, step.table)
        # Every key and the queries that share it have pairs of their own.
        pairs_GP = self.own(self.pairs_GP)
        columns = torch.cat((pairs_GP, pairs_GP + step.table.shape[1] // 2), 1)
        table = step.table.index_select(1, columns.flatten()).view(-1, columns.shape[1])
        q_THW, k_TGW = (x.reshape(len(table), -1, self.head_width) for x in (q_THW, k_TGW))
        turned = step.turn(q_THW, k_TGW, table)
        return turned[0].view(-1, self.query_heads, self.head_width), turned[1].view(-1, groups, self.head_width)


def by_group(x_THW: torch.Tensor, matrices_GWK: torch.Tensor) -> torch.Tensor:
    """Every head's numbers times the matrix of its group (T, H, K); heads of a group are neighbours."""
    groups, width, out = matrices_GWK.shape
    tokens = len(x_THW)
    if groups == 1:
        return (x_THW.reshape(-1, width) @ matrices_GWK[0]).view(tokens, -1, out)
    if not torch.compiler.is_compiling() and x_THW.device.type == "cpu" and tokens > FEW:
        found = x_THW.new_empty(tokens, x_THW.shape[1], out)
        for head, (rows, own) in enumerate(zip(x_THW.unbind(1), found.unbind(1), strict=True)):
            torch.mm(rows, matrices_GWK[head * groups // x_THW.shape[1]], out=own)
        return found
    x_GThW = x_THW.unflatten(1, (groups, -1)).transpose(0, 1)
    x_GThK = torch.bmm(x_GThW.reshape(groups, -1, width), matrices_GWK).view(groups, tokens, -1, out)
    return x_GThK.transpose(0, 1).reshape(tokens, -1, out)


class Step:
    """Rotary positions of the tokens that run through the model at once. All layers share it: the first makes it."""

    last: Any = None

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = cos.shape[-1] // 2
        self.cos, self.table = cos, torch.cat((cos[0, :, :half], sin[0, :, :half]), 1)
        self.places: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Step:
        """The step with these cosines: all layers are handed the same tensor."""
        if torch.compiler.is_compiling():
            return cls(cos, sin)
        if cls.last is None or cls.last.cos is not cos:
            cls.last = cls(cos, sin)
        found: Step = cls.last
        return found

    def places_of(self, table: torch.Tensor) -> torch.Tensor:
        """The number of every row of a table."""
        if torch.compiler.is_compiling():  # which may not look at how many there are
            return torch.arange(len(table))
        if len(table) not in self.places:
            self.places[len(table)] = torch.arange(len(table))
        return self.places[len(table)]

    def turn(self, q_THW: torch.Tensor, k_TGW: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate pairs of coordinates, j and j + P; on a CPU in place, by the engine's own operation."""
        known = getattr(torch.ops._C, "rotary_embedding", None) if q_THW.device.type == "cpu" else None
        if known is not None:
            known(self.places_of(table), q_THW.flatten(1), k_TGW.flatten(1), q_THW.shape[2], table, True)
            return q_THW, k_TGW
        cos, sin = (part.unsqueeze(1) for part in table.chunk(2, 1))
        half = cos.shape[-1]

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second, still = x.tensor_split((half, 2 * half), dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin, still), -1)

        return turned(q_THW), turned(k_TGW)


@functools.cache
def served(attention: Any) -> Any:
    """The class of an attention whose cache an engine owns."""
    return type(f"Paged{attention.__name__}", (Paged, attention), {"__module__": __name__, "__doc__": Paged.__doc__})


def eager(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any, scaling: float,
    dropout: float = 0.0, softcap: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain attention, in the stock order of operations to the last bit."""
    if module.num_key_value_groups > 1:
        k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), weights


def added(mask: Any, q: torch.Tensor, k: torch.Tensor, causal: bool) -> Any:
    """The mask that plain attention adds, for a mask made for sdpa: true where a key is seen, or None if causal."""
    if mask is None and causal and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)


def right_with_masks(q: torch.Tensor) -> AbstractContextManager[None]:
    """No attention by cuDNN within a block: on some GPUs it scores places behind the last one where there is a mask.

    torch prefers it for numbers of 16 bits on Hopper and Blackwell (pytorch issue 196678).
    """
    if not q.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
