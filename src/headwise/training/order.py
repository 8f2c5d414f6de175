"""The rows that every step reads."""

import torch


class Order:
    """Each row once per epoch, in an order that depends on the random seed only, so that nothing has to be saved.

    Unlike a sampler of torch.utils.data it gives the rows of any step. Steps are always full: where an epoch ends
    within a step, the next one begins. The rows are the same for any number of processes; each takes a part of them.

    >>> order = Order(rows=5, per_step=2, seed=0)
    >>> sorted(torch.cat([order(step) for step in range(5)]).tolist())
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    def __init__(self, rows: int, per_step: int, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.rows, self.per_step, self.seed, self.device = rows, per_step, seed, torch.device(device)
        self._epochs: dict[int, torch.Tensor] = {}

    def __call__(self, step: int) -> torch.Tensor:
        """The row numbers of a step (per_step,), on the device."""
        first, last = step * self.per_step, (step + 1) * self.per_step
        parts = []
        while first < last:
            epoch, at = divmod(first, self.rows)
            parts.append(self._epoch(epoch)[at : at + last - first])
            first += len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _epoch(self, epoch: int) -> torch.Tensor:
        if epoch not in self._epochs:
            self._epochs = {number: rows for number, rows in self._epochs.items() if number == epoch - 1}
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epochs[epoch] = torch.randperm(self.rows, generator=generator).to(self.device)
        return self._epochs[epoch]
