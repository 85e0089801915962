"""Damaged, mixed up or tampered with: refused by name, with nothing changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fcoptim import CheckpointError, load_checkpoint, save_checkpoint
from fcoptim.checkpoint.layout import MANIFEST
from tests.optimizer.helpers import RULES, assert_same, pair, saved, train, weights

from .helpers import mixed_loss, mixed_pair, rewrite_manifest, saved_run

FILES = [
    "model.safetensors",
    "masters/model.safetensors",
    "optimizer/state.safetensors",
    "optimizer/state.json",
    "extra/extra.json",
    "extra/extra.safetensors",
]


@pytest.fixture
def two_steps(tmp_path) -> Path:
    """Checkpoints of steps 2 and 3 of one run."""
    model, opt = pair("error_feedback")
    for step in (2, 3):
        train(opt, model, range(step - 1, step))
        save_checkpoint(tmp_path / str(step), opt, note=torch.ones(2) * step, number=step + 0.5)
    return tmp_path


def refused(path: Path, said: str, rounding: str = "error_feedback") -> None:
    """Loading fails with a reason, and leaves no trace.

    Raises:
        AssertionError: It doesn't.
    """
    model, other = pair(rounding, seed=5)
    train(other, model, range(1))
    before, state = weights(other), saved(other.state_dict())
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, other)
    assert_same(before, weights(other))
    assert_same(state, saved(other.state_dict()))


def previous_loads(folder: Path) -> None:
    _, other = pair("error_feedback", seed=5)
    assert load_checkpoint(folder / "2", other)["number"] == 2.5


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "missing", "longer", "one bit", "from another step", "empty"])
def test_damaged_files_are_named(two_steps, name, how):
    """Field report 18: each file cut short, lost, or taken from another step; the previous checkpoint still loads."""
    path = two_steps / "3" / name
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "from another step":
        assert data != (two_steps / "2" / name).read_bytes()
        shutil.copy(two_steps / "2" / name, path)
    else:
        flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        path.write_bytes({"truncated": data[:-7], "longer": data + b" ", "one bit": flipped, "empty": b""}[how])
    refused(two_steps / "3", rf"these files are damaged or don't belong to it: {name} (is missing|has \d+|is not)")
    previous_loads(two_steps)


@pytest.mark.parametrize(
    ("rounding", "half"),
    [
        *((rule, half) for rule in RULES for half in ("model.safetensors", "masters/model.safetensors")),
        ("stochastic", "optimizer/state.json"),  # other rules serve the same bits at every count
    ],
)
def test_halves_of_two_steps_are_found_behind_a_manifest_that_fits(tmp_path, rounding, half):
    """Even where every hash is right: the served weights are rebuilt, and differ. Tensors are named."""
    model, opt = pair(rounding)
    for step in (2, 3):
        train(opt, model, range(step * 9))
        save_checkpoint(tmp_path / str(step), opt)
    shutil.copy(tmp_path / "2" / half, tmp_path / "3" / half)
    record = json.loads((tmp_path / "2" / MANIFEST).read_text())["files"][half]
    rewrite_manifest(tmp_path / "3", lambda content: content["files"].update({half: record}))
    refused(tmp_path / "3", r"not what the saved masters and state serve, in these tensors: 0\.weight", rounding)
    _, other = pair(rounding)
    with pytest.warns(UserWarning, match=r"in these tensors: 0\.weight"):
        load_checkpoint(tmp_path / "3", other, strict=False)
    masters = load_file(tmp_path / "3" / "masters" / "model.safetensors")
    for name, master in other.named_masters():
        assert torch.equal(master, masters[name])
    train(other, other.served_model, range(1))


def test_one_bit_in_the_served_half(tmp_path):
    """A single served value that its master would not give."""
    _, opt = saved_run(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors["2.bias"].view(torch.int16)[1] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    refused(tmp_path / "a", r"model\.safetensors (is not|has)", "stochastic")
    with pytest.warns(UserWarning) as said:
        load_checkpoint(tmp_path / "a", opt, strict=False)
    assert any("serve, in these tensors: 2.bias" in str(one.message) for one in said)


def test_edited_manifest(tmp_path):
    """An edit of the manifest shows, whatever it says."""
    saved_run(tmp_path / "a")
    text = (tmp_path / "a" / MANIFEST).read_text()
    for old, new in (('"step": 3', '"step": 4'), ('"size": ', '"size": 1')):
        assert old in text
        (tmp_path / "a" / MANIFEST).write_text(text.replace(old, new, 1))
        refused(tmp_path / "a", r"manifest\.json was edited or damaged", "stochastic")
    for junk in ("", "{", "[]", "null", '{"format": "x"}', "[" * 100_000, "\x00\xff"):
        (tmp_path / "a" / MANIFEST).write_text(junk)
        refused(tmp_path / "a", r"manifest\.json is (damaged|no manifest)", "stochastic")


def test_newer_format(tmp_path):
    """Says what wrote it."""
    saved_run(tmp_path / "a")
    rewrite_manifest(tmp_path / "a", lambda content: content.update(format_version=2))
    refused(tmp_path / "a", r"format version 2, this fcoptim reads 1; install the fcoptim that", "stochastic")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../x", "..\\x", "c:x", "", "a\0b"])
def test_manifest_that_leaves_the_folder(tmp_path, name):
    """Paths in a manifest stay inside, whatever its digest says."""
    saved_run(tmp_path / "a")
    rewrite_manifest(tmp_path / "a", lambda content: content["files"].update({name: {"size": 1, "sha256": "0"}}))
    refused(tmp_path / "a", r"names a file outside its folder", "stochastic")


@pytest.mark.parametrize("name", ["../b/model.safetensors", "/etc/hosts", 3, None])
def test_index_that_leaves_the_folder(tmp_path, name):
    """Paths in an index stay inside."""
    _, opt = saved_run(tmp_path / "b")
    save_checkpoint(tmp_path / "a", opt, max_shard_bytes=200)
    index = tmp_path / "a" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["0.weight"] = name
    index.write_text(json.dumps(content))
    (tmp_path / "a" / MANIFEST).unlink()
    _, other = pair()
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        load_checkpoint(tmp_path / "a", other, strict=False)


def test_index_that_lies(tmp_path):
    """An index that sends a tensor to a file that hasn't got it."""
    _, opt = pair()
    save_checkpoint(tmp_path / "a", opt, max_shard_bytes=200)
    index = tmp_path / "a" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert len(set(content["weight_map"].values())) > 1
    content["weight_map"] = dict(zip(content["weight_map"], reversed(content["weight_map"].values())))
    index.write_text(json.dumps(content))
    (tmp_path / "a" / MANIFEST).unlink()
    _, other = pair()
    with pytest.raises(CheckpointError, match=r"the index says that .* but it doesn't"):
        load_checkpoint(tmp_path / "a", other, strict=False)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_weights_slipped_in(tmp_path, name):
    """Engines read every safetensors file of a folder, so one that was not saved is refused."""
    saved_run(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "a" / name)
    refused(tmp_path / "a", f"{name} is not in the manifest", "stochastic")
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / "README.md").write_text("notes are fine")
    load_checkpoint(tmp_path / "a", pair()[1])


def test_without_a_manifest(tmp_path):
    """An incomplete copy is refused; what is there can be loaded on request, and is still checked for agreement."""
    _, opt = saved_run(tmp_path / "a")
    (tmp_path / "a" / MANIFEST).unlink()
    refused(tmp_path / "a", r"no manifest\.json: it was copied incompletely", "stochastic")
    _, other = pair(seed=5)
    load_checkpoint(tmp_path / "a", other, strict=False)
    assert_same(weights(opt), weights(other))


def test_no_checkpoint_there(tmp_path):
    """An empty folder, a file, nothing."""
    _, opt = pair()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint folder"):
        load_checkpoint(tmp_path / "a", opt)
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="no safetensors files in"):
        load_checkpoint(tmp_path / "a", opt)


# ------------------------------------------------------------- the state behind a manifest that fits


def forged(path: Path, change) -> None:
    """Edit ``optimizer/state.json`` and nothing else; without a manifest nobody notices."""
    state = path / "optimizer" / "state.json"
    content = json.loads(state.read_text())
    change(content)
    state.write_text(json.dumps(content))
    (path / MANIFEST).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("tied"),
        lambda s: s["groups"][0].pop("param_names"),
        lambda s: s["groups"][0].update(options=3),
        lambda s: s["groups"][0].update(options={"$eval": "1"}),
        lambda s: s["groups"][0]["options"].update(rounding="bankers"),
        lambda s: s["groups"][0]["options"].update(seed="x"),
        lambda s: s["state"].pop("0.weight"),
        lambda s: s["state"]["0.weight"].update(weight="nope"),
        lambda s: s["state"]["0.weight"].update(weight="2.weight"),
        lambda s: s["state"]["0.weight"].update(entry=[]),
        lambda s: s["state"]["0.weight"]["entry"].pop("cast_count"),
        lambda s: s["state"]["0.weight"]["entry"].update(cast_count={"$scalar": ["int64", -5]}),
        lambda s: s["state"]["0.weight"]["entry"].update(cast_count={"$scalar": ["int64", "x"]}),
        lambda s: s["state"]["0.weight"]["entry"].update(cast_count={"$tensor": "nope"}),
        lambda s: s["state"]["0.weight"]["entry"].update(error_feedback={"$tensor": "0.weight.exp_avg"}),
        lambda s: s["state"]["0.weight"]["entry"].update(error_feedback={"$tensor": "2.weight.error_feedback"}),
        lambda s: s["state"]["0.weight"]["entry"].update(lag={"$tensor": "2.weight.exp_avg"}),
    ],
)
def test_forged_state(tmp_path, change):
    """Any nonsense is a CheckpointError, before anything is changed."""
    saved_run(tmp_path / "a", rounding="error_feedback")
    forged(tmp_path / "a", change)
    _, other = pair("error_feedback", seed=5)
    before, state = weights(other), saved(other.state_dict())
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "a", other, strict=False)
    assert_same(before, weights(other))
    assert_same(state, saved(other.state_dict()))


def test_wrong_weights_are_refused_for_a_model_with_buffers(tmp_path):
    """A missing buffer is named."""
    model, opt = mixed_pair()
    train(opt, model, range(2), mixed_loss)
    save_checkpoint(tmp_path / "a", opt)
    for half in ("model.safetensors", "masters/model.safetensors"):
        tensors = load_file(tmp_path / "a" / half)
        del tensors["scale"]
        save_file(tensors, tmp_path / "a" / half)
    (tmp_path / "a" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="belongs to another model: it has no 'scale'"):
        load_checkpoint(tmp_path / "a", mixed_pair()[1], strict=False)
