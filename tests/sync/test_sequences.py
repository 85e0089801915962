"""Random histories: whatever happens on the way, a receiver holds a version bit for bit, or none."""

import contextlib
import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.sync import Receiver, Sender, SyncError

from .helpers import assert_equal, bits, copied, weights

SHARED = {"embed.weight", "head.weight"}
SPECIAL = torch.tensor([0x7FC0, 0x7F81, -1, 0x7F80, -0x80, 0, -32768, 1, -32767, 0x3F80], dtype=torch.int16)

write = st.tuples(st.sampled_from(sorted(weights())), st.integers(0, 400), st.integers(0, 2**32 - 1), st.booleans())
step = st.tuples(st.lists(write, max_size=6), st.sampled_from(["deliver", "lose", "fail", "skip"]), st.booleans())


class Lost(Exception):
    pass


def lose(update):
    raise Lost


def make(state, writes):
    """Write arbitrary bits into single elements, special values included; only bools stay bools."""
    for name, place, value, special in writes:
        row = bits(state[name]) if state[name].numel() else None
        if row is None:
            continue
        if state[name].dtype is torch.bool:
            row[place % len(row)] = value % 2
        elif special and row.dtype is torch.int16:
            row[place % len(row)] = SPECIAL[value % len(SPECIAL)]
        else:
            size = 8 * row.element_size()
            row[place % len(row)] = (value % (1 << min(size, 32))) - (1 << (min(size, 32) - 1) if size > 8 else 0)


def packings():
    return st.sampled_from(["int32", "gaps", "zlib"])


@settings(max_examples=80, deadline=None)
@given(st.lists(step, min_size=1, max_size=12), packings(), st.booleans(), st.sampled_from([1, 3, None]))
def test_in_memory(steps, encoding, dense, anchor_every):
    """Updates that are lost on the way make later deltas be refused, untouched; an anchor heals that."""
    source, held = weights(), {}
    sender = Sender(source, encoding=encoding, dense=dense, anchor_every=anchor_every)
    receiver = Receiver(held)
    for writes, fate, anchor in steps:
        make(source, writes)
        if fate == "skip":
            continue
        if fate == "fail":
            try:
                sender.publish(lose, anchor=anchor)
                raise AssertionError("the failure was swallowed")
            except Lost:
                continue
        publication = sender.publish(anchor=anchor)
        if fate == "lose":
            continue
        before, version = copied(held), receiver.version
        try:
            receiver.apply(publication)
        except SyncError:
            assert publication.anchor is None and publication.delta.base_version != version
            assert receiver.version == version
            assert_equal(held, before)
        else:
            assert receiver.version == publication.version and receiver.checksum == publication.update.checksum
            assert_equal(held, source)
            assert held["embed.weight"] is held["head.weight"]
            receiver.verify()


@settings(max_examples=40, deadline=None)
@given(st.lists(step, min_size=1, max_size=10), packings(), st.sampled_from([1, 2, 4, None]), st.data())
def test_through_files(steps, encoding, anchor_every, data):
    """A follower, and one that joins late, reach the last version from the files alone."""
    source, held = weights(), {}
    with tempfile.TemporaryDirectory() as folder:
        sender = Sender(source, encoding=encoding, anchor_every=anchor_every)
        follower, published = Receiver(held), {}
        for writes, fate, anchor in steps:
            make(source, writes)
            if fate == "fail":
                with contextlib.suppress(Lost):
                    sender.publish(lose, anchor=anchor)
            elif fate != "skip":
                sender.publish(folder, anchor=anchor)
                published[sender.version] = copied(source)
            if data.draw(st.booleans()) and published:
                follower.catch_up(folder)
                assert_equal(held, published[sender.version])
        late = {}
        if published:
            Receiver(late).catch_up(folder)
            follower.catch_up(folder)
            assert_equal(late, published[sender.version])
            assert_equal(held, published[sender.version])
            assert follower.catch_up(folder) == []
