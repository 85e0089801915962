"""What a device is good at."""

from __future__ import annotations

import torch


def multiplies_bf16_fast(device: torch.device | str) -> bool:
    """Whether bf16 matrix products are at least as fast as fp32 ones on a device.

    On CPUs below AVX-512 torch has no bf16 kernels and falls back to loops that take ten to a hundred times as long.

    Args:
        device: Accelerators are taken to be fast.
    """
    return torch.device(device).type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
