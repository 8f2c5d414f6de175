"""What a family's tensors are called: in stock code, in a tailored model, and in the cuts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import Architecture

Tensors = dict[str, torch.Tensor]
OWN = {  # our name of a tensor that no stock attention has -> where it is below the attention
    "q_down": "q_down_GWK", "k_down": "k_down_GWK", "v_up": "v_up_NVO", "pairs": "pairs_GP", "columns": "heads_H",
    "q_in": "q_proj.first.weight", "k_mean": "k_mean_GK", "k_gain": "k_gain_GK", "v_gain": "v_gain_GV",
}  # fmt: skip


class Naming:
    """Translates state dictionaries between stock code, tailored models and cuts."""

    def anatomy(self, config: Any) -> Architecture:
        """Where the parts are."""
        raise NotImplementedError

    def apart(self, tensors: Tensors, config: Any) -> Tensors:
        """A stock state dictionary under the names of the tailored model, with fused tensors taken apart."""
        places, found = self.anatomy(config).stock_places(), Tensors()
        for name, tensor in tensors.items():
            stock = next((place for place in places if place in name), None)
            if stock is None:
                found[name] = tensor
                continue
            ours = places[stock]
            pieces = [tensor] if len(ours) == 1 else [piece.clone() for piece in self.split(tensor, ours, config)]
            found |= {name.replace(stock, place): piece for place, piece in zip(ours, pieces, strict=True)}
        return found

    def together(self, tensors: Tensors, config: Any) -> Tensors:
        """A tailored state dictionary under stock names: what `apart` took apart, in one again."""
        found = dict(tensors)
        for stock, ours in self.anatomy(config).stock_places().items():
            for name in [name for name in found if ours[0] in name]:
                pieces = [found.pop(name.replace(ours[0], place)) for place in ours]
                found[name.replace(ours[0], stock)] = pieces[0] if len(ours) == 1 else self.join(pieces, config)
        return found

    def split(self, tensor: torch.Tensor, ours: tuple[str, ...], config: Any) -> Sequence[torch.Tensor]:
        """The parts of a fused tensor, under the names `ours`: one after the other, of one size."""
        return tensor.chunk(len(ours))

    def join(self, pieces: list[torch.Tensor], config: Any) -> torch.Tensor:
        """The opposite of `split`."""
        return torch.cat(pieces)

    def tensors(self, config: Any) -> dict[str, str]:
        """Our name of a layer's tensor -> where it is below the layer."""
        anatomy = self.anatomy(config)
        places = {name: f"{anatomy.attention}.{name}_proj" for name in "qkv"} | {"o": anatomy.output_at}
        places |= dict(zip(("gate", "up") if len(anatomy.mlp_in) > 1 else ("up",), anatomy.mlp_in, strict=True))
        places["down"] = anatomy.mlp_out
        found = {f"{ours}.{kind}": f"{place}.{kind}" for ours, place in places.items() for kind in ("weight", "bias")}
        return found | {ours: f"{anatomy.attention}.{place}" for ours, place in OWN.items()}

    def _prefix(self, config: Any, index: int) -> str:
        anatomy = self.anatomy(config)
        return f"{anatomy.body_at}.{anatomy.layers}.{index}.".removeprefix(".")

    def take_layer(self, tensors: Tensors, index: int, config: Any) -> Tensors:
        """Remove the tensors of a layer that cuts concern from a state dictionary and return them by our names."""
        places = {name: self._prefix(config, index) + place for name, place in self.tensors(config).items()}
        return {name: tensors.pop(place) for name, place in places.items() if place in tensors}

    def put_layer(self, tensors: Tensors, index: int, layer: Tensors, config: Any) -> None:
        """Add the tensors of a layer to a state dictionary."""
        places = self.tensors(config)
        for name, tensor in layer.items():
            tensors[self._prefix(config, index) + places[name]] = tensor

    def state_of(self, model: nn.Module, clone: bool = True) -> Tensors:
        """A model's tensors, copied unless `clone` is false, tied ones once."""
        tensors = {name: tensor.clone() if clone else tensor for name, tensor in model.state_dict().items()}
        for tied in getattr(model, "all_tied_weights_keys", None) or ():
            tensors.pop(tied, None)
        return tensors

    def _renumbered(self, like: nn.Module, tensors: Tensors, kept: list[int]) -> Tensors:
        """The state dictionary without the layers that are gone."""
        places = {self._prefix(like.config, old): self._prefix(like.config, new) for new, old in enumerate(kept)}
        every = self._prefix(like.config, 0).removesuffix("0.")
        found: Tensors = {}
        for name, tensor in tensors.items():
            if not name.startswith(every):
                found[name] = tensor
                continue
            prefix = every + name.removeprefix(every).partition(".")[0] + "."
            if prefix in places:
                found[places[prefix] + name.removeprefix(prefix)] = tensor
        return found


def set_format(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all that a model's file holds a number format, and nothing else.

    Buffers that no file holds, such as rotary frequencies, stay in full precision, as in a model that was loaded.
    """
    stored = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def fill(module: nn.Module, tensors: Tensors, assign: bool = True) -> tuple[list[str], list[str]]:
    """Load tensors by name; gives the names that are missing and those without a place. Other sizes are refused."""
    try:
        missing, unexpected = module.load_state_dict(tensors, assign=assign, strict=False)
    except RuntimeError as error:
        found = next((line for line in str(error).splitlines() if "size mismatch" in line), None)
        if found is None:
            raise
        raise ModelError(
            f"weights do not have the sizes of the configuration or plan ({found.strip()[:200]}); "
            "fetch the model's files again, or allocate again."
        ) from None
    return missing, unexpected
