"""Accelerate's own FSDP2 path, on the CPU: it upcasts, shards and swaps the parameters after construction."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fcoptim import FairCastOptimizer, unwrap

from ..optimizer.helpers import assert_same
from . import setups, test_fsdp

pytest.importorskip("accelerate")


def prepared(efficient, folder):
    """Train by accelerate, save in the middle, go on; then go back to the middle and do it again."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        DistributedType,
        FullyShardedDataParallelPlugin,
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, ACCELERATE_USE_CPU="true", FSDP_VERSION="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # not used: the group is there already
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_ram_efficient_loading=efficient,
        state_dict_type="SHARDED_STATE_DICT",
    )
    try:
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
        # It chooses FSDP for accelerators alone; what it does then works on a CPU as well.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        plugin.set_mixed_precision("bf16")
        made = setups.model(torch.float32)
        made, wrapped = accelerator.prepare(
            made, FairCastOptimizer(made, torch.optim.AdamW, rounding="stochastic", **test_fsdp.ADAM)
        )
        opt = unwrap(wrapped)
        losses = setups.train(made, wrapped, range(2))
        save_fsdp_model(plugin, accelerator, made, folder)
        save_fsdp_optimizer(plugin, accelerator, wrapped, made, folder)
        losses += setups.train(made, wrapped, range(2, 4))
        end = setups.everything(opt)
        load_fsdp_model(plugin, accelerator, made, folder)
        load_fsdp_optimizer(plugin, accelerator, wrapped, made, folder)
        again = setups.train(made, wrapped, range(2, 4))
        assert losses[2:] == again
        assert_same(setups.everything(opt), end)
    finally:
        AcceleratorState._reset_state(True)
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "ACCELERATE_USE_CPU",
            "FSDP_VERSION",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(name, None)
    kinds = {(type(param.data), param.dtype) for param in made.parameters()}
    return losses, end, kinds == {(DTensor, torch.float32)}


@pytest.mark.parametrize("efficient", [False, True], ids=["plain", "cpu_ram_efficient_loading"])
def test_prepared_by_accelerate(efficient, ranks, tmp_path):
    """fp32 shards that hold bf16 values; the run, also from accelerate's checkpoint on, is that of one process."""
    expected = ranks(1, test_fsdp.trained, "whole")[0]
    for losses, state, sharded in ranks(2, prepared, efficient, str(tmp_path)):
        assert sharded
        assert losses == expected[0]
        assert_same(state, expected[1])
