"""transformers' Trainer and TRL's trainers themselves on two ranks: FSDP2 and DDP, training, saving, resuming."""

import pytest
import torch

from fcoptim import cast_, parameter_key

from . import trainer_worker

pytest.importorskip("trl")


def assert_served_is_the_cast(masters, served):
    """Under dither, the default, served weights are a function of the masters; here they are held in either dtype."""
    for name, master in masters.items():
        expected = torch.empty_like(master, dtype=torch.bfloat16)
        cast_(expected, master.contiguous(), rounding="dither", key=parameter_key(0, name), count=0)
        assert torch.equal(served[name], expected.float()), name
    assert any(not torch.equal(masters[name], served[name]) for name in masters)


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("Trainer", "fsdp"),
        ("SFTTrainer", "fsdp"),
        ("GRPOTrainer", "fsdp"),
        ("Trainer", "ddp"),
        ("SFTTrainer", "ddp"),
        ("GRPOTrainer", "ddp"),
    ],
)
def test_trains_saves_and_resumes_on_two_ranks(kind, how, ranks, tmp_path):
    """All ranks hold the same weights; a run resumed from its checkpoint ends bit for bit as the straight one did.

    Under FSDP2 accelerate casts the parameters up and swaps them: the optimizer chooses fp32 storage by itself.
    """
    results = ranks(2, trainer_worker.train, kind, how, str(tmp_path), 4, None)
    losses, masters, served, kinds = results[0]
    assert len(losses) == 4
    for other in results[1:]:
        assert_equal(other[1], masters)
        assert_equal(other[2], served)
    assert kinds == ({"DTensor torch.float32"} if how == "fsdp" else {"Tensor torch.bfloat16"})
    assert_served_is_the_cast(masters, served)
    again = ranks(2, trainer_worker.train, kind, how, str(tmp_path), 4, str(tmp_path / "checkpoint-2"))
    for _, resumed, shown, _ in again:
        assert_equal(resumed, masters)
        assert_equal(shown, served)
