"""``cast_`` as users call it: lists, in-place marks, and an error for each wrong input."""

import pytest
import torch

from fcoptim.cast import RULES, cast_, get_rule, parameter_key, replay_, start_accumulator_

M = torch.linspace(-1, 1, 12).reshape(3, 4)
S = torch.zeros(3, 4, dtype=torch.bfloat16)
A = torch.zeros(3, 4, dtype=torch.int16)
OK = {"rounding": "stochastic", "key": 1, "count": 0}


@pytest.mark.parametrize("rounding", RULES)
def test_a_list_equals_single_calls(rounding):
    masters = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 0, 5000)]
    keys = [parameter_key(0, name) for name in "abc"]

    def accumulators():
        return [start_accumulator_(torch.empty_like(m, dtype=torch.int16), key=k) for m, k in zip(masters, keys)]

    together = [torch.zeros_like(m, dtype=torch.bfloat16) for m in masters]
    state = accumulators()
    cast_(together, masters, rounding=rounding, key=keys, count=[4, 5, 6], error_feedback=state)
    for number, (master, accumulator) in enumerate(zip(masters, accumulators())):
        alone = torch.zeros_like(master, dtype=torch.bfloat16)
        cast_(alone, master, rounding=rounding, key=keys[number], count=4 + number, error_feedback=accumulator)
        assert torch.equal(alone, together[number])
        assert torch.equal(accumulator, state[number]) or rounding != "error_feedback"


def test_it_counts_as_an_in_place_write():
    """The version counter rises once, and parameters that require grad can be written."""
    parameter = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    before = parameter._version
    cast_(parameter, M, **OK)
    assert parameter._version == before + 1
    assert parameter.requires_grad and parameter.grad_fn is None


def test_an_empty_list_is_fine():
    cast_([], [], **OK)


def test_the_state_of_torch_is_left_alone():
    state = torch.get_rng_state()
    cast_(S.clone(), M, **OK)
    assert torch.equal(state, torch.get_rng_state())


def expanded(dtype):
    return torch.zeros(1, 4, dtype=dtype).expand(3, 4)


WRONG = {
    "unknown rule": (S, M, {"rounding": "up"}, ValueError, "'nearest', 'stochastic'"),
    "rule of another type": (S, M, {"rounding": 3}, ValueError, "rounding must be one of"),
    "fp16 served": (S.half(), M, {}, TypeError, "bfloat16 or float32"),
    "bf16 master": (S, M.bfloat16(), {}, TypeError, "master must be float32"),
    "shapes": (S, M.T, {}, ValueError, r"shape \(4, 3\), served \(3, 4\)"),
    "devices": (S.to("meta"), M, {}, ValueError, "on cpu, served on meta"),
    "list against tensor": ([S], M, {}, ValueError, "both be lists"),
    "list lengths": ([S, S.clone()], [M], {}, ValueError, "2 served tensors but 1 values of master"),
    "too few keys": ([S, S.clone()], [M, M], {"key": [1]}, ValueError, "1 values of key"),
    "key is text": (S, M, {"key": "a"}, TypeError, "key, count and start must be integers; got 'a'"),
    "count is no integer": (S, M, {"count": 1.0}, TypeError, "must be integers; got 1, 1.0, 0"),
    "key too large": (S, M, {"key": 1 << 64}, ValueError, "key must lie in"),
    "negative count": (S, M, {"count": -1}, ValueError, "count be >= 0"),
    "start too large": (S, M, {"start": 1 << 61}, ValueError, "start in"),
    "no accumulator": (S, M, {"rounding": "error_feedback"}, ValueError, "needs error_feedback="),
    "accumulator dtype": (S, M, {"rounding": "error_feedback", "error_feedback": A.int()}, TypeError, "must be int16"),
    "accumulator shape": (S, M, {"rounding": "error_feedback", "error_feedback": A[:2]}, ValueError, "shape"),
    "expanded served": (expanded(torch.bfloat16), M, {}, ValueError, "share memory"),
    "shared memory": (M.view(3, 4), M, {}, ValueError, "share their memory"),
    "changed dtype": (S, M, {"changed": torch.zeros(1)}, ValueError, "changed must be int64"),
    "changed shape": (S, M, {"changed": torch.zeros(2, dtype=torch.int64)}, ValueError, r"shape \(1,\)"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_input(case):
    served, master, options, error, message = case
    kept = [t.clone() for t in ([served] if isinstance(served, torch.Tensor) else served) if not t.is_meta]
    with pytest.raises(error, match=message):
        cast_(served, master, **{**OK, **options})
    now = [t for t in ([served] if isinstance(served, torch.Tensor) else served) if not t.is_meta]
    assert all(torch.equal(a, b) for a, b in zip(kept, now)), "something was written"


def test_other_errors():
    with pytest.raises(ValueError, match="accumulators to replay"):
        replay_(S, M, rounding="error_feedback", key=1, count=0)
    with pytest.raises(TypeError, match="must be int16"):
        start_accumulator_(M, key=1)
    with pytest.raises(ValueError, match="one of"):
        get_rule("floor")
