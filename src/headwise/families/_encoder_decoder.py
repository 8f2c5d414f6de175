"""What encoder-decoders share: one flat list of layers over two stacks, and rows that hold an input and an output.

The layers are those of the encoder, then for every block of the decoder two: attention to itself, and attention to the
encoder's output with the MLP. A row is the tokens of the input, a marker, and the tokens that the decoder reads. Its
stream is that of the input followed by that of the output: layers of the encoder change the first, all others the
second, and cross layers read what the encoder made of the input.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from headwise.data import GIVEN, NOTHING, marks_of
from headwise.errors import ModelError
from headwise.families._architecture import SEQ2SEQ
from headwise.families._config import grain_of
from headwise.families._family import Block, Captured, Family, Tensors
from headwise.families._streams import stream_of
from headwise.runtime.modeling_headwise import part_at
from headwise.types import ROLES, Grain, LayerShape

LAYER: dict[str, Any] = dict(  # the parts of our layers, and what all stacks have in common
    heads={SEQ2SEQ: "ForConditionalGeneration"},
    attention="attention",
    mlp_in=("gate_proj", "up_proj"),
    mlp_out="wo",
)
MLP = {"up_proj": "fc1", "wo": "fc2", "mlp_norm": "final_layer_norm"}
BART: dict[str, Any] = dict(  # as BART names its parts, and Whisper
    **LAYER,
    names={"o": "out_proj", "dropout": "dropout"},
    roles={
        "encoder": {"attention": "self_attn", "attention_norm": "self_attn_layer_norm", **MLP},
        "self": {"attention": "self_attn", "attention_norm": "self_attn_layer_norm"},
        "cross": {"attention": "encoder_attn", "attention_norm": "encoder_attn_layer_norm", **MLP},
    },
    handed=("encoder_hidden_states",),
    settings={"activation": "activation_function", "dropout": "dropout", "inner_dropout": "activation_dropout"},
)


class EncoderDecoder(Family):
    """A model that reads a text as a whole and writes another one token by token."""

    counts: ClassVar[tuple[str, str]]  # what the configuration calls the numbers of layers of encoder and decoder
    memory: ClassVar[str] = ""  # what the encoder's output goes through before the decoder sees it, from the body
    usual = dict(vocab_size=97, d_model=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)

    def sizes(self, config: Any) -> dict[str, tuple[int, int, int]]:
        """Heads, their dimension and the width of the MLP in the stock layers of `encoder` and `decoder`."""
        heads = {name: getattr(config, f"{name}_attention_heads") for name in ("encoder", "decoder")}
        return {
            name: (count, config.d_model // count, getattr(config, f"{name}_ffn_dim")) for name, count in heads.items()
        }

    def grain(self, config: Any) -> Grain:
        """Which sizes are legal: the same in both stacks."""
        _, dims, widths = zip(*self.sizes(config).values(), strict=True)
        return replace(grain_of(min(dims), min(widths), pairs=False, folds=self.folds), portable=())

    def stock_layers(self, config: Any) -> tuple[LayerShape, ...]:
        """The layers before any cut: those of the encoder, then two for every block of the decoder."""
        sizes = self.sizes(config)

        def layer(role: str) -> LayerShape:
            heads, dim, width = sizes["encoder" if role == "encoder" else "decoder"]
            return LayerShape(heads, heads, dim, dim, 0 if role == "self" else width, dim, role)

        first, second = (int(getattr(config, name)) for name in self.counts)
        return (layer("encoder"),) * first + (layer("self"), layer("cross")) * second

    def may_go(self, layers: Sequence[LayerShape]) -> bool:
        """One layer of each role is needed: the cache counts tokens in the first that attends to its own stack."""
        return {layer.role for layer in layers if not layer.gone} == set(ROLES)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """All layers of a tailored model, the encoder's first."""
        return [*self._stack(model, "encoder"), *self._stack(model, "decoder")]

    def _stack(self, model: nn.Module, name: str) -> nn.ModuleList:
        found: nn.ModuleList = getattr(self.body(model).get_submodule(name), self.anatomy(model.config).layers)
        return found

    def _list(self, model: nn.Module, index: int = 0) -> nn.ModuleList:
        return self._stack(model, "encoder" if index < len(self._stack(model, "encoder")) else "decoder")

    def _place(self, config: Any, index: int) -> tuple[str, int]:
        """The stack of a layer, and its number there."""
        first = sum(layer.role == "encoder" for layer in self.shape_of(config).layers)
        return ("encoder", index) if index < first else ("decoder", index - first)

    def _prefix(self, config: Any, index: int) -> str:
        anatomy, (stack, number) = self.anatomy(config), self._place(config, index)
        return f"{anatomy.body_at}.{stack}.{anatomy.layers}.{number}.".removeprefix(".")

    def _shortened(self, settings: dict[str, Any], layers: tuple[LayerShape, ...]) -> dict[str, Any]:
        """A configuration for the layers that are not gone; one that lost halves has as many blocks as it needs."""
        if not self.may_go(layers):
            raise ModelError(f"{self.name} models need a layer of each kind: {', '.join(ROLES)}; keep one of each.")
        left = [layer.role for layer in layers if not layer.gone]
        blocks = max(left.count("self"), left.count("cross"))
        return {**settings, **dict(zip(self.counts, (left.count("encoder"), blocks), strict=True))}

    def _renumbered(self, like: nn.Module, tensors: Tensors, kept: list[int]) -> Tensors:
        """The state dictionary without the layers that are gone. A stack's table of positions stays with its first."""
        config: Any = like.config
        places: dict[str, str | None] = {}
        first: dict[str, int] = {}
        for index in range(len(self.shape_of(config).layers)):
            prefix = self._prefix(config, index)
            root = prefix.rstrip(".").rpartition(".")[0]
            first.setdefault(root, 0)
            places[prefix] = f"{root}.{first[root]}." if index in kept else None
            first[root] += index in kept
        found: Tensors = {}
        for name, tensor in tensors.items():
            prefix = next((prefix for prefix in places if name.startswith(prefix)), "")
            root, rest = prefix.rstrip(".").rpartition(".")[0], name.removeprefix(prefix)
            place = f"{root}.0." if prefix and rest.startswith("positions.") else places.get(prefix, "")
            if place is not None:
                found[place + rest] = tensor
        return found

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary under the names of our layers, with a decoder's blocks in two."""
        anatomy = self.anatomy(config)
        places: dict[str, str] = {}
        for index, layer in enumerate(self.shape_of(config).layers):
            stack, number = self._place(config, index)
            block = number if stack == "encoder" else number // 2
            root = f"{anatomy.body_at}.{stack}.{anatomy.layers}.{block}.".removeprefix(".")
            ours = self._prefix(config, index)
            places |= {
                f"{root}{place}.": f"{ours}{part}."
                for part, path in anatomy.roles[layer.role].items()
                for place in path.split("|")
            }
        renamed = {anatomy.names.get(part, f"{part}_proj"): f"{part}_proj" for part in "qkvo"}
        found: Tensors = {}
        for name, tensor in tensors.items():
            theirs = next((place for place in places if name.startswith(place)), "")
            part, dot, rest = name.removeprefix(theirs).partition(".")
            inside = f"{renamed.get(part, part)}{dot}{rest}" if theirs else name
            found[places.get(theirs, "") + inside] = tensor
        return found

    def block(self, layer: nn.Module) -> Block:
        """The parts of one layer of a tailored model."""
        some: Any = layer
        norms = {"attention": some.attention_norm, "mlp": getattr(some, "mlp_norm", None)}
        inner = tuple(getattr(some, name) for name in ("gate_proj", "up_proj") if hasattr(some, name))
        where = "end" if some.post_norm else "norm"
        return Block(
            attention=some.attention,
            output=some.attention.o_proj,
            inner=inner,
            down=getattr(some, "wo", None),
            activation=some.activation,
            role=some.role,
            **{f"{part}_{where}": norm for part, norm in norms.items()},
        )

    # Streams.

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Input and output of rows that share the lengths of both."""
        first = inputs_of(rows)
        return {"input_ids": rows[:, :first].contiguous(), "decoder_input_ids": rows[:, first + 1 :].contiguous()}

    def unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one length, without the places behind their end."""
        return rows[:, marks_of(rows)[0] != NOTHING]

    def read_tokens(self, rows: torch.Tensor) -> int:
        """Those of the input."""
        return inputs_of(rows)

    def answering(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of the last stream that answers come from: those of the output."""
        return stream[:, inputs_of(rows) :]

    def example(self, config: Any, count: int = 2, length: int = 20) -> torch.Tensor:
        """Rows that any model of the family reads, with an input and an output of one length."""
        first, second = super().example(config, 2 * count, length).split(count)
        second[:, 0] = config.decoder_start_token_id or 0  # as every output begins
        return torch.cat((first, torch.full((count, 1), GIVEN), second), 1)

    def excerpt(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The first row alone, with no more than so many tokens: half of them of the input, half of the output."""
        row = self.unpadded(rows[:1])
        first = inputs_of(row)
        parts = (row[:, :first][:, : most // 2], row[:, first : first + 1], row[:, first + 1 :][:, : most // 2])
        return torch.cat(parts, 1)

    def prompt(self, row: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What a model is given to write, and how many tokens come before what it wrote: that which it begins with."""
        return row[None, : inputs_of(row[None])], 1

    def first_step(self, rows: torch.Tensor) -> dict[str, Any]:
        """How a model reads an input and begins to write."""
        found = self.arguments(rows)
        return {**found, "decoder_input_ids": found["decoder_input_ids"][:, :1]}

    def next_step(self, token: torch.Tensor, out: Any) -> dict[str, Any]:
        """How it writes the next token, after `out`."""
        return {"decoder_input_ids": token, "encoder_outputs": (out.encoder_last_hidden_state,)}

    @contextmanager
    def _from(self, model: nn.Module, stream: torch.Tensor | None, ids: torch.Tensor) -> Iterator[None]:
        """The first layers of both stacks read a stream, if one is given, in place of what the embeddings give them."""
        if stream is None:
            yield
            return
        first = inputs_of(ids)
        parts = {"encoder": stream[:, :first], "decoder": stream[:, first:]}
        one, other = (
            self._stack(model, name)[0].register_forward_pre_hook(lambda _m, args, part=part: (part, *args[1:]))
            for name, part in parts.items()
        )
        with one, other:
            yield

    @torch.no_grad()
    def embed(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """The residual streams before the first layers of both stacks."""
        found: list[torch.Tensor] = []

        def look(_layer: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])
            raise Captured

        for name, (part, values) in zip(("encoder", "decoder"), self.arguments(ids).items(), strict=True):
            with self._stack(model, name)[0].register_forward_pre_hook(look), suppress(Captured):
                self.body(model).get_submodule(name)(**{part.removeprefix("decoder_"): values, "use_cache": False})
        return torch.cat(found, dim=1)

    @torch.no_grad()
    def layer_contexts(self, model: nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
        """Arguments of layers for rows of these lengths: the mask of the output, and the positions of all tokens."""
        return self.contexts(model, [ids])[0]

    @torch.no_grad()
    def contexts(self, model: nn.Module, parts: Sequence[torch.Tensor]) -> list[list[dict[str, Any]]]:
        """`layer_contexts` for batches of rows, each of its own lengths; what only depends on one is made once."""
        arguments = functools.cache(lambda role, length: self._layer_arguments(model, role, length))
        roles = [str(layer.role) for layer in self.layers(model)]
        found = []
        for part in parts:
            first = inputs_of(part)
            second = part.shape[1] - first - 1
            shared = {"inputs": first, "memory_norm": part_at(self.body(model), self.memory)}
            found.append([{**shared, **arguments(role, first if role == "encoder" else second)} for role in roles])
        return found

    def _layer_arguments(self, model: nn.Module, role: str, length: int) -> dict[str, Any]:
        """The mask and the position bias of layers with this role, for texts of this length."""
        stack = self._stack(model, "encoder" if role == "encoder" else "decoder")
        given: dict[str, Any] = {"attention_mask": None}
        if role == "self":
            lowest = torch.full((length, length), torch.finfo(model.dtype).min, device=model.device)
            given["attention_mask"] = lowest.triu(1)[None, None]
        if role != "cross" and (positions := getattr(stack[0], "positions", None)) is not None:
            given["position_bias"] = positions(length, length)
        return given

    def run_layer(self, model: nn.Module, index: int, stream: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        """One layer on a residual stream."""
        layer = self.layers(model)[index]
        block, memory = self.block(layer), stream[:, : context["inputs"]]
        norm = context["memory_norm"]
        given = {"encoder_hidden_states": memory if norm is None else norm(memory)} if block.role == "cross" else {}
        given |= {name: context[name] for name in ("attention_mask", "position_bias") if name in context}
        return block.joined(stream, stream_of(layer(block.own(stream, context), **given)), context)


def inputs_of(rows: torch.Tensor) -> int:
    """How many tokens of input rows have, which they share."""
    return int((marks_of(rows)[0] < NOTHING).nonzero()[0])
