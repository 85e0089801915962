"""torch.distributed.checkpoint: into fresh models and optimizers, over any number of ranks, bit for bit."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fcoptim.lag

from ..optimizer.helpers import assert_same
from . import setups

RUNS = {
    "stochastic": {"rounding": "stochastic"},
    "error_feedback": {"rounding": "error_feedback"},
    "ema": {"rounding": "dither", "lag": fcoptim.lag.Ema(3).options},
    "delay": {"rounding": "stochastic", "lag": fcoptim.lag.Delay(2).options},
    "kept": {"rounding": "stochastic", "keep_fp32": "2.*", "dtype": torch.float32},
    "sgd": {"rounding": "stochastic", "optimizer": torch.optim.SGD, "momentum": 0.9},
    "plain_sgd": {"rounding": "error_feedback", "optimizer": torch.optim.SGD},
    "kept_sgd": {"rounding": "dither", "optimizer": torch.optim.SGD, "keep_fp32": "2.*", "dtype": torch.float32},
}


def save(how, run, folder, flatten, steps):
    """Train, save, train on; the state when it was saved and at the end."""
    made, opt = setups.built(how, **RUNS[run])
    setups.step_with_gradients(opt, range(steps))
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(made, opt, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = setups.everything(opt)
    setups.step_with_gradients(opt, range(steps, steps + 2))
    return saved, setups.everything(opt)


def resume(how, run, folder, flatten, steps):
    """The same from the folder on, in a model with other weights and an optimizer with another seed and lr."""
    options = {"dtype": torch.bfloat16, **RUNS[run]}
    rounding, dtype = options.pop("rounding"), options.pop("dtype")
    made = setups.shard(setups.model(dtype, seed=1), how)
    optimizer = options.pop("optimizer", torch.optim.AdamW)
    opt = fcoptim.FairCastOptimizer(made, optimizer, rounding=rounding, seed=9, lr=1e-2, **options)
    wanted = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(made, opt, options=wanted)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        made,
        opt,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=wanted,
    )
    loaded = setups.everything(opt)
    setups.step_with_gradients(opt, range(steps, steps + 2))
    return loaded, setups.everything(opt)


@pytest.mark.parametrize(("run", "flatten"), [(run, number % 2 == 1) for number, run in enumerate(RUNS)])
def test_resume_from_2_ranks_to_4_and_1(run, flatten, ranks, tmp_path):
    """Field report 23: the state is the saved one and the run goes on bit for bit."""
    expected = ranks(2, save, "fsdp", run, str(tmp_path), flatten, 3)
    for how, world in (("fsdp", 4), ("whole", 1)):
        for found in ranks(world, resume, how, run, str(tmp_path), flatten, 3):
            assert_same(found, expected[0])


@pytest.mark.parametrize(
    ("source", "target", "world"), [("whole", "fsdp", 1), ("fsdp", "fsdp_tp", 4), ("tp", "hsdp", 2)]
)
def test_resume_in_another_layout(source, target, world, ranks, tmp_path):
    """From one process to shards, from shards to a mesh of two dimensions, from tensor parallelism to HSDP."""
    expected = ranks(world, save, source, "error_feedback", str(tmp_path), False, 2)
    for found in ranks(4 if target != "fsdp" else 2, resume, target, "error_feedback", str(tmp_path), False, 2):
        assert_same(found, expected[0])


@pytest.mark.parametrize(("run", "flatten"), [("stochastic", True), ("error_feedback", False), ("plain_sgd", True)])
def test_before_any_step(run, flatten, ranks, tmp_path):
    """DCP fills the state by a step with lr 0: nothing is cast by it, and masters, moments and counts are saved."""
    expected = ranks(2, save, "fsdp", run, str(tmp_path), flatten, 0)
    fresh = ranks(2, start, "fsdp", run)[0]
    for result in expected:
        assert_same({key: result[0][key] for key in fresh}, fresh)
    for found in ranks(4, resume, "fsdp", run, str(tmp_path), flatten, 0):
        assert_same(found, expected[0])


def start(how, run):
    """Masters and served weights as they are after construction."""
    _, opt = setups.built(how, **RUNS[run])
    return {key: value for key, value in setups.everything(opt).items() if key.startswith(("master", "served"))}


def whole_state():
    """A full state dict, gathered on rank 0 and sent out from there again."""
    made, opt = setups.built("fsdp", "stochastic")
    setups.step_with_gradients(opt, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(made, opt, options=options)
    if torch.distributed.get_rank() == 0:
        assert not any(isinstance(v, DTensor) for entry in optimizer_state["state"].values() for v in entry.values())
        assert optimizer_state["state"]["0.weight"]["master"].dtype is torch.float32
    saved = setups.everything(opt)
    fresh = setups.shard(setups.model(seed=1), "fsdp")
    other = fcoptim.FairCastOptimizer(fresh, torch.optim.AdamW, seed=9, lr=1e-2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, model_state, options=options)
    set_optimizer_state_dict(fresh, other, optimizer_state, options=options)
    assert_same(setups.everything(other), saved)
    setups.step_with_gradients(opt, range(3, 5))
    setups.step_with_gradients(other, range(3, 5))
    assert_same(setups.everything(other), setups.everything(opt))
    return True


def test_full_state_dict_from_rank_0(ranks):
    assert all(ranks(2, whole_state))


def plain_torch_file(folder):
    """The optimizer's own state dict of one process, loaded into shards without any help of DCP."""
    _, opt = setups.built("fsdp", "error_feedback")
    opt.load_state_dict(torch.load(folder, weights_only=True))
    loaded = setups.everything(opt)
    setups.step_with_gradients(opt, range(3, 5))
    return loaded, setups.everything(opt)


def torch_save(folder):
    """Train in one process, save by torch.save, train on."""
    _, opt = setups.built("whole", "error_feedback")
    setups.step_with_gradients(opt, range(3))
    torch.save(opt.state_dict(), folder)
    saved = setups.everything(opt)
    setups.step_with_gradients(opt, range(3, 5))
    return saved, setups.everything(opt)


def test_full_tensors_load_into_shards(ranks, tmp_path):
    """Each rank cuts its part from a full state dict, without communication."""
    expected = ranks(1, torch_save, str(tmp_path / "file.pt"))[0]
    for found in ranks(2, plain_torch_file, str(tmp_path / "file.pt")):
        assert_same(found, expected)
