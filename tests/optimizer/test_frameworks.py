"""What frameworks do to an optimizer, replayed here without them: accelerate, Lightning, checkpoints, compilers."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from fcoptim import FairCastOptimizer, unwrap

from .helpers import ADAM, assert_same, assert_same_run, batch, equal_bits, loss_on, mlp, pair, saved, train, weights


@pytest.mark.parametrize("after", [0, 3])
def test_state_passed_through_its_own_loader(rounding, after):
    """Trap 2: accelerate's ``prepare`` loads an optimizer's own state with no resume in sight, tensors copied."""
    model, opt = pair(rounding)
    twin_model, twin = pair(rounding)
    train(opt, model, range(after))
    train(twin, twin_model, range(after))
    state = opt.state_dict()
    for entry in state["state"].values():
        for key, value in entry.items():
            entry[key] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    opt.load_state_dict(state)
    train(opt, model, range(after, after + 3))
    train(twin, twin_model, range(after, after + 3))
    assert_same_run(opt, twin)


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints_first_call(rounding, flatten):
    """Trap 3: the step that fills the state (zero gradients, lr 0) makes moments; it moves, counts, writes nothing."""
    model, opt = pair(rounding)
    before, versions = weights(opt), [p._version for p in model.parameters()]
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, opt, options=options)
    assert_same(before, weights(opt))
    assert versions == [p._version for p in model.parameters()]
    assert all(int(opt.state[p]["cast_count"]) == 0 for p in model.parameters())
    text = str(state.keys() if flatten else state["state"]["0.weight"].keys())
    assert "exp_avg" in text and "master" in text
    assert opt.param_groups[0]["lr"] == ADAM["lr"]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_distributed_checkpoint_resumes(rounding, storage, flatten, after):
    """Field report 23 and traps 4, 5 on one process: state got and set by torch's tools goes on bit for bit."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, opt = pair(rounding, storage=storage)
    train(opt, model, range(after))
    model_state, state = get_state_dict(model, opt, options=options)
    model_state, state = saved(dict(model_state)), saved(dict(state))
    other_model, other = pair(rounding, seed=1, storage=storage)
    # As torch asks: the receiving side's state is filled by its own get_state_dict before a checkpoint is read into it.
    get_state_dict(other_model, other, options=options)
    set_state_dict(other_model, other, model_state_dict=model_state, optim_state_dict=state, options=options)
    train(opt, model, range(after, after + 3))
    train(other, other_model, range(after, after + 3))
    assert_same(weights(opt), weights(other))
    for a, b in zip(model.parameters(), other_model.parameters()):
        assert_same(dict(opt.state[a]), dict(other.state[b]))


def test_loading_by_keyword():
    """Trap 5: ``load_state_dict(state_dict=...)``."""
    model, opt = pair()
    train(opt, model, range(2))
    _, other = pair(seed=1)
    other.load_state_dict(state_dict=opt.state_dict())
    assert_same_run(opt, other)


def fabric_like(optimizer: FairCastOptimizer) -> Any:
    """An object as Lightning Fabric makes one: a class derived from ours, the ``__dict__`` copied, methods replaced."""

    class Stand:
        def __init__(self) -> None:
            self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step")}
            self._optimizer = optimizer

        def step(self, closure: Any = None) -> Any:
            return optimizer.step(closure) if closure is not None else optimizer.step()

    return type("FabricFairCastOptimizer", (Stand, FairCastOptimizer), {})()


def test_methods_called_on_a_stand_in():
    """Trap 7: what a stand-in with another ``__dict__`` does is done to the optimizer itself."""
    model, opt = pair(on_nonfinite="skip")
    twin_model, twin = pair(on_nonfinite="skip")
    stand = fabric_like(opt)
    assert unwrap(stand) is opt
    for step in range(3):
        stand.zero_grad()
        loss_on(model, step).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = float("nan")
        # Lightning's precision plugins call the class's method on the stand-in.
        FairCastOptimizer.step(stand)
        twin.zero_grad()
        loss_on(twin_model, step).backward()
        if step == 1:
            twin_model[0].weight.grad[0, 0] = float("nan")
        twin.step()
    assert opt.cast_stats().skipped_steps == 1
    assert opt.cast_stats() == twin.cast_stats()
    assert_same_run(opt, twin)
    stand.load_state_dict(saved(twin.state_dict()))
    train(opt, model, range(3, 5))
    train(twin, twin_model, range(3, 5))
    assert_same_run(opt, twin)


def test_a_closure_at_every_step(rounding):
    """Trap 16: Lightning puts zero_grad, forward and backward into a closure; the result is that of the plain loop."""
    model, opt = pair(rounding)
    twin_model, twin = pair(rounding)
    train(twin, twin_model, range(4))
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_on(model, step)
            loss.backward()
            return loss

        assert opt.step(closure).requires_grad
    assert_same_run(opt, twin)


@pytest.mark.parametrize("clear", ["model", "model, in place", "optimizer", "optimizer, in place"])
def test_who_clears_the_gradients(rounding, clear):
    """Trap 12: clearing through the model or the optimizer, to None or to zeros, trains alike; masters keep none."""
    model, opt = pair(rounding)
    twin_model, twin = pair(rounding)
    train(twin, twin_model, range(3))
    for step in range(3):
        loss_on(model, step).backward()
        opt.step()
        owner = model if clear.startswith("model") else opt
        owner.zero_grad(set_to_none=not clear.endswith("in place"))
        assert all(master.grad is None for master in opt.wrapped.param_groups[0]["params"])
    assert_same(weights(opt), weights(twin))


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(rounding, fused):
    """Trap 10: torch's GradScaler unscales before the step, also if the wrapped optimizer could do it itself."""
    model, opt = pair(rounding, optimizer=torch.optim.AdamW, fused=fused)
    twin_model, twin = pair(rounding, optimizer=torch.optim.AdamW, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        opt.zero_grad()
        scaler.scale(loss_on(model, step)).backward()
        scaler.step(opt)
        scaler.update()
        twin.zero_grad()
        loss_on(twin_model, step).backward()
        twin.step()
        assert all(torch.allclose(a.grad, b.grad) for a, b in zip(model.parameters(), twin_model.parameters()))
    assert_same(weights(opt), weights(twin), "a power of two scales exactly")
    assert not hasattr(opt, "_step_supports_amp_scaling")


class Switching(torch.optim.SGD):
    """An optimizer with two modes, as schedule-free ones are: in eval mode its parameters are shifted by one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.evaluating = False

    @torch.no_grad()
    def _shift(self, evaluating: bool) -> None:
        if evaluating != self.evaluating:
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(1.0 if evaluating else -1.0)
        self.evaluating = evaluating

    def train(self) -> None:
        self._shift(False)

    def eval(self) -> None:
        self._shift(True)


def test_train_and_eval_where_the_wrapped_optimizer_has_them(rounding):
    """Trap 11: ``train`` and ``eval`` exist if needed, cast what they moved, and cost nothing when called again."""
    _, plain = pair(rounding)
    assert not hasattr(plain, "train") and not hasattr(plain, "eval")
    model = mlp()
    opt = FairCastOptimizer(model, Switching, rounding=rounding)
    train(opt, model, range(2))
    counts = [int(opt.state[p]["cast_count"]) for p in model.parameters()]
    before = weights(opt)
    opt.train()
    assert_same(before, weights(opt))
    opt.eval()
    during = weights(opt)
    opt.eval()
    assert_same(during, weights(opt))
    for name, master in opt.named_masters():
        assert torch.allclose(master, before[f"master of {name}"] + 1.0)
        assert (model.get_parameter(name).float() - master).abs().max() <= 2**-7
    opt.train()
    train(opt, model, range(2, 4))
    assert all(int(opt.state[p]["cast_count"]) == n + 4 for p, n in zip(model.parameters(), counts))


def test_parameters_swapped_after_construction(rounding):
    """Trap 6: a framework puts new, wider parameters into model and groups; the run goes on with them."""
    model, opt = pair(rounding, storage="float32")
    for module in (model[0], model[2]):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(param.detach().clone().float()))
    opt.param_groups[0]["params"][:] = list(model.parameters())
    twin_model, twin = pair(rounding, storage="float32")
    train(opt, model, range(3))
    train(twin, twin_model, range(3))
    assert_same(weights(opt), weights(twin))


@pytest.mark.parametrize("tensor", [False, True])
def test_learning_rate_as_number_or_tensor(rounding, tensor):
    """Field report 32: both kinds of lr work, a new value at every step, with the same result as the plain loop."""
    convert = torch.tensor if tensor else float
    model, opt = pair(rounding, lr=convert(1e-3))
    twin_model, twin = pair(rounding, lr=1e-3)
    for step in range(4):
        rate = 1e-3 / (step + 1)
        opt.param_groups[0]["lr"] = convert(rate)
        twin.param_groups[0]["lr"] = float(torch.tensor(rate)) if tensor else rate
        train(opt, model, range(step, step + 1))
        train(twin, twin_model, range(step, step + 1))
    for (name, a), (_, b) in zip(opt.named_masters(), twin.named_masters()):
        assert torch.allclose(a, b, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("tensor", [False, True])
def test_compiled_training_step(tensor):
    """Field report 32: under torch.compile an lr that changes at every step compiles at most twice."""
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, opt = pair(lr=torch.tensor(1e-3) if tensor else 1e-3)
    twin_model, twin = pair(lr=torch.tensor(1e-3) if tensor else 1e-3)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()

    for number in range(6):
        rate = 1e-3 / (number + 1)
        for one in (opt, twin):
            one.param_groups[0]["lr"] = torch.tensor(rate) if tensor else rate
        step(batch(number, 16, 8).bfloat16(), batch(-number - 1, 16, 4))
        train(twin, twin_model, range(number, number + 1))
        twin.zero_grad()
    assert 1 <= len(compiled) <= 2
    assert_same(weights(opt), weights(twin))
    torch._dynamo.reset()


def test_unwrap():
    """Trap 13: the optimizer is found inside what a framework has put around it; elsewhere the error says so."""
    _, opt = pair()

    class Around:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    assert unwrap(opt) is opt
    assert unwrap(Around(Around(opt))) is opt
    with pytest.raises(TypeError, match="no FairCastOptimizer inside Around"):
        unwrap(Around(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


def test_masters_are_found_in_state_alone():
    """Trap 2: no reference to a master lives outside ``state``, so a framework may replace what is there."""
    model, opt = pair()
    train(opt, model, range(2))
    param = model[0].weight
    opt.state[param]["master"] = opt.state[param]["master"].clone()
    before = opt.state[param]["master"].clone()
    train(opt, model, range(2, 3))
    assert not equal_bits(before, opt.state[param]["master"])
    assert opt.wrapped.param_groups[0]["params"][0].data_ptr() == opt.state[param]["master"].data_ptr()
