"""The Exporter: a state dict in, its fair cast out, call after call."""

import pytest
import torch
from torch import nn

from fcoptim import Exporter, FairCastOptimizer, cast_, parameter_key, start_accumulator_

from .optimizer.helpers import assert_same, equal_bits, saved


def masters(step: int = 0) -> dict[str, torch.Tensor]:
    """fp32 weights of two layers that drift by a little at each step."""
    generator = torch.Generator().manual_seed(7)
    start = {"a.weight": (64, 32), "a.bias": (64,), "b.weight": (8, 64)}
    return {name: torch.randn(shape, generator=generator) + 1e-5 * step for name, shape in start.items()}


def test_each_call_is_one_cast(rounding):
    """Calls number 0, 1, 2 are the casts with those counts under each name's key."""
    export = Exporter(rounding, seed=3)
    accumulators = {}
    for step in range(3):
        state = masters(step)
        out = export(state)
        for name, master in state.items():
            key = parameter_key(3, name)
            if rounding == "error_feedback" and step == 0:
                accumulators[name] = start_accumulator_(torch.empty_like(master, dtype=torch.int16), key=key)
            expected = torch.empty_like(master, dtype=torch.bfloat16)
            cast_(expected, master, rounding=rounding, key=key, count=step, error_feedback=accumulators.get(name))
            assert equal_bits(out[name], expected), name
    assert equal_bits(Exporter("nearest")(masters())["a.bias"], masters()["a.bias"].bfloat16())


@pytest.mark.parametrize("after", [0, 1, 5])
def test_resume_is_exact(rounding, after):
    """An Exporter loaded from a file goes on as the one that wrote it; nothing is shared between the two."""
    export, other = Exporter(rounding, seed=3), Exporter("nearest")
    for step in range(after):
        export(masters(step))
    state = saved(export.state_dict())
    other.load_state_dict(state)
    for step in range(after, after + 3):
        assert_same(export(masters(step)), other(masters(step)))
    assert_same(export.state_dict(), other.state_dict())
    again = Exporter()
    again.load_state_dict(state)
    assert_same(saved(again.state_dict()), state)


@pytest.mark.parametrize("rule", ["stochastic", "dither"])
def test_equals_the_optimizers_cast(rule):
    """Under the same seed and names, exporting the masters after k steps gives the optimizer's served weights."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1, rounding=rule, seed=4)
    export = Exporter(rule, seed=4)
    for _ in range(3):
        assert_same(export(opt.master_state_dict()), opt.served_state_dict())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()


def test_what_is_not_fp32_passes_through():
    """bf16 and integer tensors and other values come out as they are; kept names stay in fp32."""
    state = {
        **masters(),
        "n": torch.tensor(3),
        "half": torch.ones(2).bfloat16(),
        "extra": "text",
        "x.running_mean": torch.ones(2),
    }
    out = Exporter(keep_fp32="*.running_*")(state)
    assert list(out) == list(state)
    for name in ("n", "half", "extra", "x.running_mean"):
        assert out[name] is state[name]
    assert {out[name].dtype for name in masters()} == {torch.bfloat16}
    with pytest.raises(TypeError, match=r"'w' is torch\.float16.*keep_fp32"):
        Exporter()({"w": torch.zeros(2, dtype=torch.float16)})


def test_tied_names_stay_tied(rounding):
    """Two names of one tensor give two names of one tensor, cast once."""
    export = Exporter(rounding)
    weight = masters()["a.weight"]
    for _ in range(2):
        out = export({"emb.weight": weight, "head.weight": weight})
        assert out["emb.weight"] is out["head.weight"]
    assert set(export.state_dict()["casts"]) == {"emb.weight"}


def test_wrapper_prefixes_are_no_part_of_the_name(rounding):
    """A state dict of a DDP or compiled module is exported as that of the bare one."""
    bare = Exporter(rounding)(masters())
    wrapped = Exporter(rounding)({f"module._orig_mod.{name}": value for name, value in masters().items()})
    assert_same(list(bare.values()), list(wrapped.values()))


def test_out_is_written_in_place(rounding):
    """``out`` receives the cast; a tensor of another shape or dtype is refused and nothing is counted."""
    export, plain = Exporter(rounding), Exporter(rounding)
    out = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in masters().items()}
    result = export(masters(), out)
    assert all(result[name] is out[name] for name in out)
    assert_same(result, plain(masters()))
    before = saved(export.state_dict())
    with pytest.raises((ValueError, TypeError), match="shape"):
        export(masters(), {"a.bias": torch.zeros(3, dtype=torch.bfloat16)})
    with pytest.raises((ValueError, TypeError), match=r"float32|bfloat16"):
        export(masters(), {"a.bias": torch.zeros(64, dtype=torch.float16)})
    assert_same(before, saved(export.state_dict()))


@pytest.mark.parametrize("arguments", [("middle", 0), ("nearest", 1.5), ("nearest", True), ("nearest", "0")])
def test_wrong_options(arguments):
    """A rule that is none, a seed that is no integer."""
    with pytest.raises((ValueError, TypeError), match=r"rounding|rule|seed"):
        Exporter(*arguments)


def test_wrong_states():
    """A state that is no Exporter's, of another format, or without accumulators is refused; nothing is changed."""
    export = Exporter("error_feedback")
    export(masters())
    good = saved(export.state_dict())
    for change, said in (
        ({"casts": None}, "lacks"),
        ({"format": 9}, "format 9"),
        ({"error_feedback": {}}, "no accumulators"),
        ({"rounding": "middle"}, "middle"),
    ):
        bad = {k: v for k, v in {**good, **change}.items() if v is not None}
        with pytest.raises(ValueError, match=said):
            export.load_state_dict(bad)
        assert_same(good, saved(export.state_dict()))
    with pytest.raises(ValueError, match="another Exporter"):
        export({"a.bias": torch.zeros(5)})
