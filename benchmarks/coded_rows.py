"""A prototype of decode attention over coded rows on CUDA: how codes lie in memory, and the kernels of coded_*.cu.

Rows of one width each for keys and values, codes of 8, 4 and 2 bits, 32 query heads. Not used by `optimise=True`: codes
of saved models may have any number of bits and share scales in groups of about 64. Needs nvcc.
Shape suffixes: P texts, L places, K coefficients.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WARPS, RING, SLOT, STAGES = 12, 4, 2304, 3  # as coded_rows.cuh has them
TILE, GROUP, HEADS = 64, 64, 32
WIDTHS = (8, 4, 2)
FEW_STEPS = 0.8  # the part of a scale that codes of two bits cover, as in RowCoder
MOST_SHARED = 227 << 10  # bytes of a program


class Layout:
    """How many coefficients have 8, 4 and 2 bits, and where their codes lie."""

    def __init__(self, counts: tuple[int, int, int]) -> None:
        self.counts, self.size, self.groups = counts, sum(counts), sum(counts) // GROUP
        if any(count % GROUP for count in counts) or counts[2] % (2 * GROUP):
            raise ValueError(f"{counts}: coefficients of a width come in groups of {GROUP}, those of 2 bits in pairs")
        self.bytes = sum(count * width for count, width in zip(counts, WIDTHS, strict=True)) // 8
        bits, k_place, v_place = [], [], []
        for width, count in zip(WIDTHS, counts, strict=True):
            one = torch.arange(count)
            bits.append(torch.full((count,), width))
            k_place.append(one // 16 % (16 // width) % (10 // width) * width)
            v_place.append(one % 64 // 8 % (16 // width) % (10 // width) * width)
        self.bits = torch.cat(bits).double()
        self.step = 2.0 / 2**self.bits * torch.where(self.bits <= 2, FEW_STEPS, 1.0)
        self.ratio = (self.step * 2.0 ** (9 - torch.cat(k_place))).float()  # of queries
        self.factor = (self.step * 2.0 ** (16 - torch.cat(v_place))).float()  # of sums

    def chunks(self) -> list[int]:
        """Of 16 words, by width."""
        return [count * width // 256 for width, count in zip(WIDTHS, self.counts, strict=True)]

    def warps(self) -> list[int]:
        """That sum 64 coefficients each, by width."""
        return [count // 64 for count in self.counts]

    def _words(self, codes: torch.Tensor, keys: bool) -> torch.Tensor:
        P, L, _ = codes.shape
        made = []
        for width, part in zip(WIDTHS, codes.long().split(self.counts, -1), strict=True):
            each = 16 // width
            up = (torch.arange(each, device=codes.device) * width)[:, None]
            if keys:  # a chunk has 16 words; its fields are 16 neighbouring coefficients each
                word = (part.view(P, L, -1, each, 16) << up).sum(3).view(P, L // 64, 4, 2, 8, -1, 2, 4, 2)
                word = word.permute(0, 1, 5, 2, 4, 7, 3, 6, 8)
            else:  # a warp has 64 coefficients; fields of 8 words are 8 neighbours each
                word = (part.view(P, L, -1, 8 // each, each, 8) << up).sum(4)
                word = word.view(P, L // 64, 4, 2, 4, 2, -1, 8 // each, 8).permute(0, 1, 6, 2, 7, 3, 8, 4, 5)
                word = word.reshape(P, L // 64, -1, 16 // each, 4, 8, 4, 2).permute(0, 1, 2, 3, 5, 6, 4, 7)
            made.append((word - ((word >= 1 << 15).long() << 16)).short().reshape(P, L // 64, -1))
        return torch.cat(made, -1).contiguous()

    def packed(
        self, codes_PLK: torch.Tensor, scales_PLG: torch.Tensor, keys: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Words (P, tiles, ...) of 16 bits and scales as the kernels read them."""
        P, L, groups = scales_PLG.shape
        if keys:
            scales = scales_PLG.view(P, L // 64, 8, 8, groups).permute(0, 1, 4, 3, 2)
        else:
            scales = scales_PLG.view(P, L // 64, 64, groups).transpose(2, 3)
        return self._words(codes_PLK, keys), scales.contiguous()

    def numbers(self, codes_PLK: torch.Tensor, scales_PLG: torch.Tensor) -> torch.Tensor:
        """What codes and scales stand for."""
        centred = (codes_PLK.double() - (2 ** self.bits.to(codes_PLK.device) - 1) / 2) * self.step.to(codes_PLK.device)
        return centred * (scales_PLG.double() / 256).repeat_interleave(GROUP, -1)


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")


@functools.cache
def _kernels() -> tuple[Any, dict[str, Any]]:
    """The CUDA driver, and kernels by their names."""
    driver, found = ctypes.CDLL("libcuda.so.1"), {}
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        for file, names in (("coded_scores", ("prepare", "score_codes")), ("coded_sums", ("sum_codes", "combine"))):
            made = Path(folder) / "kernels.cubin"
            arch = f"-arch=sm_{major}{minor}"
            subprocess.run(["nvcc", "-cubin", arch, HERE / f"{file}.cu", "-o", made], check=True)
            module = ctypes.c_void_p()
            _checked(driver.cuModuleLoadData(ctypes.byref(module), made.read_bytes()), file)
            for name in names:
                kernel = ctypes.c_void_p()
                _checked(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()), name)
                if "codes" in name:  # attribute 8: the most shared memory
                    _checked(driver.cuFuncSetAttribute(kernel, 8, MOST_SHARED), name)
                found[name] = kernel
    return driver, found


def _launch(name: str, grid: tuple[int, int], threads: int, shared: int, *given: Any) -> None:
    driver, kernels = _kernels()
    kinds = {float: ctypes.c_float, int: ctypes.c_int}
    held = [ctypes.c_void_p(x.data_ptr()) if torch.is_tensor(x) else kinds[type(x)](x) for x in given]
    places = (ctypes.c_void_p * len(held))(*(ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in held))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _checked(driver.cuLaunchKernel(kernels[name], *grid, 1, threads, 1, 1, shared, stream, places, None), name)


class CodedDecode:
    """Room for one size; `run` gives the heads' outputs (P, 32, V) for queries (P, 32, K) in bfloat16."""

    def __init__(self, keys: Layout, values: Layout, texts: int, places: int) -> None:
        self.keys, self.values, self.texts, self.tiles = keys, values, texts, places // TILE
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.threads = 32 * sum(values.warps())
        self.score_splits = max(1, min(self.tiles, processors // texts))
        self.sum_splits = max(1, min(self.tiles, processors * (512 // self.threads) // texts))
        empty = functools.partial(torch.empty, device="cuda")
        self.q16 = empty(texts, keys.size // 16, 2, 32, 8, dtype=torch.float16)
        self.exponents = empty(texts, HEADS)
        self.weights = empty(texts, self.tiles, TILE * HEADS, dtype=torch.float16)
        self.tops, self.sums = empty(2, texts, self.tiles, HEADS).unbind()
        self.part = empty(texts, self.sum_splits, HEADS, values.size)
        self.top, self.total = empty(2, texts, self.sum_splits, HEADS).unbind()
        self.out = empty(texts, HEADS, values.size)
        self.ratio, self.factor = keys.ratio.cuda(), values.factor.cuda()

    def run(
        self, q: torch.Tensor, rows: list[torch.Tensor], ends: torch.Tensor, starts: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """`rows`: words and scales of keys, then of values. Places `starts <= l < ends` of a text are seen."""
        k_words, k_scales, v_words, v_scales = rows
        where, chunks = (ends, starts, 1, self.tiles, 0, 0), self.keys.chunks()
        _launch("prepare", (self.texts, 1), 1024, 0, q, self.ratio, self.q16, self.exponents, self.keys.size, scaling)
        _launch(
            "score_codes", (self.texts, self.score_splits), WARPS * 32, self.keys.size * 64 + WARPS * RING * SLOT,
            self.q16, self.exponents, k_words, k_scales, self.weights, self.tops, self.sums, *where, *chunks,
        )  # fmt: skip
        stage = TILE * HEADS * 2 + self.values.bytes * TILE + self.values.groups * 128 + 128
        _launch(
            "sum_codes", (self.texts, self.sum_splits), self.threads, STAGES * stage + 64 + self.threads * 4,
            self.weights, self.tops, self.sums, v_words, v_scales, self.part, self.top, self.total, *where,
            *self.values.warps(), self.values.size, self.factor,
        )  # fmt: skip
        found = (self.part, self.top, self.total, self.out, self.sum_splits, self.values.size)
        _launch("combine", (self.texts * HEADS, 1), 256, 0, *found)
        return self.out
