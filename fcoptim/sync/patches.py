"""Updates as vLLM takes them: sparse patches by checkpoint name, and the rest as whole tensors.

After vLLM's ``SparseWeightPatch`` (vllm/distributed/weight_transfer/sparse_nccl_engine.py, vllm-project/vllm#40096 and
#53751) and what its ``load_checkpoint_weight_patches`` checks (vllm/model_executor/model_loader/
checkpoint_weight_patch.py, #50723): int32 flat indices, unique, in range; values that are no NaN, as NaN marks the
unchanged elements there; patches and whole tensors in calls of their own; contiguous tensors, as vLLM broadcasts their
memory (#57130).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .update import SyncError, Update


@dataclass
class SparseWeightPatch:
    """New values of some elements of one checkpoint tensor; the same fields as vLLM's class.

    Attributes:
        name: The tensor's name in the checkpoint.
        indices: int32, 1-D: flat row-major indices, unique.
        values: 1-D, the new values in the tensor's dtype; no NaN.
        full_shape: Shape of the whole tensor.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]


def to_patches(
    update: Update, make: Callable[..., Any] = SparseWeightPatch
) -> tuple[list[Any], list[tuple[str, torch.Tensor]]]:
    """Split an update into sparse patches and whole tensors.

    A tied tensor goes by its first name alone.

    Args:
        update: A delta, or an anchor, which has whole tensors only.
        make: What to build patches with, called with the fields of ``SparseWeightPatch`` as keywords; vLLM's own
            class of that name, for example.

    Returns:
        ``(patches, whole)``: for the engine's sparse call, and for its ``load_weights``. Either may be empty, and
        is then not to be sent.

    Raises:
        SyncError: A sparse value is NaN, or has a dtype that has no NaN; ``Sender(dense=True)`` sends these whole.
    """
    patches, dense = [], []
    for one in update.tensors:
        if one.indices is None:
            dense.append((one.name, one.values))
            continue
        if not one.values.is_floating_point() or bool(one.values.isnan().any()):
            what = "NaN" if one.values.is_floating_point() else str(one.values.dtype)
            raise SyncError(
                f"{one.name!r} has new values that are {what}, which a sparse patch can't say; use Sender(..., "
                "dense=True), which sends such tensors whole"
            )
        patches.append(
            make(name=one.name, indices=one.indices.contiguous(), values=one.values.contiguous(), full_shape=one.shape)
        )
    return patches, dense
