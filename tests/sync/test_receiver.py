"""What a receiver accepts, and that what it refuses leaves it as it was."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fcoptim.sync import Receiver, Sender, SyncError, receiver, target

from .helpers import BF16, assert_equal, bits, copied, noise, nudge, weights


def history(length: int = 4):
    """A sender's state, its publications, and what it served at each."""
    state = weights()
    sender = Sender(state, anchor_every=None)
    published, served = [sender.publish(lambda update: None)], [copied(state)]
    anchor = published[0].anchor
    frozen = [replace(one, values=one.values.clone()) for one in anchor.tensors]
    published[0] = replace(published[0], anchor=replace(anchor, tensors=frozen))
    for number in range(1, length):
        nudge(state["embed.weight"], 0.1, number)
        nudge(state["norm.weight"], 1.0, number)
        nudge(state["layer.weight"], 0.9, number)
        published.append(sender.publish())
        served.append(copied(state))
    return sender, state, published, served


def at(version: int):
    """A receiver that stands at a version, what it holds, and the history."""
    _sender, _state, published, served = history()
    held = {}
    follower = Receiver(held)
    for publication in published[: version + 1]:
        follower.apply(publication)
    return follower, held, published, served


def refused(follower, held, update, message):
    before, version, checksum = copied(held), follower.version, follower.checksum
    with pytest.raises(SyncError, match=message):
        follower.apply(update)
    assert (follower.version, follower.checksum) == (version, checksum)
    assert_equal(held, before)


class TestOrder:
    def test_every_version_is_the_sender_s(self):
        follower, held, published, served = at(0)
        for publication, state in zip(published[1:], served[1:]):
            assert follower.apply(publication) == publication.version
            assert_equal(held, {**state, "head.weight": state["embed.weight"]})
            follower.verify()

    def test_a_delta_first(self):
        _, _, published, _ = at(0)
        refused(Receiver({}), {}, published[1], "version 1 starts from version 0; apply an anchor first")

    def test_gap(self):
        follower, held, published, _ = at(1)
        refused(follower, held, published[3], "version 3 starts from version 2, but version 1 is held")

    def test_again(self):
        follower, held, published, _ = at(2)
        refused(follower, held, published[2], "version 2 is not newer than version 2")
        refused(follower, held, published[0], "version 0 is not newer than version 2")

    def test_another_sender(self):
        follower, held, _, _ = at(1)
        other = Sender(weights(5), first_version=1)
        other.publish()
        refused(follower, held, other.publish().delta, "is of another sender")

    def test_another_sender_s_anchor_starts_anew(self):
        follower, held, _, _ = at(1)
        state = weights(5)
        other = Sender(state, first_version=2)
        follower.apply(other.publish())
        assert_equal(held, state)
        follower.apply(other.publish())

    def test_foreign_base(self):
        """The same run and numbers, but other weights under the base."""
        follower, held, published, _ = at(1)
        refused(follower, held, replace(published[2].delta, base=7), "it has another base")

    def test_an_anchor_skips_versions(self):
        sender, state, published, _ = history()
        held = {}
        follower = Receiver(held)
        follower.apply(published[0])
        follower.apply(sender.publish(anchor=True))
        assert follower.version == 4
        assert_equal(held, state)


class TestWeightsWrittenFromOutside:
    def test_where_the_next_change_falls(self):
        follower, held, published, _ = at(1)
        place = int(published[2].delta.tensors[0].indices[0])
        held["embed.weight"].view(-1)[place] += 1
        refused(follower, held, published[2], "weights were written here since the last one")

    def test_elsewhere_verify_tells(self):
        follower, held, published, _ = at(1)
        taken = set(published[2].delta.tensors[0].indices.tolist())
        place = next(index for index in range(320) if index not in taken)
        held["embed.weight"].view(-1)[place] += 1
        follower.apply(published[2])
        with pytest.raises(SyncError, match=r"'embed\.weight', 'head\.weight' differ from version 2"):
            follower.verify()

    def test_verify_before_anything(self):
        with pytest.raises(SyncError, match="no version here"):
            Receiver({}).verify()


class TestDamagedUpdates:
    @pytest.mark.parametrize("part", ["values", "indices", "dense"])
    def test_one_flipped_bit(self, part):
        follower, held, published, _ = at(1)
        delta = published[2].delta
        for number, one in enumerate(delta.tensors):
            if (one.indices is None) != (part == "dense"):
                continue
            row = bits(one.indices if part == "indices" else one.values).clone()
            row[-1] ^= 1
            shaped = row.view(one.values.dtype).view(one.values.shape) if part != "indices" else row
            broken = replace(one, **{"indices" if part == "indices" else "values": shaped})
            tensors = [*delta.tensors[:number], broken, *delta.tensors[number + 1 :]]
            refused(follower, held, replace(delta, tensors=tensors), "checksum|not ascending")
        follower.apply(delta)

    def test_a_missing_tensor(self):
        follower, held, published, _ = at(1)
        delta = published[2].delta
        refused(follower, held, replace(delta, tensors=delta.tensors[1:]), "leads to checksum")

    @pytest.mark.parametrize("indices", [[5, 5], [6, 5], [-1, 5], [5, 320]])
    def test_indices(self, indices):
        follower, held, published, _ = at(1)
        delta = published[2].delta
        one = replace(delta.tensors[0], indices=torch.tensor(indices).int(), values=noise(0, 2))
        refused(follower, held, replace(delta, tensors=[one]), r"not ascending, or leave 0\.\.319")

    @pytest.mark.parametrize(
        "change", [{"indices": torch.tensor([1])}, {"indices": torch.tensor([1, 2]).int()}, {"values": noise(0, 1, 1)}]
    )
    def test_forms(self, change):
        follower, held, published, _ = at(1)
        delta = published[2].delta
        one = replace(delta.tensors[0], **{"indices": torch.tensor([1]).int(), "values": noise(0, 1), **change})
        refused(follower, held, replace(delta, tensors=[one]), "both have to be 1-D and equally long")

    def test_unknown_tensor(self):
        follower, held, published, _ = at(1)
        delta = published[2].delta
        one = replace(delta.tensors[0], name="nowhere")
        refused(follower, held, replace(delta, tensors=[one]), "'nowhere', which no version here has had")


class TestFit:
    def test_model_on_both_sides(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
        other = copy.deepcopy(model)
        parameters = list(other.parameters())
        sender, follower = Sender(model), Receiver(other)
        follower.apply(sender.publish())
        nudge(model[0].weight, 0.3, 1)
        model[1].num_batches_tracked.add_(1)
        follower.apply(sender.publish())
        assert_equal(other.state_dict(), model.state_dict())
        assert all(a is b for a, b in zip(parameters, other.parameters()))
        assert all(parameter.requires_grad for parameter in other.parameters())

    def test_writes_raise_the_version_counter(self):
        model = nn.Linear(4, 4).bfloat16()
        other = copy.deepcopy(model)
        before = other.weight._version
        Receiver(other).apply(Sender(model).publish())
        assert other.weight._version > before

    def test_bf16_values_in_fp32_storage(self):
        """What a fp32 copy holds is the served value exactly, NaN payloads included."""
        state = {"w": noise(0, 300)}
        held = {"w": torch.zeros(300)}
        sender, follower = Sender(state, dense=False), Receiver(held)
        follower.apply(sender.publish())
        nudge(state["w"], 0.1, 1)
        state["w"].view(torch.int16)[:3] = torch.tensor([0x7F81, -1, -32768], dtype=torch.int16)
        follower.apply(sender.publish())
        assert torch.equal(bits(held["w"]), bits(state["w"]).int() << 16)
        follower.verify()
        held["w"][9] += 1e-6
        with pytest.raises(SyncError, match="'w' differ"):
            follower.verify()
        state["w"][9] += 1
        refused(follower, held, sender.publish(), "not on the bf16 grid")

    @pytest.mark.parametrize(
        "held, message",
        [
            (
                {"w": torch.zeros(300, dtype=torch.float16)},
                "'w' is torch.float16 here and torch.bfloat16 at the sender",
            ),
            ({"w": torch.zeros(30, 10, dtype=BF16)}, r"'w' has shape \(30, 10\) here and \(300,\)"),
            ({"w": torch.zeros(1, dtype=BF16).expand(300)}, "'w' is an expanded tensor"),
            ({"w": torch.zeros(300, dtype=BF16), "v": torch.zeros(1)}, "the anchor has no 'v'"),
        ],
    )
    def test_refuses_what_can_t_hold_it(self, held, message):
        refused(Receiver(held), held, Sender({"w": noise(0, 300)}).publish(), message)

    def test_more_names_here(self):
        held = {"w": torch.zeros(300, dtype=BF16), "v": torch.zeros(1)}
        state = {"w": noise(0, 300)}
        Receiver(held, strict=False).apply(Sender(state).publish())
        assert torch.equal(held["w"], state["w"]) and held["v"] == 0

    def test_a_model_lacks_a_tensor(self):
        model = nn.Linear(3, 3).bfloat16()
        before = copied(model.state_dict())
        with pytest.raises(SyncError, match="no tensor 'extra'; its model has to be built like the sender's"):
            Receiver(model).apply(Sender({**model.state_dict(), "extra": noise(0, 2)}).publish())
        assert_equal(model.state_dict(), before)

    def test_wrappers_prefixes(self):
        state = {"module.layer._orig_mod.weight": noise(0, 5), "layer.bias": noise(1, 5)}
        held = {"layer.weight": noise(2, 5), "_orig_mod.layer.bias": noise(3, 5)}
        Receiver(held).apply(Sender(state).publish())
        assert torch.equal(held["layer.weight"], state["module.layer._orig_mod.weight"])
        assert torch.equal(held["_orig_mod.layer.bias"], state["layer.bias"])

    @pytest.mark.parametrize("held", [3, [torch.ones(1)], None])
    def test_takes_models_and_state_dicts(self, held):
        with pytest.raises(TypeError, match="a model or a state dict"):
            Receiver(held)


class TestTies:
    def send(self, held):
        state = weights()
        sender, follower = Sender(state), Receiver(held)
        follower.apply(sender.publish())
        state["head.weight"][3, 2] += 1
        follower.apply(sender.publish())
        follower.verify()
        return follower, sender, state

    def test_untied_here(self):
        """Both names are updated where the sender has one tensor and the receiver two."""
        held = copied(weights(3))
        _, _, state = self.send(held)
        assert held["head.weight"] is not held["embed.weight"]
        assert_equal(held, state)

    def test_untied_here_and_written_apart(self):
        held = copied(weights(3))
        follower, sender, state = self.send(held)
        held["head.weight"][3, 2] += 1
        state["head.weight"][3, 2] += 1
        refused(follower, held, sender.publish(), "are tied at the sender and differ here")

    @pytest.mark.parametrize("missing", ["embed.weight", "head.weight"])
    def test_one_name_missing_here(self, missing):
        """A checkpoint of a tied model often has one of the names only."""
        state = weights()
        held = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != missing}
        Receiver(held).apply(Sender(state).publish())
        assert missing not in held
        assert_equal(held, {name: state[name] for name in held})

    def test_tied_here_alone(self):
        shared = noise(0, 5)
        held = {"a": shared, "b": shared}
        state = {"a": noise(1, 5), "b": noise(2, 5)}
        refused(Receiver(held), held, Sender(state).publish(), "'a' and 'b' are one tensor here and two at the sender")


def test_an_interrupted_write_leaves_no_version(monkeypatch):
    """If writing itself fails, half is written: the receiver says so, and an anchor heals it."""
    follower, held, published, served = at(1)
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return target.write_words(*arguments)

    monkeypatch.setattr(receiver, "write_words", failing)
    with pytest.raises(KeyboardInterrupt):
        follower.apply(published[2])
    monkeypatch.undo()
    assert follower.version is None
    with pytest.raises(SyncError, match="apply an anchor first"):
        follower.apply(published[3])
    follower.apply(published[0])
    assert_equal(held, {**served[0], "head.weight": served[0]["embed.weight"]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("here, there", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
@pytest.mark.parametrize("snapshot", ["cpu", "same"])
@pytest.mark.parametrize("encoding", ["int32", "zlib"])
def test_devices(here, there, snapshot, encoding):
    """Both sides may lie on a GPU; checksums agree with the CPU's."""
    state = {name: tensor.to(here) for name, tensor in weights().items()}
    state["head.weight"] = state["embed.weight"]
    held = {name: torch.zeros_like(tensor, device=there) for name, tensor in state.items()}
    sender, follower = Sender(state, snapshot=snapshot, encoding=encoding), Receiver(held)
    for number in range(5):
        follower.apply(sender.publish())
        assert_equal(held, state)
        follower.verify()
        for name, share in {"embed.weight": 0.1, "layer.weight": 0.9, "norm.weight": 1.0}.items():
            nudge(state[name], share, number)
    assert all(tensor.device.type == there for tensor in held.values())
