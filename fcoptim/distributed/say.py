"""What is said about a choice made for the user: on one rank, as a warning."""

from __future__ import annotations

import warnings

import torch

FP32_SHARDS = (
    "parameters are fp32 DTensors (FSDP2, tensor parallelism), so storage='float32' is used: they keep fp32 storage "
    "and hold bf16 values, and a cast to bf16 by mixed precision is exact. Pass storage='float32' to choose it yourself"
)
BF16_GRADIENTS = (
    "torch.distributed is initialised, so gradients of bfloat16 parameters are accumulated and reduced in bfloat16 "
    "(DDP takes no others); use storage='float32' for fp32 gradients, or the communication hook "
    "fcoptim.distributed.reduce_in_fp32 to reduce in fp32"
)


def say_once(text: str) -> None:
    """Warn on rank 0 if there are several processes; silent where ``torch.distributed`` is not in use."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_rank() == 0:
        warnings.warn(text, stacklevel=4)
