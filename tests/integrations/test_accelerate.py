"""accelerate: a bare loop around ``prepare``, its checkpoints, accumulation and clipping.

Trap 6, its FSDP2 preparation on several ranks, is in ``tests/distributed/test_accelerate.py``.
"""

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader

from fcoptim import FairCastOptimizer, unwrap

from . import tiny
from .trainers import assert_same_bits, lies_on_grid, pair, snapshot

RULES = ["nearest", "stochastic", "dither", "error_feedback"]


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its set-up in globals."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def batches(count: int, size: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 30, (size, 8), generator=generator) for _ in range(count)]


def prepared(storage: str = "bfloat16", rounding: str = "stochastic", seed: int = 0, **options):
    """A model, its optimizer and scheduler, prepared."""
    accelerator = Accelerator(cpu=True, **options)
    model = tiny.model(seed)
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, rounding=rounding, storage=storage)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, total_iters=8)
    return (accelerator, *accelerator.prepare(model, opt, scheduler))


def train(accelerator, model, opt, scheduler, ids):
    for batch in ids:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            scheduler.step()
            opt.zero_grad()


def by_hand(storage: str, rounding: str, ids: list[torch.Tensor]) -> FairCastOptimizer:
    """The same run without accelerate."""
    model, opt = pair(storage, rounding)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, total_iters=8)
    for batch in ids:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize("rounding", RULES)
def test_trap_2_a_prepared_loop_is_the_plain_loop(rounding, storage):
    """Traps 2 and 14: ``prepare`` sends the state through the loader; the run is the plain one bit for bit."""
    accelerator, model, opt, scheduler = prepared(storage, rounding)
    train(accelerator, model, opt, scheduler, batches(4))
    assert_same_bits(snapshot(opt), snapshot(by_hand(storage, rounding, batches(4))))


def test_trap_2_prepare_after_some_steps():
    """Trap 2: preparing an optimizer that has stepped already loses nothing."""
    accelerator = Accelerator(cpu=True)
    model, opt = pair()
    model(input_ids=batches(1)[0], labels=batches(1)[0]).loss.backward()
    opt.step()
    before = snapshot(opt)
    model, prepared_opt = accelerator.prepare(model, opt)
    assert_same_bits(before, snapshot(prepared_opt))
    assert unwrap(prepared_opt) is opt


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_save_state_and_load_state(rounding, precision, storage, tmp_path):
    """``save_state`` and ``load_state`` into objects made anew: the run goes on bit for bit, without a warning."""
    ids = batches(6)
    run = prepared(storage, rounding, mixed_precision=precision)
    train(*run, ids[:3])
    run[0].save_state(str(tmp_path))
    train(*run, ids[3:])
    whole = snapshot(run[2])
    fresh = prepared(storage, rounding, seed=1, mixed_precision=precision)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rewritten from the state")
        fresh[0].load_state(str(tmp_path))
        train(*fresh, ids[3:])
    assert_same_bits(whole, snapshot(fresh[2]))


def test_accumulation():
    """Micro-batches are neither stepped nor cast; in fp32 storage two halves are one whole."""
    whole = prepared("float32")
    train(*whole, batches(3, 8))
    halves = prepared("float32", gradient_accumulation_steps=2)
    train(*halves, [half for batch in batches(3, 8) for half in batch.chunk(2)])
    assert all(int(unwrap(halves[2]).state[p]["cast_count"]) == 3 for p in halves[1].parameters())
    for (name, a), (_, b) in zip(unwrap(whole[2]).named_masters(), unwrap(halves[2]).named_masters()):
        assert torch.allclose(a, b, atol=1e-4), name


def test_a_skipped_step_leaves_the_scheduler_alone():
    """``step_was_skipped`` is accelerate's own; our ``on_nonfinite="skip"`` changes nothing and is counted."""
    accelerator = Accelerator(cpu=True)
    model, plain = pair(on_nonfinite="skip")
    model, opt = accelerator.prepare(model, plain)
    accelerator.backward(model(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
    next(model.parameters()).grad[0, 0] = float("inf")
    before = snapshot(opt)
    opt.step()
    assert_same_bits(before, {k: v for k, v in snapshot(opt).items() if k in before})
    assert unwrap(opt).cast_stats().skipped_steps == 1


def test_trap_15_a_step_inside_autocast():
    """Trap 15: autocast caches bf16 copies of fp32 weights; a step inside its context must not leave them stale."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, opt = accelerator.prepare(*pair("float32"))
    ids = batches(1)[0]
    with accelerator.autocast():
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        opt.step()
        inside = model(input_ids=ids).logits
    with accelerator.autocast():
        outside = model(input_ids=ids).logits
    assert torch.equal(inside, outside)


def test_trap_17_autocast_over_bf16_values_is_the_bf16_layer():
    """Trap 17: under autocast fp32 storage of bf16 values computes what the rollout engine's bf16 matrices do."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, opt = accelerator.prepare(*pair("float32"))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    layer = accelerator.unwrap_model(model).model.layers[0].mlp.up_proj
    served = unwrap(opt).served_state_dict()["model.layers.0.mlp.up_proj.weight"]
    with accelerator.autocast():
        assert torch.equal(layer(x), torch.nn.functional.linear(x.bfloat16(), served))


def test_with_a_prepared_loader():
    """A prepared DataLoader beside them, and ``unwrap_model`` to get at the served weights."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(torch.cat(batches(2)), batch_size=4)
    model, opt, loader = accelerator.prepare(*pair(), loader)
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        opt.step()
        opt.zero_grad()
    assert all(lies_on_grid(p) for p in accelerator.unwrap_model(model).parameters())
    assert accelerator.get_state_dict(model).keys() == unwrap(opt).served_state_dict().keys()
