"""What an engine made of a saved model, in a few lines. No torch."""

from headwise.types.served import Served


def in_words(found: Served) -> str:
    """Tokens, cache and speed, a line each."""
    tokens = f"the same {found.new_tokens} tokens as transformers after {found.same} of {found.prompts} prompts"
    if found.first_difference is not None:
        tokens += f"; the first that differs is number {found.first_difference + 1}"
    lines = [
        f"{found.engine} {found.version}: {tokens}; log-probabilities differ by at most "
        f"{found.log_probability_error:.1e} nats",
        _cache(found),
    ]
    if found.speed is not None:
        pairs = zip(found.tokens_per_second, found.source_tokens_per_second, strict=True)
        turns = [f"{own / other:.2f}" for own, other in pairs]
        lines.append(
            f"{_rate(found.tokens_per_second)} tokens/s, {found.speed:.2f} times the source's "
            f"({min(turns)} to {max(turns)} over {len(turns)} turns), {found.prompts} texts at once"
        )
    if found.not_measured:
        lines.append(f"nothing is known about the source there: {found.not_measured}")
    return "\n".join(lines)


def _cache(found: Served) -> str:
    own, other = found.cache, found.source_cache
    line = f"{own.bytes_per_token:,.0f} bytes of cache per token: {own.blocks:,} blocks of {own.block_size} tokens in "
    line += f"{found.cache_memory / 2**30:g} GiB"
    if other is None or found.room is None:
        return line
    return (
        f"{line}; {found.room:.2f} times as many tokens as the source, which takes {other.bytes_per_token:,.0f} bytes"
    )


def _rate(speeds: tuple[float, ...]) -> str:
    return f"{sorted(speeds)[len(speeds) // 2]:,.0f}"
