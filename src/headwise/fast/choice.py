"""The quickest path that computes a case correctly: looked up, or measured within some milliseconds."""

import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib.util import find_spec

import torch

from headwise.devices import free_bytes, timed
from headwise.fast.cache import STEP
from headwise.fast.paths import SIDE_BY_SIDE, Path, Seen, decode_paths, eager, prefill_paths, side_by_side
from headwise.fast.table import KernelTable

MOST_BYTES = 2**29  # of keys and values that are made for a measurement
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CHECKED = 32  # last tokens of a prompt that are compared


@dataclass(frozen=True)
class Case:
    """Everything that decides which kernel is quickest; lengths and batches by the next power of two."""

    device: torch.device
    dtype: torch.dtype
    phase: str  # decode or prefill
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    places: int
    rows: int
    masked: bool = False  # of a prompt: left padding, a window, or something before it
    capped: bool = False
    window: int | None = None

    @property
    def key(self) -> str:
        """The key of the case in the table."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else f"cpu-{torch.get_num_threads()}"
        heads = f"{self.query_heads}q-{self.kv_heads}kv-{self.qk_dim}qk-{self.v_dim}v"
        kind = f"{'masked' if self.masked else 'plain'}{'-capped' if self.capped else ''}"
        kind += f"-window{self.window}" if self.window else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{name}|{dtype}|{self.phase}|{heads}|{kind}|{self.places}x{self.rows}|torch-{torch.__version__}"

    def paths(self) -> dict[str, Path]:
        """The paths that may be tried."""
        every = decode_paths if self.phase == "decode" else prefill_paths
        return every(self.device, self.qk_dim, self.v_dim)


def rounded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def case_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> Case:
    """The case of some queries, keys and values."""
    decode, known = q.shape[2] == 1, seen.end is not None
    plain = known and seen.plain() and (decode or k.shape[2] == q.shape[2])
    return Case(
        device=q.device,
        dtype=q.dtype,
        phase="decode" if decode else "prefill",
        query_heads=q.shape[1],
        kv_heads=k.shape[1],
        qk_dim=q.shape[3],
        v_dim=v.shape[3],
        places=rounded(k.shape[2]),
        rows=rounded(len(q)),
        masked=known and not plain,
        capped=seen.softcap is not None,
        window=seen.window if decode and not known else None,
    )


@lru_cache(maxsize=1)
def _table() -> KernelTable:
    return KernelTable()


_found: dict[Case, Path] = {}


def forget() -> None:
    """Read the table again when it is next needed."""
    _found.clear()
    _table.cache_clear()


@torch.no_grad()
def quickest(case: Case) -> Path:
    """The path to take."""
    if case not in _found:
        paths, table = case.paths(), _table()
        name = table.get(case.key)
        if name not in paths:
            times = measured(case)
            name = min(times, key=lambda one: times[one])
            table.put(case.key, name, {one: 1e3 * seconds for one, seconds in times.items()})
        _found[case] = paths[name]
    return _found[case]


def choose(cases: Iterable[Case]) -> None:
    """Find the quickest paths in advance; kernels are compiled in parallel, because one by one takes minutes."""
    asked, table = list(dict.fromkeys(cases)), _table()
    new = [case for case in asked if case.device.type == "cuda" and table.get(case.key) is None]
    jobs = [(case, name) for case in new for name in case.paths() if name.startswith("split")]
    if jobs:
        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            list(pool.map(_build, jobs))
    for case in asked:
        quickest(case)


@torch.no_grad()
def _build(job: tuple[Case, str]) -> None:
    """Run a path once, to compile its kernel, on rows that share their memory."""
    case, name = job
    try:
        with torch.cuda.device(case.device):
            q, k, v, seen = example(replace(case, rows=1))
            seen.ends_B, seen.starts_B = (x.repeat(case.rows) for x in (seen.ends_B, seen.starts_B))
            q, k, v = (x.expand(case.rows, -1, -1, -1) for x in (q, k, v))
            case.paths()[name](q, k, v, seen)
    except Exception:  # the measurement sees it again
        return


def example(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Seen]:
    """Random queries, keys and values of a case; fewer rows or a shorter text where memory is limited."""
    each = case.kv_heads * (case.qk_dim + case.v_dim) * torch.empty((), dtype=case.dtype).element_size()
    if case.phase == "prefill":
        each *= 2 * case.query_heads // case.kv_heads
    most = MOST_BYTES if case.device.type != "cuda" else min(MOST_BYTES, free_bytes(case.device) // 16)
    places, rows = max(2, min(case.places, most // each // case.rows)), case.rows
    places = places // STEP * STEP or places  # as caches have them: kernels are built anew for odd ones
    if case.phase == "prefill":
        places = max(2, min(case.places, 4096 if case.device.type == "cuda" else 512))
        rows = max(1, min(case.rows, most // (each * places)))
    if case.phase == "prefill" and case.device.type != "cuda":
        rows = 1
    made = torch.Generator(case.device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=made, device=case.device, dtype=torch.float32).to(case.dtype)

    tokens = 1 if case.phase == "decode" else max(2, places // 2 if case.masked else places)
    q = draw(rows, case.query_heads, tokens, case.qk_dim)
    behind = STEP if case.phase == "decode" and case.device.type != "cuda" else 0  # a cache has places to spare
    if tokens < places and case.device.type in SIDE_BY_SIDE:  # a prompt with nothing before it reads no cache
        k, v = side_by_side(draw, rows, case.kv_heads, places, case.qk_dim, case.v_dim)
    else:
        k, v = (draw(rows, case.kv_heads, places + behind, dim)[:, :, :places] for dim in (case.qk_dim, case.v_dim))
    ends = torch.full((rows,), places, dtype=torch.int32, device=case.device)
    starts = torch.zeros_like(ends)
    known = places if case.phase == "prefill" or case.device.type != "cuda" else None
    seen = Seen(ends, starts, known, case.masked, case.window, case.qk_dim**-0.5, 30.0 if case.capped else None)
    return q, k, v, seen


def measured(case: Case) -> dict[str, float]:
    """Seconds of every path that computes the case and agrees with plain attention in float32."""
    q, k, v, seen = example(case)
    q32, k32, v32 = (x.float() for x in (q[:, :, -CHECKED:], k, v))
    expected, found = eager(q32, k32, v32, seen), dict[str, float]()
    for name, path in sorted(case.paths().items(), key=lambda item: item[0] == "eager"):  # the slowest comes last
        if name == "eager" and case.phase == "prefill" and case.device.type == "cuda" and case.places > 1024:
            continue  # known to be slow, and its logits may not fit
        work = partial(path, q, k, v, seen)
        try:
            with warnings.catch_warnings():  # torch warns of every kernel that does not do the case
                warnings.simplefilter("ignore")
                off = (work()[:, -expected.shape[1] :].float() - expected).abs().max().item()
                seconds = clock(work, case, hopeless=2 * min(found.values(), default=float("inf")))
        except Exception:  # a kernel that does not do the case; what compiling may raise is not listed anywhere
            continue
        if off <= TOLERANCE.get(case.dtype, 1e-4):
            found[name] = seconds
        else:
            warnings.warn(f"the {name} kernel is wrong by {off:.2g} for {case.key}; it is not used.", stacklevel=2)
    return found or {"eager": 0.0}


def clock(work: Callable[[], object], case: Case, least: float = 4e-3, hopeless: float = float("inf")) -> float:
    """Seconds per call, the best of some batches of calls; decode on CUDA is timed in a graph, as it will run.

    A first call that takes longer than `hopeless` is not repeated.
    """

    together = 1
    if case.phase == "decode" and case.device.type == "cuda":
        graph, together = torch.cuda.CUDAGraph(), 10
        with torch.cuda.graph(graph):
            for _ in range(together):
                work()
        work = graph.replay
    once = timed(work, case.device)[1]
    if once / together > hopeless:
        return once / together
    calls = max(1, min(50, int(least / 4 / max(once, 1e-7))))
    return min(timed(work, case.device, calls)[1] for _ in range(3)) / calls / together


@cache
def small_kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our small kernels can be built on a device; without them models are slower."""
    if find_spec("triton") is None:
        return False
    x = torch.zeros(1, 1, 48, device=device, dtype=dtype)
    keys, values = x.new_zeros(2, 1, 1, 1, 16)
    try:
        from headwise.fast.small import place_heads, rms_norm, silu_gate

        rms_norm(x, x[0, 0], 1e-6, False)
        silu_gate(x)
        place = torch.zeros(1, dtype=torch.long, device=device)
        place_heads(x, x, x, None, None, keys, values, place, 0.0, False, 16, False, 1, 16)
    except Exception as error:  # what compiling may raise is not listed anywhere
        warnings.warn(f"small kernels cannot be built here ({error}); models are slower without.", stacklevel=2)
        return False
    return True
