"""The same over NCCL on one device: FSDP2's shards of one rank against the plain model. Skipped where there is none."""

import pytest
import torch

from ..optimizer.helpers import assert_same
from . import setups, test_muon, test_shards
from .pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(scope="module")
def nccl():
    """``nccl(world, function, *args)``, as ``ranks`` of this folder, over NCCL."""
    pool = Pool(1, "nccl")
    yield pool.run
    pool.close()


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_rules_and_lags(nccl, storage):
    """Masters, served bits, accumulators, lags; ``cast_stats`` and the check at construction go over NCCL."""
    expected = nccl(1, test_shards.with_gradients, "whole", storage)[0]
    found = nccl(1, test_shards.with_gradients, "fsdp", storage)[0]
    for key, value in expected.items():
        if key.endswith("stats"):
            assert found[key] == pytest.approx(value, rel=1e-12)
        else:
            assert_same(found[key], value, key)


def test_matrices_of_muon(nccl):
    expected, _ = nccl(1, test_muon.stepped, "whole", {})[0]
    found, _ = nccl(1, test_muon.stepped, "fsdp", {})[0]
    assert_same(found, expected)


def trained(mp):
    made, opt = setups.built("fsdp", "stochastic", torch.float32 if mp else torch.bfloat16, mp=mp)
    losses = setups.train(made, opt, range(3))
    return losses, setups.everything(opt)


def test_mixed_precision_equals_bf16_storage(nccl):
    assert_same(nccl(1, trained, True)[0], nccl(1, trained, False)[0])
