"""A saved model in an engine: the same tokens as in transformers, what its cache holds, and how fast it writes."""

from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from headwise.checks.speed import machine
from headwise.engines.process import SECONDS, Engine
from headwise.errors import DataError, ModelError
from headwise.progress import Track, silently, stage
from headwise.types.served import Cache, Served

PROMPTS = 20
PROMPT_TOKENS = 32
NEW_TOKENS = 64
LENGTH = 128  # of a text, at most: a whole number of blocks, so that none is half empty
TIE = 1e-3  # nats
TURNS = 5
CACHE_BYTES = 1 << 30


def prompts_of(rows: torch.Tensor) -> list[list[int]]:
    """Beginnings of held-out rows of text; of few rows also what follows.

    >>> [prompt[0] for prompt in prompts_of(torch.arange(128).view(2, 64))]
    [0, 64, 32, 96]
    """
    if rows.dim() != 2 or rows.is_floating_point() or rows.shape[1] < PROMPT_TOKENS:
        raise DataError(f"an engine is tried with prompts of {PROMPT_TOKENS} tokens, and the evaluation has no such.")
    count = rows.shape[1] // PROMPT_TOKENS
    pieces = rows[:, : count * PROMPT_TOKENS].unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)
    found: list[list[int]] = pieces[(pieces >= 0).all(1)][:PROMPTS].tolist()  # shorter rows end in negative numbers
    return found


def start(engine: str, model: str, dtype: torch.dtype, trust: bool, seconds: float = SECONDS) -> Engine:
    """An engine that serves a model, with as much cache as any other; `trust`: it may run the code beside the model."""
    numbers = str(dtype).removeprefix("torch.")
    return Engine(
        engine, model, seconds, dtype=numbers, cache_bytes=CACHE_BYTES, length=LENGTH, batch=PROMPTS, trust=trust
    )


def start_source(engine: str, source: str | None, dtype: torch.dtype, trust: bool) -> tuple[Engine | None, str]:
    """The same for a source model, or why it is not served."""
    if source is None:
        return None, "its source is a file that the engine does not read"
    try:
        return start(engine, source, dtype, trust), ""
    except ModelError as error:
        return None, str(error)


def serve(
    engine: str,
    model: str,
    ours: nn.Module,
    prompts: list[list[int]],
    other: Engine | None,
    why: str = "",
    trust: bool = True,
    track: Track = silently,
    turns: int = TURNS,
) -> Served:
    """Serve the folder `model`, which `ours` was loaded from, and compare it with ours and with `other`, its source.

    `why` says why there is no other.
    """
    with stage(track, f"starting {engine} on the model"):
        own = start(engine, model, next(ours.parameters()).dtype, trust)
    with own:
        with stage(track, f"writing with {engine}"):
            found = own.ask("written", prompts=prompts, tokens=NEW_TOKENS)
        with stage(track, "timing by turns"):
            times = _by_turns(own, other, prompts, turns)
    with stage(track, "comparing tokens"):
        same, first, error = agreement(ours, prompts, found)
    return Served(
        engine=engine,
        version=own.facts["version"],
        prompts=len(prompts),
        new_tokens=NEW_TOKENS,
        same=same,
        first_difference=first,
        log_probability_error=error,
        tie=TIE,
        cache=_cache(own.facts),
        source_cache=None if other is None else _cache(other.facts),
        cache_memory=CACHE_BYTES,
        tokens_per_second=times[0],
        source_tokens_per_second=times[1],
        machine=machine(next(ours.parameters()).device),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        not_measured=why,
    )


def _cache(facts: dict[str, Any]) -> Cache:
    return Cache(**{name: facts[name] for name in ("block_size", "blocks", "tokens", "bytes_per_token")})


def _by_turns(
    own: Engine, other: Engine | None, prompts: list[list[int]], turns: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Tokens per second of both, measured one after the other again and again, the first turn left out."""
    both = [own] if other is None else [own, other]
    speeds: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for place, one in enumerate(both):
            took = one.ask("seconds", prompts=prompts, tokens=NEW_TOKENS)
            if turn:
                speeds[place].append(len(prompts) * NEW_TOKENS / took)
    return tuple(speeds[0]), tuple(speeds[1])


@torch.no_grad()
def agreement(ours: nn.Module, prompts: list[list[int]], found: list[dict[str, Any]]) -> tuple[int, int | None, float]:
    """After how many prompts all tokens are ours, the first place where one is not, and the largest error in nats.

    Our model reads what the engine wrote. Where each token is also ours, greedy decoding gives the same text.
    """
    device, same, worst = next(ours.parameters()).device, 0, 0.0
    differ: list[int] = []
    for prompt, answer in zip(prompts, found, strict=True):
        tokens = torch.tensor(answer["tokens"], device=device)
        row = torch.cat((torch.tensor(prompt, device=device), tokens)).unsqueeze(0)
        logits = ours(row).logits[0, len(prompt) - 1 : -1]
        logs = logits.float().log_softmax(-1)
        chosen = logs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        theirs = torch.tensor(answer["logprobs"], device=device)
        worst = max(worst, float((chosen - theirs).abs().max()))
        off = torch.nonzero(logs.amax(1) - chosen > TIE).flatten().tolist()
        differ += off[:1]
        same += not off
    return same, min(differ, default=None), worst
