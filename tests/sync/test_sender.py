"""What a sender finds, in which form it sends it, and what it keeps."""

import pytest
import torch
from torch import nn

from fcoptim import Exporter
from fcoptim.sync import Receiver, Sender, SyncError, difference

from .helpers import BF16, assert_equal, copied, noise, nudge, weights


def names(update):
    return [one.name for one in update.tensors]


class TestChanges:
    def test_finds_exactly_what_changed(self):
        state = weights()
        sender = Sender(state)
        sender.publish()
        state["layer.weight"][[3, 250]] += 1
        state["scale"].neg_()
        (layer, scale) = sender.publish().delta.tensors
        assert layer.name == "layer.weight" and layer.indices.tolist() == [3, 250]
        assert layer.indices.dtype is torch.int32 and layer.values.dtype is BF16
        assert torch.equal(layer.values, state["layer.weight"][[3, 250]])
        assert scale.name == "scale" and scale.shape == ()

    def test_diffs_against_what_was_published_last(self):
        """A value that went and came back between two publications is not sent."""
        state = weights()
        sender = Sender(state)
        sender.publish()
        before = state["layer.weight"][5].clone()
        state["layer.weight"][5] = 100
        state["layer.weight"][5] = before
        assert sender.publish().delta.tensors == []

    def test_bits_count_not_values(self):
        state = {"w": torch.tensor([0.0, torch.nan, 1.0, 1.0], dtype=BF16)}
        sender = Sender(state, dense=False)
        sender.publish()
        state["w"][0] = -0.0
        state["w"].view(torch.int16)[1] = 0x7FC1
        assert sender.publish().delta.tensors[0].indices.tolist() == [0, 1]

    def test_an_update_is_a_copy(self):
        state = weights()
        sender = Sender(state)
        sender.publish()
        state["layer.weight"][5] = 100
        state["norm.weight"] += 1
        delta = sender.publish().delta
        values = {one.name: one.values.clone() for one in delta.tensors}
        nudge(state["layer.weight"], 1.0, 0)
        state["norm.weight"] += 1
        assert all(torch.equal(one.values, values[one.name]) for one in delta.tensors)

    def test_chunks_don_t_matter(self, monkeypatch):
        state = {"w": noise(0, 1000)}
        sender = Sender(state, dense=False)
        sender.publish()
        nudge(state["w"], 0.1, 1)
        whole = sender.publish().delta.tensors[0]
        monkeypatch.setattr(difference, "_CHUNK", 7)
        nudge(state["w"], 0.1, 1)
        assert torch.equal(sender.publish().delta.tensors[0].indices, whole.indices)

    def test_strides_don_t_matter(self):
        """Indices are row-major in the tensor's shape, whatever its memory looks like, on both sides."""
        state = {"conv": noise(0, 4, 3, 5, 5).to(memory_format=torch.channels_last)}
        held = {"conv": torch.zeros(3, 4, 5, 5, dtype=BF16).transpose(0, 1)}
        sender, receiver = Sender(state), Receiver(held)
        receiver.apply(sender.publish())
        state["conv"][1, 2, 3, 4] = 9
        state["conv"][3, 0, 1, 0] = 8
        publication = sender.publish()
        assert publication.delta.tensors[0].indices.tolist() == [1 * 75 + 2 * 25 + 3 * 5 + 4, 3 * 75 + 5]
        receiver.apply(publication)
        assert_equal(held, state)
        assert not held["conv"].is_contiguous()


class TestDenseOrSparse:
    @pytest.mark.parametrize("changed, dense", [(1, False), (100, False), (101, True), (300, True)])
    def test_int32_pays_up_to_a_third(self, changed, dense):
        """A sparse value costs 6 bytes, a dense one 2; at the same size sparse stays."""
        state = {"w": torch.zeros(300, dtype=BF16)}
        sender = Sender(state)
        sender.publish()
        state["w"][:changed] = 1
        update = sender.publish().delta
        assert (update.tensors[0].indices is None) == dense
        assert update.nbytes == min(6 * changed, 600) and update.changed == changed

    @pytest.mark.parametrize("encoding, share", [("gaps", 0.6), ("zlib", 0.7)])
    def test_packed_indices_pay_longer(self, encoding, share):
        """With a byte for each index sparse pays up to two thirds, with compressed ones beyond."""
        sizes = {}
        for dense in (True, False):
            state = {"w": noise(0, 20_000)}
            sender = Sender(state, encoding=encoding, dense=dense)
            sender.publish()
            nudge(state["w"], share, 1)
            update = sender.publish().delta
            sizes[dense] = update.nbytes
            assert update.tensors[0].indices is not None
        assert sizes[True] == sizes[False] < state["w"].nbytes

    @pytest.mark.parametrize("encoding", ["gaps", "zlib"])
    def test_packed_falls_back_too(self, encoding):
        state = {"w": noise(0, 20_000)}
        sender = Sender(state, encoding=encoding)
        sender.publish()
        nudge(state["w"], 0.99, 1)
        update = sender.publish().delta
        assert update.tensors[0].indices is None and update.nbytes == state["w"].nbytes

    def test_without_dense_all_is_sparse(self):
        state = weights()
        sender = Sender(state, dense=False)
        sender.publish()
        for tensor in (state["embed.weight"], state["norm.weight"], state["norm.batches"]):
            tensor.add_(1)
        update = sender.publish().delta
        assert names(update) == ["embed.weight", "norm.weight", "norm.batches"]
        assert all(one.indices is not None and len(one.indices) == one.numel for one in update.tensors)

    def test_nan_goes_dense(self):
        state = {"w": torch.zeros(300, dtype=BF16)}
        sender = Sender(state)
        sender.publish()
        state["w"][7] = torch.nan
        assert sender.publish().delta.tensors[0].indices is None
        state["w"][7] = 1
        assert sender.publish().delta.tensors[0].indices.tolist() == [7]

    def test_beyond_int32(self, monkeypatch):
        """A tensor whose indices int32 can't say is sent whole, or refused by name; the limit is lowered here."""
        monkeypatch.setattr(difference, "MAX_SPARSE_ELEMENTS", 299)
        for dense in (True, False):
            state = {"huge": torch.zeros(300, dtype=BF16), "w": torch.zeros(299, dtype=BF16)}
            sender = Sender(state, dense=dense)
            sender.publish()
            state["w"][5] = 1
            assert sender.publish().delta.tensors[0].indices is not None
            state["huge"][5] = 1
            if dense:
                assert sender.publish().delta.tensors[0].indices is None
            else:
                with pytest.raises(SyncError, match="'huge' has 300 elements; int32 indices reach 299"):
                    sender.publish()
                assert sender.version == 1

    def test_the_limit_is_that_of_int32(self):
        assert torch.iinfo(torch.int32).max == difference.MAX_SPARSE_ELEMENTS


class TestTies:
    def test_one_tensor_is_sent_once(self):
        state = weights()
        sender = Sender(state)
        anchor = sender.publish().anchor
        assert [one.aliases for one in anchor.tensors if one.name == "embed.weight"] == [("head.weight",)]
        assert "head.weight" not in names(anchor)
        state["head.weight"][0, 0] = 5
        (update,) = sender.publish().delta.tensors
        assert update.name == "embed.weight" and update.aliases == ("head.weight",)

    def test_empty_tensors_are_not_tied(self):
        state = {"a": torch.empty(0, dtype=BF16), "b": torch.empty(0, dtype=BF16)}
        assert names(Sender(state).publish().anchor) == ["a", "b"]

    @pytest.mark.parametrize("change", ["untie", "tie", "add", "remove", "reshape", "widen"])
    def test_another_structure_gives_an_anchor(self, change):
        """Parameters added later, and whatever else changes the set of tensors."""
        state = weights()
        sender = Sender(state, anchor_every=None)
        sender.publish()
        if change == "untie":
            state["head.weight"] = state["head.weight"].clone()
        elif change == "tie":
            state["norm.bias"] = state["norm.weight"]
        elif change == "add":
            state["new"] = noise(7, 5)
        elif change == "remove":
            del state["mask"]
        elif change == "reshape":
            state["layer.weight"] = state["layer.weight"].view(30, 10)
        else:
            state["layer.weight"] = state["layer.weight"].float()
        publication = sender.publish()
        assert publication.delta is None and publication.anchor.version == 1
        held = {}
        Receiver(held).apply(publication)
        assert_equal(held, state)
        state["embed.weight"][0, 0] += 1
        assert sender.publish().delta.base_version == 1


class TestNumbering:
    def test_versions_and_anchors(self):
        state = weights()
        sender = Sender(state, anchor_every=3, first_version=5)
        assert sender.version is None
        seen = [sender.publish() for _ in range(7)]
        assert [one.version for one in seen] == [5, 6, 7, 8, 9, 10, 11]
        assert [one.anchor is not None for one in seen] == [True, False, False, True, False, False, True]
        assert [one.delta is not None for one in seen] == [False] + 6 * [True]
        assert [one.delta.base_version for one in seen[1:]] == [5, 6, 7, 8, 9, 10]

    def test_a_number_is_never_used_twice(self):
        """What was not delivered keeps its number; the next version starts from the last delivered one."""
        state = weights()
        sender = Sender(state, anchor_every=None)
        sender.publish()
        state["layer.weight"][1] = 50

        def fail(update):
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            sender.publish(fail)
        assert sender.version == 0
        state["layer.weight"][2] = 60
        publication = sender.publish()
        assert publication.version == 2 and publication.delta.base_version == 0
        assert publication.delta.tensors[0].indices.tolist() == [1, 2]
        assert publication.anchor is not None, "for those who saw a part of the version that failed"

    def test_anchor_on_request(self):
        sender = Sender(weights(), anchor_every=None)
        sender.publish()
        assert sender.publish().anchor is None
        assert sender.publish(anchor=True).anchor is not None

    def test_runs_differ(self):
        state = weights()
        assert Sender(state).run != Sender(state).run


class TestMemory:
    def test_keeps_two_bytes_of_each_bf16_weight_and_no_more(self):
        state = weights()
        sender = Sender(state)
        sender.publish()
        narrow = {id(t): t.nbytes for t in state.values() if t.dtype is BF16}
        assert sender.snapshot_bytes == sum(narrow.values())

    def test_frozen_parameters_have_no_copy(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        model[0].requires_grad_(False)
        sender = Sender(model)
        sender.publish()
        assert sender.snapshot_bytes == 2 * (8 * 4 + 4)
        with torch.no_grad():
            model[0].weight[0, 0] += 1
        assert sender.publish().delta.tensors[0].indices is None

    def test_an_untouched_parameter_is_not_read(self, monkeypatch):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        sender = Sender(model)
        sender.publish()
        with torch.no_grad():
            model[1].weight[0, 0] += 1
        read = []
        found = difference.words
        monkeypatch.setattr(difference, "words", lambda tensor: read.append(tensor.shape) or found(tensor))
        assert names(sender.publish().delta) == ["1.weight"]
        assert set(read) == {(4, 8), (1,)}, "the weight that was written, and its one new value"

    def test_other_memory_is_noticed(self):
        model = nn.Linear(8, 8).bfloat16()
        sender = Sender(model)
        sender.publish()
        model.weight.data = model.weight.data + 1
        assert names(sender.publish().delta) == ["weight"]

    def test_a_write_past_the_counter_needs_a_full_read(self):
        model = nn.Linear(8, 8).bfloat16()
        sender = Sender(model)
        sender.publish()
        model.weight.data.add_(1)
        assert sender.publish().delta.tensors == []
        assert names(sender.publish(anchor=True).delta) == ["weight"]

    def test_batch_norm_s_statistics_are_read(self):
        """Torch writes them without raising their version counter."""
        model = nn.BatchNorm1d(4)
        sender, held = Sender(model), {}
        receiver = Receiver(held)
        receiver.apply(sender.publish())
        model(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
        receiver.apply(sender.publish())
        assert_equal(held, model.state_dict())


class TestSources:
    def test_exporter(self):
        masters = {"w": noise(0, 500, dtype=torch.float32), "b": noise(1, 3, dtype=torch.float32)}
        export = Exporter(rounding="dither", keep_fp32=("b",))
        served = {}

        def source():
            served.update(export(masters))
            return served

        sender, held = Sender(source), {}
        receiver = Receiver(held)
        for _ in range(4):
            receiver.apply(sender.publish())
            assert_equal(held, served)
            masters["w"] += 1e-4
            masters["b"] += 1e-4
        assert 0 < sender.publish().delta.changed < 400

    def test_fresh_tensors_at_the_same_address(self):
        """An allocator hands out the same memory again; a state dict made anew is compared all the same."""
        source = {"w": noise(0, 500)}
        sender, held = Sender(lambda: copied(source)), {}
        receiver = Receiver(held)
        for number in range(5):
            receiver.apply(sender.publish())
            assert_equal(held, source)
            source["w"][number] += 1

    def test_stream(self):
        """Pairs that come one by one, as gathered shards do."""
        source = weights()
        sender, held = Sender(lambda: iter(source.items()), anchor_every=2), {}
        receiver = Receiver(held)
        for number in range(5):
            receiver.apply(sender.publish())
            assert_equal(held, source)
            source["embed.weight"].view(-1)[number] += 1
        source["more"] = noise(1, 3)
        with pytest.raises(SyncError, match=r"call publish\(anchor=True\)"):
            sender.publish()
        receiver.apply(sender.publish(anchor=True))
        assert_equal(held, source)

    def test_two_tensors_of_one_name(self):
        with pytest.raises(SyncError, match="two tensors of one name"):
            Sender(lambda: iter([("a", noise(0, 2)), ("a", noise(1, 2))])).publish()

    def test_what_is_no_tensor_is_left_out(self):
        state = {"w": noise(0, 3), "_extra_state": b"bytes", "n": 3}
        assert names(Sender(state).publish().anchor) == ["w"]

    @pytest.mark.parametrize("source", [3, "model", [("w", torch.ones(1))]])
    def test_refuses_others(self, source):
        with pytest.raises(TypeError):
            Sender(source)

    def test_refuses_meta(self):
        with pytest.raises(ValueError, match="'w' is on the meta device"):
            Sender({"w": torch.empty(3, device="meta")}).publish()


@pytest.mark.parametrize(
    "option, message",
    [
        ({"encoding": "lz4"}, "encoding must be one of"),
        ({"anchor_every": 0}, "at least 1, or None, got 0"),
        ({"first_version": -1}, "must not be negative, got -1"),
        ({"snapshot": "disk"}, "'cpu' or 'same', got 'disk'"),
    ],
)
def test_wrong_options(option, message):
    with pytest.raises(ValueError, match=message):
        Sender(weights(), **option)


def test_wrong_delivery():
    with pytest.raises(TypeError, match="a folder or a function"):
        Sender(weights()).publish(3)
