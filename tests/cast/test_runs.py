"""A shard that is not one run of its parameter: the same bits as in the whole, and clear errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcoptim.cast import RULES, Runs, cast_, cpu, reference, replay_, start_accumulator_
from fcoptim.cast.rules import HASHED

from .runs import SHAPE, SHARDS, check, master


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("back_end", [cpu.cast_jobs, reference.cast_jobs], ids=["cpu", "reference"])
def test_shards_of_columns(back_end, wide, shard):
    check(back_end, HASHED, shard, wide)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_may_cut_anywhere(threads):
    """Enough work for several threads: their shares end inside runs and between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.randn(300, 2000, generator=torch.Generator().manual_seed(0))
        whole, part = torch.zeros(300, 4000).bfloat16(), torch.zeros(300, 2000).bfloat16()
        both = torch.cat([values, values], dim=1)
        cast_(whole, both, rounding="stochastic", key=1, count=4)
        runs = Runs(np.arange(300) * 4000 + 2000, np.full(300, 2000))
        cast_(part, values, rounding="stochastic", key=1, count=4, start=runs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[:, 2000:])


@pytest.mark.parametrize("rounding", RULES)
def test_cast_start_and_replay(rounding):
    """Through the entry, under every rule: accumulators start, casts and replays are those of the whole."""
    first, last = SHARDS["uneven"]
    values = master()
    runs = Runs(np.arange(SHAPE[0]) * SHAPE[1] + first, np.full(SHAPE[0], last - first))
    served, kept, replays = {}, {}, {}
    for name, source, start in (("whole", values, 0), ("part", values[:, first:last].contiguous(), runs)):
        kept[name] = start_accumulator_(torch.empty(source.shape, dtype=torch.int16), key=9, start=start)
        served[name], replays[name] = torch.zeros(source.shape).bfloat16(), torch.zeros(source.shape).bfloat16()
        arguments = {"rounding": rounding, "key": 9, "count": 2, "error_feedback": kept[name], "start": start}
        for _ in range(3):
            cast_(served[name], source, **arguments)
        replay_(replays[name], source, **arguments)
    for found in (served, kept, replays):
        assert torch.equal(found["part"], found["whole"][:, first:last])
    assert torch.equal(replays["part"], served["part"])


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), max_size=12), st.data())
def test_indices(pieces, data):
    """The index of each element, as written down run by run."""
    runs = Runs([begin for begin, _ in pieces], [length for _, length in pieces])
    expected = [begin + i for begin, length in pieces for i in range(length)]
    first = data.draw(st.integers(0, len(expected)))
    last = data.draw(st.integers(first, len(expected)))
    assert runs.numel == len(expected)
    assert runs.index(first, last, torch.device("cpu")).tolist() == expected[first:last]


def test_errors():
    values, served = torch.randn(4, 6), torch.zeros(4, 6).bfloat16()
    arguments = {"rounding": "dither", "key": 1, "count": 0}
    with pytest.raises(ValueError, match="runs of 12 elements, master 24"):
        cast_(served, values, start=Runs([0, 100], [6, 6]), **arguments)
    with pytest.raises(ValueError, match="must be contiguous"):
        cast_(served.T, values.T, start=Runs([0, 100], [12, 12]), **arguments)
    with pytest.raises(ValueError, match=r"below element 2\*\*61"):
        cast_(served, values, start=Runs([0, 1 << 61], [12, 12]), **arguments)
    with pytest.raises(ValueError, match="runs of 12 elements, error_feedback 24"):
        start_accumulator_(torch.zeros(4, 6, dtype=torch.int16), key=1, start=Runs([0], [12]))
    with pytest.raises(ValueError, match="none negative"):
        Runs([0, -5], [3, 3])
    with pytest.raises(ValueError, match="as many starts as lengths"):
        Runs([0], [3, 3])
