"""Sharded parameters: one rank publishes what all gather together."""

import pytest
import torch

from fcoptim.sync import Receiver, Sender

from ..distributed import setups
from ..distributed.pool import Pool
from .helpers import assert_equal


@pytest.fixture(scope="module")
def ranks():
    """``ranks(world, function, *args)`` runs a function on every rank and returns the results by rank."""
    pool = Pool(2)
    yield pool.run
    pool.close()


def published(dtype, anchor_every):
    import torch.distributed as dist

    _, opt = setups.built("fsdp", "stochastic", dtype, lr=1e-5)
    held = {}
    sender, follower = Sender(opt, anchor_every=anchor_every), Receiver(held)
    seen = []
    for step in range(4):
        if dist.get_rank() == 0:
            publication = sender.publish()
            follower.apply(publication)
            follower.verify()
            seen.append(
                publication.delta is not None and any(one.indices is not None for one in publication.delta.tensors)
            )
        else:
            for _ in opt.served_state_dict(full=True):
                pass
        whole = {name: tensor.clone() for name, tensor in opt.served_state_dict(full=True)}
        if dist.get_rank() == 0:
            assert_equal(held, whole)
        setups.step_with_gradients(opt, range(step, step + 1))
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("anchor_every", [2, None])
def test_fsdp(dtype, anchor_every, ranks):
    """Two ranks share the parameters; rank 0 publishes while rank 1 iterates along."""
    seen, others = ranks(2, published, dtype, anchor_every)
    assert seen[0] is False and all(seen[1:]) and others == []


def refused():
    made, _ = setups.built("fsdp", "stochastic", torch.bfloat16)
    with pytest.raises(TypeError, match=r"'0\.weight' is a DTensor.*opt\.served_state_dict\(full=True\)"):
        Sender(made).publish()


def test_shards_are_not_taken_for_the_whole(ranks):
    ranks(2, refused)
