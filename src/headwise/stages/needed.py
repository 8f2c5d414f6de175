"""How much memory a run takes, stage by stage, and how it makes do with what there is: estimated before work begins."""

from typing import Any, NamedTuple

from headwise import families
from headwise.cost import parameters
from headwise.families import Family
from headwise.memory import available_bytes
from headwise.probes._backward import LOGITS, ROOM, Way, chosen_way, kept_per_token
from headwise.runs.settings import Settings
from headwise.stages.probe import HEALING_TOKENS
from headwise.stages.source import codes_rows, heads_to_pool
from headwise.tasks.causal import Causal
from headwise.types import ModelShape

LIBRARIES = 3 << 30  # bytes of a process that has loaded torch and, on a GPU, its kernels
SHARD = 4 << 30  # of weights, on their way to a file
LITTLE = 16 << 30  # bytes that need no words
ONE_BY_ONE = "one layer at a time"


class Needed(NamedTuple):
    """Bytes that a stage takes at most, on the device and in host memory (of a run on the CPU: there alone)."""

    stage: str
    device: int
    host: int
    way: str


def needed(settings: Settings, config: Any, device: str, streamed: bool = False) -> list[Needed]:
    """The stages of a run with a decoder; nothing of other models, which are small. `streamed`: layer by layer."""
    family = families.family_of(config)
    if family.images or family.audio or families.task_of(config) != "causal":
        return []
    shape = family.shape_of(config)
    shape = shape.with_layers(tuple(layer.pooling(heads_to_pool(settings, shape)) for layer in shape.layers))
    run = _Run(settings, family, shape, config, device)
    if streamed:
        return run.one_layer_at_a_time()
    stages = [run.loading(), run.prices(), run.swaps(), run.healing(), run.saving(), run.verifying()]
    return [stage for stage in stages if stage is not None]


class _Run:
    """What the estimates share."""

    def __init__(self, settings: Settings, family: Family, shape: ModelShape, config: Any, device: str) -> None:
        self.settings, self.family, self.shape, self.config, self.device = settings, family, shape, config, device
        self.size = families.computed_dtype(config, settings.dtype, device).itemsize
        self.weights = parameters(shape) * self.size
        words = shape.vocab_size * shape.hidden_size
        self.layers = self.weights - (1 if shape.tied_embeddings else 2) * words * self.size
        self.length = family.row_length(settings.length, settings.served(family.longest(config)))
        rows = max(1, LOGITS // (self.length * max(1, shape.vocab_size)))
        self.logits = 16 * rows * self.length * shape.vocab_size  # four copies in float32
        self.logits += 4 * words * (self.size < 4)  # and the head
        self.wide = max(layer.mlp_width for layer in shape.layers)
        self.coded = codes_rows(settings, shape, Causal())

    def _stage(self, name: str, held: float, way: str = "all at once", host: float = 0) -> Needed:
        if self.device == "cpu":
            return Needed(name, 0, int(held + host + LIBRARIES), way)
        return Needed(name, int(held), int(host + LIBRARIES), way)

    def one_layer_at_a_time(self) -> list[Needed]:
        """Of a streamed model: one layer in its format and in float32, the output table, and streams that a GPU has
        room for. On a CPU streams lie on disk, but for a batch, and all is in float32."""
        one, numbers = self.layers / len(self.shape.layers), self.shape.hidden_size * self.size
        trained = 16 * one / self.size * (self.settings.heal == "blockwise")  # in float32, with Adam's moments
        squares = 6.0 * 8 * max(layer.query_heads * layer.v_dim**2 for layer in self.shape.layers)
        if self.device == "cpu":
            size = 3 * 4 * one / self.size + max(3.0 * 8 * self.wide**2, squares, trained)
            return [self._stage("healing", size, ONE_BY_ONE)]
        table = self.shape.vocab_size * numbers
        heads = max(layer.query_heads * layer.out_dim for layer in self.shape.layers)
        rows = self.settings.tokens * self.size * (8 * self.shape.hidden_size + 2 * (self.wide + heads))
        solves = 3.0 * 8 * self.wide**2
        few = 4 * self.settings.swap_tokens * self.shape.hidden_size * len(self.shape.layers)
        streams = 2 * self.settings.tokens * numbers
        prices = (1 + 4 / self.size) * one + table + streams + 2 * few + squares
        found = [self._stage("prices", prices, ONE_BY_ONE)]
        if self.settings.heal != "none":
            held = 2 * one + table + streams + rows + solves
            held += trained + (2 * streams + self.logits if trained else 0)
            found.append(self._stage(f"healing by {self.settings.heal}", held, ONE_BY_ONE, 2.5 * table))
        evaluated = 4 * 2 * self.settings.eval_tokens * numbers  # rows of several lengths, of both models
        return [*found, self._stage("verifying", one + 2 * table + evaluated + self.logits, ONE_BY_ONE, 2.5 * table)]

    def loading(self) -> Needed:
        return self._stage("loading", self.weights, "straight to the device" if self.device != "cpu" else "all at once")

    def way(self) -> Way:
        """How gradients are computed."""
        room = min(ROOM, max(0, available_bytes(self.device) - self.weights) // 2)
        kept = kept_per_token(self.shape, self.length, self.size)
        able = not self.family.anatomy(self.config).roles
        return chosen_way(kept, self.length, room, able, self.settings.recompute)

    def prices(self) -> Needed:
        tokens, recompute = self.way()
        kept = kept_per_token(self.shape, self.length, self.size) * tokens
        words = f"batches of {tokens:,} tokens"
        if recompute:
            count = len(self.shape.layers)
            kept = kept // count + count * tokens * self.shape.hidden_size * self.size
            words = f"layers computed twice, {words}"
        squares = sum(4 * layer.kv_heads * (layer.qk_width**2 + layer.v_dim**2) for layer in self.shape.layers)
        sums = 0.0 if self.settings.only_kv else 8.0 * self.wide**2 * len(self.shape.layers)
        return self._stage("prices", self.weights + kept + self.logits + sums, words, host=8 * squares * self.coded)

    def swaps(self) -> Needed | None:
        if not self.settings.swap_tokens:
            return None
        count, one = len(self.shape.layers), self.layers / len(self.shape.layers)
        heals = self.settings.heal != "none"
        streams = (self.settings.swap_tokens + heals * HEALING_TOKENS) * self.shape.hidden_size * self.size * count
        answers = 4 * (self.settings.swap_tokens + 3 * 2048) * self.shape.vocab_size
        solves = heals * (3 * 8 * self.wide**2 + 4 * self.size * HEALING_TOKENS * self.wide)
        return self._stage("single cuts", self.weights + 2 * one + streams + answers + solves)

    def healing(self) -> Needed | None:
        method, tokens = self.settings.heal, self.settings.tokens
        if method == "none":
            return None
        work = 3.0 * 8 * self.wide**2 + tokens * self.size * (8 * self.shape.hidden_size + 2 * self.wide)
        copies = 1.0
        if method == "blockwise":
            work += 16 * self.layers / self.size / len(self.shape.layers)  # one layer in float32, with Adam's moments
        elif method == "distill":
            copies = 16 / self.size  # weights, gradients and Adam's moments in float32
        return self._stage(f"healing by {method}", self.weights + copies * self.layers + work)

    def saving(self) -> Needed:
        copies = self.weights + (self.settings.heal != "none") * self.layers
        return self._stage("saving", copies, "file by file", host=min(SHARD, self.weights))

    def verifying(self) -> Needed:
        """Source and new model, and on a GPU the new model once more in a fresh process."""
        fresh = self.weights if self.device != "cpu" else 4 * self.weights / self.size
        rows = 2 * 2048 * self.size * (8 * self.shape.hidden_size + 3 * self.wide)
        return self._stage("verifying", 2 * self.weights + fresh + 2 * self.logits + rows)


def in_words(stages: list[Needed], device: str) -> str:
    """The most that a run takes, in one sentence; empty where that is little."""
    if not stages:
        return ""
    most = max(stages, key=lambda stage: (stage.device, stage.host))
    way = next((stage.way for stage in stages if stage.stage == "prices"), ONE_BY_ONE)
    host = max(stage.host for stage in stages)
    if max(most.device, host) < LITTLE:
        return ""
    here = "" if device == "cpu" else f"{most.device / 1e9:,.0f} GB on {device} and "
    free = available_bytes(device) / 1e9
    return f"memory: about {here}{host / 1e9:,.0f} GB on the host, most while {most.stage}; {free:,.0f} GB free; {way}."
