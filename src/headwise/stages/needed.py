"""How much memory a run takes, stage by stage, and how it makes do with what there is: estimated before work begins."""

from typing import Any, NamedTuple

from headwise import families
from headwise.cost import parameters
from headwise.data import own_text
from headwise.data.split import REHEARSAL
from headwise.families import Family
from headwise.memory import available_bytes
from headwise.probes import fisher
from headwise.probes._backward import LOGITS, ROOM, TOKENS, Way, chosen_way, kept_per_token
from headwise.runs.settings import Settings
from headwise.stages.probe import HEALING_TOKENS
from headwise.stages.source import codes_alone, codes_rows, heads_to_pool
from headwise.stages.texts import sources
from headwise.tasks.causal import Causal
from headwise.types import ModelShape

LIBRARIES = 11 << 28  # bytes of a process that has loaded torch and, on a GPU, its kernels
SHARD = 4 << 30  # of weights, on their way to a file
SPARE = 3 << 27  # of libraries' own and of what lives shortly, on a GPU
SOLVED = 5.5  # matrices of an MLP's moments in double precision that a refit holds at a time, as measured
FOLLOWED = 32 * 4_096  # tokens times layers of a streamed model that are followed at most: time grows with layers alone
LOCAL_TOKENS = 1_024  # that errors of its layers are measured on at least
FEW = 2_048  # tokens that gradients and single cuts of its layers are computed for at a time
LITTLE = 16 << 30  # bytes that need no words
ONE_BY_ONE = "one layer at a time"


class Needed(NamedTuple):
    """Bytes that a stage takes at most, on the device and in host memory (of a run on the CPU: there alone)."""

    stage: str
    device: int
    host: int
    way: str
    beside: int = 0  # of the bytes on the device, those of another process


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
    stages = [
        run.loading(), run.writing(), run.prices(), run.swaps(), run.healing(), run.saving(), run.verifying()
    ]  # fmt: skip
    return [stage for stage in stages if stage is not None]


def followed_tokens(wanted: int, layers: int) -> int:
    """Tokens on which the gains of a streamed model's layers are measured, or their errors where no gains are wanted.

    >>> followed_tokens(4096, 32), followed_tokens(4096, 80), followed_tokens(0, 32)
    (4096, 1638, 1024)
    """
    return min(wanted or LOCAL_TOKENS, max(LOCAL_TOKENS, FOLLOWED // layers))


class _Run:
    """What the estimates share. Factors were fitted to the use of memory in benchmarks/results/scale.json."""

    def __init__(self, settings: Settings, family: Family, shape: ModelShape, config: Any, device: str) -> None:
        self.settings, self.family, self.shape, self.config, self.device = settings, family, shape, config, device
        self.size = families.computed_dtype(config, settings.dtype, device).itemsize
        self.weights = parameters(shape) * self.size
        words = shape.vocab_size * shape.hidden_size
        self.layers = self.weights - (1 if shape.tied_embeddings else 2) * words * self.size
        self.length = family.row_length(settings.length, settings.served(family.longest(config)))
        rows = max(1, min(LOGITS // (self.length * max(1, shape.vocab_size)), TOKENS // self.length))
        self.logits = 16 * rows * self.length * shape.vocab_size  # four copies in float32
        self.head = 4 * words * (self.size < 4)  # once more in float32
        self.wide = max(layer.mlp_width for layer in shape.layers)
        self.fitted = settings.tokens * (REHEARSAL - 1) // REHEARSAL
        self.refit = SOLVED * 8 * self.wide**2
        self.coded = codes_rows(settings, shape, Causal())
        self.bits_alone = codes_alone(settings, shape, Causal())

    def _stage(
        self, name: str, held: float, way: str = "all at once", host: float = 0, spare: int = SPARE, beside: float = 0
    ) -> Needed:
        if self.device == "cpu":
            return Needed(name, 0, int(held + host + beside + LIBRARIES), way)
        return Needed(name, int(held + beside + spare), int(host + LIBRARIES), way, int(beside))

    def one_layer_at_a_time(self) -> list[Needed]:
        """Of a streamed model: one layer in its format and twice in float32, the output table, and streams that a GPU
        has room for. On a CPU streams lie on disk, but for a batch, and all is in float32."""
        one, hidden = self.layers / len(self.shape.layers), self.shape.hidden_size
        trained = 16 * one / self.size * (self.settings.heal == "blockwise")  # in float32, with Adam's moments
        if self.device == "cpu":
            squares = 6.0 * 8 * max(layer.query_heads * layer.v_dim**2 for layer in self.shape.layers)
            size = 3 * 4 * one / self.size + max(3.0 * 8 * self.wide**2, squares, trained)
            return [self._stage("healing", size, ONE_BY_ONE)]
        table = self.shape.vocab_size * hidden * self.size
        streams = 2 * self.fitted * hidden * self.size
        few = 4 * followed_tokens(self.settings.swap_tokens, len(self.shape.layers)) * hidden
        few *= len(self.shape.layers) + 1  # the source's, and those with one of the layers cut
        work = 4 * FEW * (3 * self.wide + 13 * hidden)  # in float32
        prices = (1 + 8 / self.size) * one + table + streams + max(work + few, 2 * few)
        found = [self._stage("prices", prices, ONE_BY_ONE, table)]
        if self.settings.heal != "none":
            heads = max(layer.query_heads * layer.out_dim for layer in self.shape.layers)
            held = 2 * one + table + self.fitted * self.size * (5 * hidden + self.wide + heads) + self.refit
            held += trained + (2 * streams + self.logits + self.head if trained else 0)
            found.append(self._stage(f"healing by {self.settings.heal}", held, ONE_BY_ONE, 3 * table))
        evaluated = 4 * 2 * self.settings.eval_tokens * hidden * self.size  # rows of several lengths, of both models
        return [*found, self._stage("verifying", one + table + self.head + evaluated, ONE_BY_ONE, 3 * table)]

    def loading(self) -> Needed:
        """On a GPU pages of the files stay in host memory for a while."""
        if self.device == "cpu":
            return self._stage("loading", self.weights)
        return self._stage("loading", self.weights, "straight to the device", self.weights, spare=0)

    def writing(self) -> Needed | None:
        """Text by the model, where it has no other: keys and values of many rows, and their probabilities."""
        if not any(map(own_text.writes_itself, sources(self.settings))):
            return None
        row = (
            self.size * self.length * sum(layer.kv_heads * (layer.qk_dim + layer.v_dim) for layer in self.shape.layers)
        )
        rows = (self.settings.tokens + self.settings.eval_tokens) // self.length
        rows = min(rows, max(1, own_text.CACHE // row)) if self.device != "cpu" else min(rows, own_text.ROWS)
        grown = 1 + 2 / len(self.shape.layers)  # keys and values of a layer are copied when they grow
        return self._stage("text by the model", self.weights + grown * rows * row + 40 * rows * self.shape.vocab_size)

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
        squares = fisher.sums_bytes(self.shape.layers) * self.coded
        sums = 0.0 if self.settings.only_kv else 8.0 * self.wide**2 * len(self.shape.layers)
        if self.device != "cpu" and fisher.sums_fit(squares, available_bytes(self.device) - int(self.weights)):
            sums += squares
        held = self.weights + kept + self.logits + self.head + sums
        return self._stage("prices", held, words, host=squares * 4 / 3)  # one more matrix for each three: the basis

    def swaps(self) -> Needed | None:
        if not self.settings.swap_tokens:
            return None
        count, one = len(self.shape.layers), self.layers / len(self.shape.layers)
        heals = self.settings.heal != "none" and not self.bits_alone
        streams = (self.settings.swap_tokens + heals * HEALING_TOKENS) * self.shape.hidden_size * self.size * count
        answers = 4 * (self.settings.swap_tokens + 3 * 2048) * self.shape.vocab_size
        solves = heals * (3 * 8 * self.wide**2 + 4 * self.size * HEALING_TOKENS * self.wide)
        return self._stage("single cuts", self.weights + 2 * one + streams + answers + solves)

    def healing(self) -> Needed | None:
        method = self.settings.heal
        if method == "none":
            return None
        work = self.refit + self.fitted * self.size * (4 * self.shape.hidden_size + self.wide)
        copies = 1.0
        if method == "blockwise":
            work += 16 * self.layers / self.size / len(self.shape.layers)  # one layer in float32, with Adam's moments
        elif method == "distill":
            copies = 16 / self.size  # weights, gradients and Adam's moments in float32
        return self._stage(f"healing by {method}", self.weights + copies * self.layers + work)

    def saving(self) -> Needed:
        """A healing that helps leaves a second copy of the layers."""
        copies = self.weights + (self.settings.heal != "none") * self.layers
        return self._stage("saving", copies, "file by file", min(SHARD, self.weights))

    def verifying(self) -> Needed:
        """Source and new model, and the new model once more in a fresh process; pages of its files on the host."""
        fresh = self.weights if self.device != "cpu" else 4 * self.weights / self.size
        answers = 3 * 4 * min(LOGITS, 2048 * self.shape.vocab_size)
        host = 0 if self.device == "cpu" else self.weights + min(SHARD, self.weights)
        return self._stage("verifying", 2 * self.weights + answers, host=host, beside=fresh)


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
