"""A cache that is allocated once at its full length: new keys and values are written in place, none is copied."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from headwise.fast.paths import SIDE_BY_SIDE, Seen, side_by_side

STEP = 256  # capacities are multiples of this, so that texts of similar length share a cache and its captured step


class FastLayer(CacheLayerMixin):
    """Keys (B, G, L, K) and values (B, G, L, V) of one layer. Zeros at first: kernels read but mask unfilled places.

    On CUDA both are views of one buffer: side by side they are read as one row, whatever their widths.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for as many rows as the first keys have."""
        self.allocate(len(key_states), key_states, value_states)

    def allocate(self, rows: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for rows like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        heads, qk_dim, v_dim = key_states.shape[1], key_states.shape[3], value_states.shape[3]

        room = partial(torch.zeros, dtype=self.dtype, device=self.device)
        if self.device.type in SIDE_BY_SIDE:
            self.keys, self.values = side_by_side(room, rows, heads, self.capacity, qk_dim, v_dim)
        else:
            self.keys, self.values = (room(rows, heads, self.capacity, width) for width in (qk_dim, v_dim))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all keys and values so far, as an ordinary cache does."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = key_states, value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query sees, and their offset, as for a cache that grows."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Places that are filled."""
        return self.length

    def get_max_length(self) -> int:
        """Places that there are."""
        return self.capacity

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return tuple(x for x in (self.keys, self.values) if x is not None)

    def reset(self) -> None:
        """Set the length to 0; what lies beyond the length is masked, so it may stay."""
        self.length = 0


class FastCache(Cache):
    """The cache of fast models; any other code can use it as an ordinary one.

    While `seen` is set a fast step is running: keys and values go to their places, and `seen` masks attention.
    """

    def __init__(self, layers: int, capacity: int, make: Callable[[int, int], FastLayer] | None = None) -> None:
        places = -(-capacity // STEP) * STEP
        super().__init__(layers=[make(i, places) if make else FastLayer(places) for i in range(layers)])
        self.seen: Seen | None = None
        self.rows = slice(0, 0)  # of the batch, in the step that is running
        self.batch = 0  # rows of the whole batch
        self.place: torch.Tensor | None = (
            None  # on the device, of one new token; otherwise it is behind the filled ones
        )
        self.starts_B: torch.Tensor | None = None  # left padding
        self.padded = self.irregular = False  # some padding; masks that only the ordinary path knows
        self.captured: Any = None  # the decode step, once it was captured

    @property
    def capacity(self) -> int:
        """Places that there are."""
        return int(self.layers[0].capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write, and return what attention reads: all filled places, or whole buffers if the place is on the device."""
        layer: Any = self.layers[layer_idx]
        if self.seen is None:
            return layer.update(key_states, value_states)
        if not layer.is_initialized:
            layer.allocate(self.batch, key_states, value_states)
        keys, values = layer.keys, layer.values
        if self.rows.stop - self.rows.start < self.batch:
            keys, values = keys[self.rows], values[self.rows]
        if self.place is not None:
            keys.index_copy_(2, self.place, key_states)
            values.index_copy_(2, self.place, value_states)
            return keys, values
        end = self.seen.end
        assert end is not None
        tokens = key_states.shape[2]
        keys.narrow(2, end - tokens, tokens).copy_(key_states)
        values.narrow(2, end - tokens, tokens).copy_(value_states)
        if end == tokens:
            return key_states, value_states
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, tokens: int) -> None:
        """Count new tokens, after a fast step."""
        for layer in self.layers:
            layer.length += tokens

    def rewind(self, length: int) -> None:
        """Set the number of filled places; those behind them are masked."""
        for layer in self.layers:
            layer.length = length

    def reset(self) -> None:
        """Empty the cache for another text; buffers and the captured step stay."""
        super().reset()
        self.padded = self.irregular = False

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        made: Sequence[Any] = [layer for layer in self.layers if layer.is_initialized]
        return sum(x.nbytes for layer in made for x in layer.buffers())
