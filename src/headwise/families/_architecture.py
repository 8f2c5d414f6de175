"""A stock architecture as data: its classes in transformers, and where its layers keep their parts."""

from dataclasses import dataclass, field, fields
from typing import Any

import transformers

from headwise.runtime.modeling_headwise import Anatomy, tailored

CAUSAL, BARE, SEQ2SEQ = "AutoModelForCausalLM", "AutoModel", "AutoModelForSeq2SeqLM"
MASKED, CLASSIFIER = "AutoModelForMaskedLM", "AutoModelForSequenceClassification"
IMAGE_CLASSIFIER, SPEECH = "AutoModelForImageClassification", "AutoModelForSpeechSeq2Seq"


@dataclass(frozen=True, kw_only=True)
class Architecture(Anatomy):
    """What a family says about one model_type. A saved model carries the `Anatomy` in it, not the rest."""

    stem: str  # of its class names: "Llama" of LlamaForCausalLM
    heads: dict[str, str] = field(default_factory=lambda: {CAUSAL: "ForCausalLM"})  # Auto class -> end of a class name
    bare: str = "Model"  # end of the class without a head; empty where that is another model
    config: str = ""  # whole name of the configuration class, where it is not stem + Config
    activation: str = "mlp.act_fn"  # from a layer
    qkv_bias: bool = False  # queries, keys and values always have biases, whatever the configuration says
    normed: str = ""  # queries and keys are normed: by "head", or "all" heads together
    stream_norms: int = 2  # of a layer

    @property
    def output_at(self) -> str:
        """Where the output projection of attention is, from a layer."""
        return self.output or f"{self.attention}.o_proj"

    def stock_places(self) -> dict[str, tuple[str, ...]]:
        """Part of a stock tensor's name -> of ours: several where stock code fuses them."""
        at, ways = f".{self.attention}.", {part: self.names.get(part, "").split("|") for part in "qkvo"}
        found: dict[str, tuple[str, ...]] = {}
        for part, places in ways.items():
            for place in filter(lambda place: place not in ("", f"{part}_proj"), places):
                found[f"{at}{place}."] = (*found.get(f"{at}{place}.", ()), f"{at}{part}_proj.")
        if mlp := self.fused_mlp:
            at = f".{mlp['at']}."
            found[f"{at}{mlp['inner']}."] = (f"{at}gate_proj.", f"{at}up_proj.")
            found[f"{at}{mlp['down']}."] = (f"{at}down_proj.",)
        return {theirs: ours for theirs, ours in found.items() if ours != (theirs,)}

    def to_json(self) -> dict[str, Any]:
        """What a saved model carries: its `Anatomy`, as far as it differs from the defaults."""
        found = {place.name: getattr(self, place.name) for place in fields(Anatomy)}
        return {name: value for name, value in found.items() if value != getattr(Anatomy(), name)}

    def stock_classes(self) -> dict[str, Any]:
        """Auto class -> stock class of transformers: `AutoConfig`, `AutoModel` and one per head."""
        ends = {**({BARE: self.bare} if self.bare else {}), **self.heads}
        names = {"AutoConfig": self.config or f"{self.stem}Config"}
        names |= {auto: self.stem + end for auto, end in ends.items()}
        return {auto: getattr(transformers, name) for auto, name in names.items()}

    def tailored_classes(self, kind: str) -> dict[str, Any]:
        """Auto class -> our class, for the model_type `kind`."""
        return {auto: tailored(stock, kind) for auto, stock in self.stock_classes().items()}
