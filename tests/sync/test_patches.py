"""Patches as vLLM takes them: held against its loader's rules."""

from dataclasses import dataclass, fields
from math import prod

import pytest
import torch

from fcoptim.sync import Sender, SparseWeightPatch, SyncError, to_patches

from .helpers import assert_equal, copied, noise, nudge, weights


def load_as_vllm_does(held: dict[str, torch.Tensor], patches) -> None:
    """Check patches as vLLM's loader documents it, then keep every element where the staged tensor is NaN."""
    assert len({patch.name for patch in patches}) == len(patches)
    for patch in patches:
        assert patch.indices.dtype is torch.int32 and patch.indices.ndim == patch.values.ndim == 1
        assert patch.indices.is_contiguous() and patch.values.is_contiguous()
        assert patch.indices.numel() == patch.values.numel() == len(set(patch.indices.tolist()))
        assert patch.values.is_floating_point() and not patch.values.isnan().any()
        staged = torch.full((prod(patch.full_shape),), torch.nan, dtype=patch.values.dtype)
        staged.index_copy_(0, patch.indices.long(), patch.values)
        staged = staged.view(patch.full_shape)
        held[patch.name] = torch.where(staged.isnan(), held[patch.name], staged)


def test_an_engine_follows():
    state = weights()
    sender = Sender(state, anchor_every=None)
    none, whole = to_patches(sender.publish().anchor)
    assert none == []
    held = {name: tensor.clone() for name, tensor in whole}
    kinds = set()
    for step in range(8):
        nudge(state["embed.weight"], 0.1, step)
        nudge(state["layer.weight"], 0.1 if step % 2 else 0.9, step)
        nudge(state["norm.weight"], 1.0, step)
        state["norm.batches"].add_(1)
        if step == 3:
            state["embed.weight"][0, 0] = torch.nan
        if step == 5:
            state["embed.weight"][0, 0] = 1.5
        patches, whole = to_patches(sender.publish().delta)
        load_as_vllm_does(held, patches)
        held.update({name: tensor.clone() for name, tensor in whole})
        kinds.update((patch.name, "sparse") for patch in patches)
        kinds.update((name, "whole") for name, _ in whole)
        assert_equal(held, {name: tensor for name, tensor in state.items() if name != "head.weight"})
    assert {("embed.weight", "sparse"), ("embed.weight", "whole"), ("norm.batches", "whole")} <= kinds


def test_fields_are_vllm_s():
    assert [field.name for field in fields(SparseWeightPatch)] == ["name", "indices", "values", "full_shape"]


def test_builds_the_engine_s_own_class():
    @dataclass
    class Patch:
        name: str
        indices: torch.Tensor
        values: torch.Tensor
        full_shape: tuple[int, ...]

    state = {"w": noise(0, 4, 50)}
    sender = Sender(state)
    sender.publish()
    nudge(state["w"], 0.1, 0)
    ((patch,), whole) = to_patches(sender.publish().delta, Patch)
    assert isinstance(patch, Patch) and patch.full_shape == (4, 50) and whole == []


@pytest.mark.parametrize("name, what", [("embed.weight", "NaN"), ("norm.batches", "torch.int64")])
def test_what_a_patch_can_t_say(name, what):
    state = weights()
    sender = Sender(state, dense=False)
    sender.publish()
    before = copied(state)
    state[name].view(-1)[0] = torch.nan if what == "NaN" else 9
    with pytest.raises(SyncError, match=f"'{name}' has new values that are {what}.*dense=True"):
        to_patches(sender.publish().delta)
    assert before[name].view(-1)[0] != state[name].view(-1)[0]
