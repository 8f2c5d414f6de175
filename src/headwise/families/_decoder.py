"""Decoders: what those with rotary positions share with those of the first generations."""

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from headwise.errors import ModelError
from headwise.families._architecture import CAUSAL
from headwise.families._config import NOT_COPIED
from headwise.families._family import Family, Tensors
from headwise.families._tensors import fill


class Decoder(Family):
    """A model that reads and writes one text, and can leave as an ordinary architecture."""

    portable = True

    def stock_of(self, model: nn.Module, changes: dict[str, Any], tensors: Tensors) -> Any:
        """The stock model with changed settings that holds the tensors of a tailored one."""
        made = self.anatomy(model.config).stock_classes()
        settings = {k: v for k, v in model.config.to_dict().items() if k not in NOT_COPIED} | changes
        stock = made[CAUSAL](made["AutoConfig"](**settings)).to(model.dtype)
        missing, unexpected = fill(stock, self.together(tensors, model.config), assign=False)
        if unexpected or set(missing) - set(stock.all_tied_weights_keys):
            raise ModelError(f"this plan is not portable: stock code has no place for {sorted(unexpected)[:1]}.")
        stock.tie_weights()
        stock.generation_config = copy.deepcopy(model.generation_config)
        return stock.train(model.training)


class Plain(Decoder):
    """A decoder of the first generations: every head has its own keys and values, and the MLP has no gate.

    Stock code ties the head dimension to the hidden size: a portable model can only have its MLPs cut, all alike.
    """

    usual = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def portable_cuts(self, config: Any) -> tuple[str, ...]:
        """Stock code forces all other sizes."""
        return ("mlp",)

    def costs(self, config: Any) -> dict[str, Any]:
        """Fields of `ModelShape` that all such families share."""
        return dict(tied_embeddings=config.tie_word_embeddings, mlp_matrices=2)

    def to_stock(self, model: nn.Module) -> nn.Module:
        """The ordinary architecture that computes the same as a tailored model of which only the MLP was cut."""
        layers = self.shape_of(model.config).layers
        if any(layer != replace(self.stock_layer(model.config), mlp_width=layers[0].mlp_width) for layer in layers):
            raise ModelError(
                f"stock {self.name} code has one head dimension and one MLP width: a portable model can only have its "
                "MLPs cut, all alike, and this plan cuts more; leave out --portable, or allocate with it."
            )
        return self.stock_of(model, {self.width_setting: layers[0].mlp_width}, self.state_of(model))
