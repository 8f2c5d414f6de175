"""Transformers whose layers have their own sizes. Needs transformers and torch only; lies beside every tailored model.

A layer may have its own number of query and key/value heads, its own query/key and value dimensions, its own kept
rotary pairs for every key/value head, a projection of queries and keys after rotary, and its own MLP width.
Written by Headwise (Apache-2.0). Shape suffixes: B batch, T tokens, H query heads, G key/value heads,
W width of queries and keys before projection, K after it, V width of values, P rotary pairs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CAUSAL, BARE = "AutoModelForCausalLM", "AutoModel"
MASKED, CLASSIFIER = "AutoModelForMaskedLM", "AutoModelForSequenceClassification"


@dataclass(frozen=True)
class Anatomy:
    """Where a stock architecture keeps its parts; paths of parts are below a layer.

    Whatever a stock layer fuses (queries with keys and values, gate with up) is kept apart here, under our names.
    """

    module: str  # of transformers.models
    stem: str  # of its class names
    heads: dict[str, str]  # Auto class -> end of the class with that head
    body_at: str = "model"  # where the body is in a class with a head
    layers: str = "layers"  # below the body
    attention: str = "self_attn"
    output: str = "self_attn.o_proj"  # output projection of attention
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    fused_mlp: str = ""  # where an MLP is whose own code wants gate and up in one
    config: str = ""  # where its name is not stem + Config


ANATOMY: dict[str, Anatomy] = {  # stock model_type -> anatomy
    name: Anatomy(name, stem, {CAUSAL: "ForCausalLM"})
    for name, stem in {
        "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
        "olmo2": "Olmo2", "gemma": "Gemma", "gemma2": "Gemma2",
    }.items()
}  # fmt: skip
ANATOMY["phi3"] = Anatomy("phi3", "Phi3", {CAUSAL: "ForCausalLM"}, fused_mlp="mlp")
ANATOMY["gemma3_text"] = Anatomy(
    "gemma3", "Gemma3", {"AutoModel": "TextModel", CAUSAL: "ForCausalLM"}, config="Gemma3TextConfig"
)
ANATOMY["gpt2"] = Anatomy(
    "gpt2", "GPT2", {CAUSAL: "LMHeadModel"}, "transformer", "h", "attn", "attn.o_proj", ("mlp.c_fc",), "mlp.c_proj"
)
ANATOMY["opt"] = Anatomy("opt", "OPT", {CAUSAL: "ForCausalLM"}, layers="decoder.layers", mlp_in=("fc1",), mlp_out="fc2")
ANATOMY["gpt_neox"] = Anatomy(
    "gpt_neox", "GPTNeoX", {CAUSAL: "ForCausalLM"}, "gpt_neox", "layers", "attention", "attention.o_proj",
    ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h",
)  # fmt: skip
ENCODER_HEADS = {MASKED: "ForMaskedLM", CLASSIFIER: "ForSequenceClassification"}
for _name, _stem in {"bert": "Bert", "roberta": "Roberta"}.items():
    ANATOMY[_name] = Anatomy(
        _name, _stem, ENCODER_HEADS, _name, "encoder.layer", "attention.self", "attention.output.dense",
        ("intermediate.dense",), "output.dense",
    )  # fmt: skip
ANATOMY["distilbert"] = Anatomy(
    "distilbert", "DistilBert", ENCODER_HEADS, "distilbert", "transformer.layer", "attention", "attention.o_proj",
    ("ffn.lin1",), "ffn.lin2",
)  # fmt: skip
SCALE_QUERIES = ("opt",)  # these scale queries before the product with keys, not the product
SMALL_OUTPUTS = ("gpt2",)  # these begin with smaller output projections the more layers there are


def _eager(
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


def _added(mask: Any, q: torch.Tensor, k: torch.Tensor, causal: bool) -> Any:
    """The mask that plain attention adds, for one made for sdpa: true where a key is seen, or none if that is plain."""
    if mask is None and causal and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs that the tables cover; coordinate j pairs with j + half. What lies beyond stays as it is."""
    width = cos.shape[-1]
    turning, still = x[..., :width], x[..., width:]
    half = width // 2
    turned = ((turning * cos) + (torch.cat((-turning[..., half:], turning[..., :half]), dim=-1) * sin)).to(x.dtype)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


class SoftmaxAttention(nn.Module):
    """Softmax attention by whatever kernel the configuration names. A module of its own, so that hooks can look in."""

    def __init__(self, stock: nn.Module, sharing: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = stock.config, getattr(stock, "layer_idx", None), stock.is_causal
        self.scaling = stock.scaling  # stays the original's
        dropout = next(getattr(stock, n) for n in ("attention_dropout", "attn_dropout", "dropout") if hasattr(stock, n))
        self.attention_dropout = float(getattr(dropout, "p", dropout))
        self.scales_queries = stock.config.model_type.removeprefix("headwise_") in SCALE_QUERIES
        self.num_key_value_groups = sharing  # query heads that share one key/value head
        self.softcap = stock.config.attn_logit_softcapping if stock.config.model_type.endswith("gemma2") else None
        self.sliding_window = getattr(stock, "sliding_window", None)
        if stock.config.model_type.endswith(("mistral", "phi3")):  # these keep it in the configuration alone
            self.sliding_window = getattr(stock.config, "sliding_window", None)

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads' outputs (B, T, H, V) before the output projection, and the weights if the kernel gives them."""
        name = self.config._attn_implementation
        qk_dim, v_dim = q_BHTK.shape[-1], v_BGTV.shape[-1]
        if name == "sdpa" and self.softcap is not None:  # that kernel knows no cap
            name, attention_mask = "eager", _added(attention_mask, q_BHTK, k_BGTK, self.is_causal)
        # No fused CPU kernel takes unequal dimensions, and on CUDA the fast one with a gradient does not either.
        if name == "sdpa" and qk_dim != v_dim and (q_BHTK.device.type == "cpu" or self.training):
            if q_BHTK.shape[2] == 1 and not self.training:
                return self._one_token(q_BHTK, k_BGTK, v_BGTV, attention_mask), None
            # Zeros at the end of the smaller dimension change nothing.
            width = max(qk_dim, v_dim)
            q_BHTK, k_BGTK, v_BGTV = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q_BHTK, k_BGTK, v_BGTV))
        scaling: Any = self.scaling
        if self.scales_queries:
            q_BHTK, scaling = q_BHTK * scaling, 1.0
        more = {} if self.softcap is None else {"softcap": self.softcap}
        z_BTHV, weights = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager)(
            self,
            q_BHTK,
            k_BGTK,
            v_BGTV,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=scaling,
            sliding_window=self.sliding_window,
            **more,
            **kwargs,
        )
        return z_BTHV[..., :v_dim], weights

    def _one_token(self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTV: torch.Tensor, mask: Any) -> torch.Tensor:
        """One new token against the cache, without repeating keys for the query heads that share them."""
        batch, groups = k_BGTK.shape[:2]
        logits = (q_BHTK.view(batch, groups, self.num_key_value_groups, -1) @ k_BGTK.mT) * self.scaling
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if mask is not None:  # (B, 1, 1, T): the same for all heads
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        return (logits.softmax(-1) @ v_BGTV).view(batch, 1, groups * self.num_key_value_groups, -1)


def _first(stock: nn.Module, *names: str) -> Any:
    """The first of these attributes that there is."""
    return next((getattr(stock, name) for name in names if getattr(stock, name, None) is not None), None)


class TailoredAttention(nn.Module):
    """Attention with its own sizes; a drop-in for the stock attention of a layer.

    `stock` is the attention that it replaces, stock or tailored: everything but the sizes is taken from there.
    """

    def __init__(self, stock: nn.Module, sizes: dict[str, int]) -> None:
        super().__init__()
        self.layer_idx = getattr(stock, "layer_idx", None)  # encoders without a cache may have none
        self.head_dim = _first(stock, "head_dim", "head_size", "attention_head_size")
        self.query_heads, self.kv_heads = sizes["query_heads"], sizes["kv_heads"]
        self.qk_width, self.qk_dim, self.v_dim = sizes["qk_width"], sizes["qk_dim"], sizes["v_dim"]
        hidden = _first(stock, "hidden", "embed_dim") or _first(stock, "config").hidden_size
        self.hidden = hidden
        made = _first(stock, "q_proj", "c_attn", "query_key_value", "qkv_proj", "query", "q_lin")
        out = _first(stock, "o_proj", "c_proj", "out_proj", "dense", "out_lin")
        bias = made.bias is not None
        self.q_proj = nn.Linear(hidden, self.query_heads * self.qk_width, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.qk_width, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.v_dim, bias=bias)
        if out is not None:  # some layers keep the output projection elsewhere
            self.o_proj = nn.Linear(self.query_heads * self.v_dim, hidden, bias=out.bias is not None)
        self.attend = SoftmaxAttention(getattr(stock, "attend", stock), self.query_heads // self.kv_heads)
        self.rotary = getattr(stock, "rotary", None)  # coordinates that turn with the position
        if self.rotary is None:
            turning = getattr(stock.config, "rope_parameters", None) is not None and getattr(stock, "use_rope", True)
            factor = stock.config.rope_parameters.get("partial_rotary_factor", 1.0) if turning else 0.0
            self.rotary = int(self.head_dim * factor)
        self.q_norm, self.k_norm = getattr(stock, "q_norm", None), getattr(stock, "k_norm", None)
        self.resid_dropout = getattr(stock, "resid_dropout", None)
        if self.rotary and self.qk_width < self.head_dim:
            kept = torch.arange(pairs := self.qk_width // 2) * (self.rotary // 2) // pairs  # as a smaller stock head turns
            self.register_buffer("pairs_GP", kept.expand(self.kv_heads, -1).clone())
        if self.qk_dim < self.qk_width:
            self.q_down_GWK = nn.Parameter(torch.zeros(self.kv_heads, self.qk_width, self.qk_dim))
            self.k_down_GWK = nn.Parameter(torch.zeros(self.kv_heads, self.qk_width, self.qk_dim))

    def heads(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys after norms and rotary, before projection, and values."""
        rows = hidden.shape[:-1]
        q_BHTW = self._normed(self.q_proj(hidden), self.q_norm, self.query_heads)
        k_BGTW = self._normed(self.k_proj(hidden), self.k_norm, self.kv_heads)
        v_BGTV = self.v_proj(hidden).view(*rows, self.kv_heads, self.v_dim).transpose(1, 2)
        if not self.rotary or position_embeddings is None:
            return q_BHTW, k_BGTW, v_BGTV
        cos, sin = position_embeddings
        if self.qk_width == self.head_dim:
            cos_q = cos_k = cos.unsqueeze(1)
            sin_q = sin_k = sin.unsqueeze(1)
        else:
            cos_k, sin_k = (self._kept(table) for table in (cos, sin))
            cos_q, sin_q = (t.repeat_interleave(self.query_heads // self.kv_heads, dim=1) for t in (cos_k, sin_k))
        return _turn(q_BHTW, cos_q, sin_q), _turn(k_BGTW, cos_k, sin_k), v_BGTV

    def _normed(self, x: torch.Tensor, norm: nn.Module | None, heads: int) -> torch.Tensor:
        """Heads apart (B, heads, T, W); a norm of queries or keys is over a head or over all of them together."""
        if norm is not None and norm.weight.numel() > self.qk_width:
            x, norm = norm(x), None
        x = x.view(*x.shape[:-1], heads, self.qk_width)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def _kept(self, table_BTW: torch.Tensor) -> torch.Tensor:
        """The columns of the stock rotary table that each key/value head kept, twice (both halves of a pair)."""
        kept_BTGP = table_BTW[..., self.pairs_GP]
        return torch.cat((kept_BTGP, kept_BTGP), dim=-1).transpose(1, 2)

    def project(self, q_BHTW: torch.Tensor, k_BGTW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as the softmax and the cache see them."""
        if self.qk_dim == self.qk_width:
            return q_BHTW, k_BGTW
        batch, heads, tokens, width = q_BHTW.shape
        grouped = q_BHTW.reshape(batch, self.kv_heads, heads // self.kv_heads * tokens, width)
        q_BHTK = (grouped @ self.q_down_GWK).view(batch, heads, tokens, self.qk_dim)
        return q_BHTK, k_BGTW @ self.k_down_GWK

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        encoder_hidden_states: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the stock attention's."""
        q, k, v = self.heads(hidden_states, position_embeddings)
        q, k = self.project(q, k)
        cache = past_key_values if past_key_values is not None else layer_past
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        z, weights = self.attend(q, k, v, attention_mask, **kwargs)
        z = z.flatten(2)
        if hasattr(self, "o_proj"):
            z = self.o_proj(z)
        return (z if self.resid_dropout is None else self.resid_dropout(z)), weights


class GatedMLP(nn.Module):
    """A gated MLP with gate and up apart, in place of one that fuses them; `tailor_layer` sets its projections."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.gate_proj = self.up_proj = stock.gate_up_proj
        self.down_proj, self.act_fn = stock.down_proj, stock.activation_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the fused one's."""
        out: torch.Tensor = self.down_proj(self.up_proj(hidden_states) * self.act_fn(self.gate_proj(hidden_states)))
        return out


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    """Set a module below a layer by its path."""
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent), name, module)


def tailor_layer(layer: nn.Module, anatomy: Anatomy, sizes: dict[str, int]) -> None:
    """Give a stock (or tailored) layer its own sizes, with new weights."""
    attention = TailoredAttention(layer.get_submodule(anatomy.attention), sizes)
    hidden, width = attention.hidden, sizes["mlp_width"]
    if not hasattr(attention, "o_proj"):
        bias = layer.get_submodule(anatomy.output).bias is not None
        _put(layer, anatomy.output, nn.Linear(sizes["query_heads"] * sizes["v_dim"], hidden, bias=bias))
    _put(layer, anatomy.attention, attention)
    if anatomy.fused_mlp and not isinstance(fused := layer.get_submodule(anatomy.fused_mlp), GatedMLP):
        _put(layer, anatomy.fused_mlp, GatedMLP(fused))
    for path, columns, rows in (*((p, hidden, width) for p in anatomy.mlp_in), (anatomy.mlp_out, width, hidden)):
        _put(layer, path, nn.Linear(columns, rows, bias=layer.get_submodule(path).bias is not None))


def _tailor(model: nn.Module, body: nn.Module, kind: str) -> None:
    """Give every layer the sizes that the configuration names. Runs before weights are loaded."""
    anatomy = ANATOMY[kind]
    layers: Any = body.get_submodule(anatomy.layers)
    kept = model.config.headwise.get("kept", range(len(layers)))
    for index, (layer, sizes) in enumerate(zip(layers, model.config.headwise["layers"], strict=True)):
        tailor_layer(layer, anatomy, sizes)
        if getattr(model.config, "scale_attn_by_inverse_layer_idx", False):  # by the number that it had in the source
            layer.get_submodule(anatomy.attention).attend.scaling *= (index + 1) / (kept[index] + 1)
    if not next(layers.parameters()).is_meta:
        _begin(body, layers, kind)
    owner = body.get_submodule(anatomy.layers.rpartition(".")[0])
    _let_record(owner if isinstance(owner, modeling_utils.PreTrainedModel) else body)


@torch.no_grad()
def _begin(body: Any, layers: Any, kind: str) -> None:
    """Random weights, drawn as the stock architecture draws them; weights from a file come afterwards."""
    layers.apply(body._init_weights)  # what is inside goes first, so that a stock MLP has the last word on its output
    for attention in (module for module in layers.modules() if isinstance(module, TailoredAttention)):
        if kind in SMALL_OUTPUTS:
            attention.o_proj.weight /= (2 * len(layers)) ** 0.5
        if attention.qk_dim < attention.qk_width:  # queries and keys keep their size
            for down_GWK in (attention.q_down_GWK, attention.k_down_GWK):
                down_GWK.normal_(std=attention.qk_width**-0.5)


def _let_record(body: nn.Module) -> None:
    """Let `output_attentions=True` find our attention: transformers looks it up by the class of the body."""
    recorded = {**(getattr(body, "_can_record_outputs", None) or {}), "attentions": TailoredAttention}
    registry = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        name = f"Tailored{type(body).__name__}"
        body.__class__ = type(name, (type(body),), {"__module__": __name__, "_can_record_outputs": recorded})
        registry[str(body.__class__)] = recorded


def stock_classes(kind: str) -> dict[str, Any]:
    """The stock classes of a model_type: `AutoConfig`, `AutoModel` and one per head."""
    anatomy = ANATOMY[kind]
    modules = [importlib.import_module(f"transformers.models.{anatomy.module}.{part}_{anatomy.module}")
               for part in ("configuration", "modeling")]  # fmt: skip
    ends = {"AutoModel": "Model", **anatomy.heads}
    found = {"AutoConfig": getattr(modules[0], anatomy.config or f"{anatomy.stem}Config")}
    return {**found, **{auto: getattr(modules[1], anatomy.stem + end) for auto, end in ends.items()}}


_made: dict[str, dict[str, Any]] = {}


def classes(kind: str) -> dict[str, Any]:
    """The tailored classes of a model_type, under the same names; made once."""
    if kind not in _made:
        stock = stock_classes(kind)
        field = {"__annotations__": {"headwise": dict[str, Any] | None}, "headwise": None}
        config = _subclass(stock["AutoConfig"], {"model_type": f"headwise_{kind}", **field})
        _made[kind] = {"AutoConfig": config}
        for auto, cls in stock.items():
            if auto != "AutoConfig":
                _made[kind][auto] = _subclass(cls, {"config_class": config, "__init__": _starter(kind, auto)})
        globals().update({cls.__name__: cls for cls in _made[kind].values()})
    return _made[kind]


def _subclass(stock: type, space: dict[str, Any]) -> type:
    name = f"Headwise{stock.__name__}"
    doc = f"{stock.__name__} with sizes per layer: `config.headwise['layers'][i]` holds them."
    return type(stock)(name, (stock,), {"__module__": __name__, "__doc__": doc, "__qualname__": name, **space})


def _starter(kind: str, auto: str) -> Any:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        super(_made[kind][auto], self).__init__(config, *args, **kwargs)
        body = self if auto == "AutoModel" else self.get_submodule(ANATOMY[kind].body_at)
        _tailor(self, body, kind)

    return __init__


def __getattr__(name: str) -> Any:
    """Tailored classes come into being when they are asked for: nothing of other architectures is imported."""
    for kind, anatomy in ANATOMY.items():
        if name.startswith(f"Headwise{anatomy.stem}"):
            found = {cls.__name__: cls for cls in classes(kind).values()}
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
