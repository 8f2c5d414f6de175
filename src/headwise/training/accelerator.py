"""Accelerate, which training from scratch uses for several processes."""

from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.processes import PATIENCE


def accelerator_for(device: str) -> Any:
    """Accelerate's object for this process on `auto`, `cpu` or `cuda`; every process trains a whole copy."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedType, InitProcessGroupKwargs
    except ImportError:
        raise HeadwiseError("training needs Accelerate: pip install 'headwise[train]'.") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise HeadwiseError("this machine has no CUDA device; leave out --device cuda.")
    patient = InitProcessGroupKwargs(timeout=PATIENCE)  # the main process may tokenise for long
    made = Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[patient])
    if made.distributed_type not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise HeadwiseError(
            f"every process trains a whole copy of the model here, which {made.distributed_type.value} does not do; "
            "start with torchrun, or with accelerate launch and a plain configuration. Healing shares the weights of a "
            "large model with --heal-option shard=1."
        )
    return made
