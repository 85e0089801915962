"""Files: TRL's layout, whole or absent, and clear about what is wrong with them."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fcoptim.sync import Receiver, Sender, SyncError, files, latest_version, read_file, write_file

from .helpers import BF16, assert_equal, copied, noise, nudge, weights


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def publish(folder: Path, steps: int, **options):
    """A history of a bf16 state in files, with what was served at each version."""
    state = {"a.weight": noise(0, 40, 8), "b": noise(1, 100)}
    sender = Sender(state, **options)
    served = []
    for step in range(steps):
        nudge(state["a.weight"], 0.1, step)
        sender.publish(folder)
        served.append(copied(state))
    return sender, state, served


def read_as_trl_does(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """The reader of TRL's description: start at an anchor, then set the values at the indices of each changed name."""
    held: dict[str, torch.Tensor] = {}
    start = max(number for number in files.versions(folder, anchors=True) if number <= version)
    for number in range(start, version + 1):
        with safe_open(files.file_of(folder, number, anchor=number == start), framework="pt") as file:
            said = file.metadata()
            assert int(said["model_version"]) == number and 0 <= float(said["sparsity"]) <= 1
            if said["sparse"] == "False":
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                continue
            for name in json.loads(said["changed_params"]):
                indices = file.get_tensor(f"{name}.indices")
                assert indices.dtype is torch.int32
                flat = held[name].flatten()
                flat[indices.long()] = file.get_tensor(f"{name}.values")
                held[name] = flat.reshape(held[name].shape)
    return held


class TestLayout:
    def test_names(self, tmp_path):
        publish(tmp_path, 6, anchor_every=4)
        anchors = [f"anchors/step_{number:06d}.safetensors" for number in (0, 4)]
        deltas = [f"deltas/step_{number:06d}.safetensors" for number in (1, 2, 3, 4, 5)]
        assert names(tmp_path) == anchors + deltas
        assert latest_version(tmp_path) == 5 and latest_version(tmp_path / "nothing") == -1

    def test_keys_and_metadata(self, tmp_path):
        publish(tmp_path, 2)
        with safe_open(tmp_path / "deltas/step_000001.safetensors", framework="pt") as file:
            assert sorted(file.keys()) == ["a.weight.indices", "a.weight.values"]
            said = file.metadata()
            changed = len(file.get_tensor("a.weight.values"))
        assert (said["sparse"], said["model_version"], said["changed_params"]) == ("True", "1", '["a.weight"]')
        assert float(said["sparsity"]) == 1 - changed / 420 and said["total_elements"] == "420"
        with safe_open(tmp_path / "anchors/step_000000.safetensors", framework="pt") as file:
            assert sorted(file.keys()) == ["a.weight", "b"]
            assert file.metadata()["sparse"] == "False" and file.metadata()["sparsity"] == "0.0"

    def test_a_reader_of_trl_s_layout_follows(self, tmp_path):
        state = {"a": noise(0, 40, 8), "b": noise(1, 100), "c": noise(2, 5)}
        sender = Sender(state, dense=False, anchor_every=3)
        for step in range(8):
            for name, share in {"a": 0.05, "b": 0.8, "c": 0.3}.items():
                nudge(state[name], share, step)
            if step == 5:
                state["a"][0, 0] = torch.nan
            sender.publish(tmp_path)
            assert_equal(read_as_trl_does(tmp_path, step), state)

    @pytest.mark.parametrize("encoding", ["int32", "gaps", "zlib"])
    def test_reading_gives_what_was_written(self, tmp_path, encoding):
        state = weights()
        sender = Sender(state, encoding=encoding)
        anchor = sender.publish(tmp_path).anchor
        nudge(state["embed.weight"], 0.1, 0)
        nudge(state["norm.weight"], 1.0, 0)
        written = [anchor, sender.publish(tmp_path).delta]
        for update in written:
            read = read_file(files.file_of(tmp_path, update.version, anchor=update.is_anchor))
            plain = {"tensors": ()}
            assert replace(read, **plain).__dict__ == replace(update, **plain).__dict__
            by_name = {one.name: one for one in read.tensors}
            for one in update.tensors:
                other = by_name.pop(one.name)
                assert (one.shape, one.aliases, one.nbytes) == (other.shape, other.aliases, other.nbytes)
                assert (one.indices is None) == (other.indices is None)
                assert one.indices is None or torch.equal(one.indices, other.indices)
            assert not by_name

    def test_file_sizes_are_the_bytes_and_a_header(self, tmp_path):
        state = {"w": noise(0, 200_000)}
        sender = Sender(state, encoding="zlib")
        sender.publish(tmp_path)
        nudge(state["w"], 0.01, 0)
        update = sender.publish(tmp_path).delta
        size = files.file_of(tmp_path, 1, anchor=False).stat().st_size
        assert update.nbytes < size < update.nbytes + 1200

    @settings(max_examples=50, deadline=None)
    @given(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=5, unique=True)
    )
    def test_any_names(self, tmp_path_factory, chosen):
        folder = tmp_path_factory.mktemp("names")
        state = {name: noise(number, 20) for number, name in enumerate(chosen) if name != "__metadata__"}
        sender, held = Sender(state, encoding="gaps"), {}
        sender.publish(folder)
        for name in state:
            state[name][3] += 1
        sender.publish(folder)
        Receiver(held).catch_up(folder)
        assert_equal(held, state)

    def test_names_that_look_like_keys(self, tmp_path):
        """A sparse 'w' would have the key of a tensor called 'w.values'; it is sent whole instead."""
        state = {"w": noise(0, 99), "w.values": noise(1, 99), "v": noise(2, 99), "v.indices": noise(3, 99)}
        sender, held = Sender(state), {}
        sender.publish(tmp_path)
        for tensor in state.values():
            tensor[5] += 1
        delta = sender.publish(tmp_path).delta
        assert [one.indices is None for one in delta.tensors] == [True, False, True, False]
        Receiver(held).catch_up(tmp_path)
        assert_equal(held, state)

    def test_names_that_look_like_keys_without_dense(self, tmp_path):
        state = {"w": noise(0, 99), "w.values": noise(1, 99), "w.values.values": noise(2, 99)}
        state["__metadata__"] = noise(4, 3)
        with pytest.raises(SyncError, match="the key '__metadata__'"):
            Sender(state).publish(tmp_path)
        assert names(tmp_path) == []


class TestWholeOrAbsent:
    @pytest.mark.parametrize("moment", ["save_file", "_sync", "os.replace"])
    def test_failure_leaves_no_file(self, tmp_path, monkeypatch, moment):
        sender, state, served = publish(tmp_path, 2)
        before = names(tmp_path)
        nudge(state["a.weight"], 0.1, 9)

        def fail(*arguments, **options):
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(files.os if moment == "os.replace" else files, moment.removeprefix("os."), fail)
            with pytest.raises(OSError, match="disk full"):
                sender.publish(tmp_path)
        assert names(tmp_path) == before and sender.version == 1
        held = {}
        follower = Receiver(held)
        follower.catch_up(tmp_path)
        assert_equal(held, served[-1])
        sender.publish(tmp_path)
        assert follower.catch_up(tmp_path) == [3]
        assert_equal(held, state)

    @pytest.mark.parametrize("after", ["anchor", "delta"])
    def test_killed_process(self, tmp_path, after):
        """Field report 18: the writer dies between a version's two files, or within one."""
        script = """
import os, sys, torch
from fcoptim.sync import Sender, files
state = {"w": torch.arange(1000).bfloat16()}
sender = Sender(state, anchor_every=2)
replace, count = os.replace, []
def dying(source, target):
    count.append(target)
    if len(count) == int(sys.argv[2]):
        os._exit(9)
    replace(source, target)
files.os.replace = dying
for step in range(4):
    state["w"][step] = -1
    sender.publish(sys.argv[1])
"""
        # Files in order: anchor 0, delta 1, anchor 2, delta 2, ...
        number = "4" if after == "anchor" else "3"
        run = subprocess.run([sys.executable, "-c", script, str(tmp_path), number], check=False)
        assert run.returncode == 9
        held, late = {}, {}
        follower = Receiver(held)
        follower.apply(files.file_of(tmp_path, 0, anchor=True))
        follower.catch_up(tmp_path)
        Receiver(late).catch_up(tmp_path)
        last = 2 if after == "anchor" else 1
        wanted = torch.arange(1000).bfloat16()
        wanted[: last + 1] = -1
        assert follower.version == last
        assert torch.equal(held["w"], wanted) and torch.equal(late["w"], wanted)

    def test_a_version_is_never_overwritten(self, tmp_path):
        publish(tmp_path, 3)
        before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
        with pytest.raises(SyncError, match=r"exists already; pass first_version=fcoptim.sync.latest_version"):
            publish(tmp_path, 1)
        assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before

    def test_a_new_run_goes_on_in_the_folder(self, tmp_path):
        publish(tmp_path, 3)
        held = {}
        follower = Receiver(held)
        follower.catch_up(tmp_path)
        _, state, _ = publish(tmp_path, 2, first_version=latest_version(tmp_path) + 1)
        assert follower.catch_up(tmp_path) == [3, 4]
        assert_equal(held, state)


class TestCatchingUp:
    def test_prefers_deltas(self, tmp_path):
        publish(tmp_path, 7, anchor_every=3)
        follower = Receiver({})
        follower.apply(files.file_of(tmp_path, 0, anchor=True))
        shutil.rmtree(tmp_path / "anchors")
        assert follower.catch_up(tmp_path) == [1, 2, 3, 4, 5, 6]

    def test_starts_at_the_last_anchor(self, tmp_path):
        _, state, _ = publish(tmp_path, 8, anchor_every=3)
        held = {}
        assert Receiver(held).catch_up(tmp_path) == [6, 7]
        assert_equal(held, state)

    def test_goes_round_a_gap(self, tmp_path):
        _, state, _ = publish(tmp_path, 8, anchor_every=3)
        held = {}
        follower = Receiver(held)
        follower.apply(files.file_of(tmp_path, 0, anchor=True))
        files.file_of(tmp_path, 2, anchor=False).unlink()
        assert follower.catch_up(tmp_path) == [1, 6, 7]
        assert_equal(held, state)

    def test_no_way_round(self, tmp_path):
        _, _, served = publish(tmp_path, 5, anchor_every=None)
        held = {}
        follower = Receiver(held)
        files.file_of(tmp_path, 3, anchor=False).unlink()
        with pytest.raises(SyncError, match="version 4 starts from version 3, but version 2 is held"):
            follower.catch_up(tmp_path)
        assert follower.version == 2
        assert_equal(held, served[2])

    def test_partial_files_are_not_seen(self, tmp_path):
        publish(tmp_path, 2)
        (tmp_path / "deltas" / ".step_000002.safetensors.1.tmp").write_bytes(b"half")
        (tmp_path / "deltas" / "step_x.safetensors").write_bytes(b"")
        assert Receiver({}).catch_up(tmp_path) == [0, 1]

    def test_empty_folder(self, tmp_path):
        assert Receiver({}).catch_up(tmp_path) == []


class TestDamage:
    @pytest.fixture(params=["int32", "gaps", "zlib"])
    def chain(self, request, tmp_path):
        _, _, served = publish(tmp_path, 3, encoding=request.param)
        held = {}
        follower = Receiver(held)
        follower.apply(files.file_of(tmp_path, 0, anchor=True))
        follower.apply(files.file_of(tmp_path, 1, anchor=False))
        return follower, held, files.file_of(tmp_path, 2, anchor=False), served

    def refused(self, follower, held, path):
        before = copied(held)
        with pytest.raises(SyncError):
            follower.apply(path)
        assert follower.version == 1
        assert_equal(held, before)

    def test_cut_anywhere(self, chain):
        follower, held, path, served = chain
        whole = path.read_bytes()
        for length in [0, 1, 7, 8, 9, *range(10, len(whole), 37), len(whole) - 1]:
            path.write_bytes(whole[:length])
            self.refused(follower, held, path)
        path.write_bytes(whole)
        follower.apply(path)
        assert_equal(held, served[2])

    def test_one_flipped_bit_anywhere(self, chain):
        """Refused, or without effect: the header ends in a few spaces, and JSON has others."""
        follower, held, path, served = chain
        whole = path.read_bytes()
        generator = torch.Generator().manual_seed(0)
        taken = 0
        for _ in range(400):
            place = int(torch.randint(len(whole), (), generator=generator))
            damaged = bytearray(whole)
            damaged[place] ^= 1 << int(torch.randint(8, (), generator=generator))
            path.write_bytes(damaged)
            other = copied(held)
            second = Receiver(other)
            second.__dict__.update({**follower.__dict__, "_target": other, "_held": dict(follower._held)})
            try:
                second.apply(path)
            except SyncError:
                assert second.version == 1
                assert_equal(other, held)
            else:
                taken += 1
                assert second.version == 2
                assert_equal(other, served[2])
        assert taken < 20

    def test_not_ours(self, chain, tmp_path):
        follower, _held, path, _ = chain
        from safetensors.torch import save_file

        for metadata in (None, {"sparse": "True"}, {"fcoptim": "[]"}, {"fcoptim": "{}"}, {"fcoptim": "no json"}):
            save_file({"w": torch.ones(3)}, path, metadata=metadata)
            with pytest.raises(SyncError, match="damaged or was not written by fcoptim"):
                follower.apply(path)

    def test_unnamed_tensor(self, chain):
        from safetensors.torch import load_file, save_file

        _, _, path, _ = chain
        with safe_open(path, framework="pt") as file:
            said = file.metadata()
        save_file({**load_file(path), "more": torch.ones(1)}, path, metadata=said)
        with pytest.raises(SyncError, match="doesn't name, for example 'more'"):
            read_file(path)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read_file(tmp_path / "none.safetensors")


def test_zstd_files(tmp_path):
    pytest.importorskip("zstandard")
    _, state, _ = publish(tmp_path, 4, encoding="zstd")
    held = {}
    Receiver(held).catch_up(tmp_path)
    assert_equal(held, state)


def test_fsync_comes_before_the_name(tmp_path, monkeypatch):
    """A name must not reach the disk before the bytes it stands for."""
    calls = []
    monkeypatch.setattr(files, "_sync", lambda path: calls.append(("sync", Path(path).name)))
    replace_ = os.replace
    monkeypatch.setattr(files.os, "replace", lambda a, b: calls.append(("replace", Path(b).name)) or replace_(a, b))
    write_file(Sender({"w": torch.ones(1, dtype=BF16)}).publish().anchor, tmp_path)
    name = "step_000000.safetensors"
    assert calls == [("sync", f".{name}.{os.getpid()}.tmp"), ("replace", name), ("sync", "anchors")]
