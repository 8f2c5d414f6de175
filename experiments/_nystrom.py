"""Nystrom attention as published, for stacks of models; suffixes as in `_stack`."""

from __future__ import annotations

import torch
from torch import Tensor

PINV_STEPS, KERNEL = 6, 33  # steps of the pseudo-inverse, reach of the convolution


def nystrom(q: Tensor, k: Tensor, v: Tensor, landmarks: int, keep: Tensor | None, conv: Tensor | None) -> Tensor:
    """Nystrom attention as published: segment means as landmarks, an iterated pseudo-inverse, a convolution beside."""
    scale, length = q.shape[-1] ** -0.25, q.shape[-2]
    q, k, away = q * scale, k * scale, 0.0
    if keep is not None:
        there = keep.flatten(0, 1)[:, None, :, None].to(q.dtype)
        q, k, v, away = q * there, k * there, v * there, (there.transpose(-1, -2) - 1) * 1e4
    q_few, k_few = (x.unflatten(2, (landmarks, length // landmarks)).mean(3) for x in (q, k))
    first = (q @ k_few.transpose(-1, -2)).softmax(-1)
    middle = (q_few @ k_few.transpose(-1, -2)).float().softmax(-1)
    last = (q_few @ k.transpose(-1, -2) + away).softmax(-1)
    z = first @ (_inverse(middle) @ (last @ v).float()).to(v.dtype)  # the inverse has large entries that cancel
    if conv is None:
        return z
    bands = (conv @ _bands(length, conv)).unflatten(-1, (length, length))  # (S, H, T, T)
    beside = torch.einsum("shtu,sbhuk->sbhtk", bands, v.unflatten(0, (len(conv), -1)))
    return z + beside.flatten(0, 1)


def _bands(length: int, like: Tensor) -> Tensor:
    """From a kernel to its convolution as a matrix, (KERNEL, T T), zeros behind both ends. Products with it are many
    times as fast as a convolution with as many groups as channels, and so are their gradients."""
    places = torch.arange(length, device=like.device)
    tap = places - places[:, None] + KERNEL // 2  # of output t and input u
    return (tap.flatten() == torch.arange(KERNEL, device=like.device)[:, None]).to(like.dtype)


def _inverse(a: Tensor) -> Tensor:
    """Pseudo-inverse of a softmax matrix by a fixed number of steps of third order."""
    one = torch.eye(a.shape[-1], device=a.device)
    z = a.transpose(-1, -2) / (a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1))[..., None, None]
    for _ in range(PINV_STEPS):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    return z
