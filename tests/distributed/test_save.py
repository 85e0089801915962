"""``save_checkpoint`` and ``load_checkpoint`` by several ranks: one layout, whole or absent, bit for bit."""

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

import fcoptim.lag
from fcoptim import CheckpointError, FairCastOptimizer, load_checkpoint, save_checkpoint
from fcoptim.checkpoint.audit import audit
from fcoptim.checkpoint.folder import PARTIAL
from fcoptim.checkpoint.writing import deal

from ..checkpoint.helpers import contents, names, rewrite_manifest
from ..optimizer.helpers import assert_same
from . import setups

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "stochastic": {"rounding": "stochastic"},
    "error_feedback": {"rounding": "error_feedback"},
    "ema": {"rounding": "dither", "lag": fcoptim.lag.Ema(3).options},
    "delay": {"rounding": "stochastic", "lag": fcoptim.lag.Delay(2).options},
    "dead_zone": {"rounding": "error_feedback", "lag": fcoptim.lag.DeadZone(0.7).options},
    "kept": {"rounding": "stochastic", "keep_fp32": "2.*", "dtype": torch.float32},
    "storage": {"rounding": "dither", "dtype": torch.float32},
    "sgd": {"rounding": "stochastic", "optimizer": torch.optim.SGD, "momentum": 0.9},
    "muon": {"rounding": "stochastic", "optimizer": fcoptim.Muon},
}


def save(how, run, path, steps=3, **options):
    """Train, save, train on; the state when it was saved and at the end."""
    _, opt = setups.built(how, **RUNS[run])
    setups.step_with_gradients(opt, range(steps))
    save_checkpoint(path, opt, note="of all", rank=dist.get_rank(), noise=torch.arange(5.0), **options)
    saved = setups.everything(opt)
    setups.step_with_gradients(opt, range(steps, steps + 2))
    return saved, setups.everything(opt)


def other(how, run):
    """A model with other weights and an optimizer with another seed and lr."""
    options = {"dtype": torch.bfloat16, **RUNS[run]}
    rounding, dtype = options.pop("rounding"), options.pop("dtype")
    made = setups.shard(setups.model(dtype, seed=1), how)
    optimizer = options.pop("optimizer", torch.optim.AdamW)
    return FairCastOptimizer(made, optimizer, rounding=rounding, seed=9, lr=1e-2, **options)


def resume(how, run, path, steps=3, warm=False):
    """The same from the folder on."""
    opt = other(how, run)
    if warm:
        setups.step_with_gradients(opt, range(90, 92))
    extra = load_checkpoint(path, opt)
    assert (extra["note"], extra["rank"], extra["step"]) == ("of all", 0, steps)
    assert torch.equal(extra["noise"], torch.arange(5.0))
    loaded = setups.everything(opt)
    setups.step_with_gradients(opt, range(steps, steps + 2))
    return loaded, setups.everything(opt)


@pytest.mark.parametrize("run", RUNS)
def test_resume_from_2_ranks_to_1_and_2(run, ranks, tmp_path):
    """Field report 23: the state is the saved one and the run goes on bit for bit, into fresh and used optimizers."""
    path = str(tmp_path / "step-3")
    expected = ranks(2, save, "fsdp", run, path)
    assert audit(path).ok
    for how, world, warm in (("whole", 1, False), ("fsdp", 2, True)):
        for found in ranks(world, resume, how, run, path, 3, warm):
            assert_same(found, expected[0])


@pytest.mark.parametrize("run", ["stochastic", "error_feedback"])
def test_resume_from_1_process_to_2_ranks(run, ranks, tmp_path):
    path = str(tmp_path / "step-3")
    expected = ranks(1, save, "whole", run, path)[0]
    for how in ("fsdp", "tp", "whole"):
        for found in ranks(2, resume, how, run, path):
            assert_same(found, expected)


@pytest.mark.parametrize(("source", "target"), [("hsdp", "fsdp"), ("fsdp_dim1", "fsdp_tp")])
def test_resume_in_another_layout_of_4(source, target, ranks, tmp_path):
    """Meshes of two dimensions, uneven and empty shards; small shards of the model, so that every rank writes some."""
    path = str(tmp_path / "step-3")
    expected = ranks(4, save_small, source, path)
    for found in ranks(4, resume, target, "error_feedback", path):
        assert_same(found, expected[0])


def save_small(how, path):
    return save(how, "error_feedback", path, max_shard_bytes=500)


def test_before_any_step(ranks, tmp_path):
    path = str(tmp_path / "step-0")
    expected = ranks(2, save, "fsdp", "error_feedback", path, 0)
    for found in ranks(2, resume, "fsdp", "error_feedback", path, 0):
        assert_same(found, expected[0])


def without_time(folder):
    """The files of a checkpoint, the manifest without the time."""
    found = contents(folder)
    manifest = json.loads(found.pop("manifest.json"))
    return found, {key: manifest[key] for key in ("files", "step")}


def test_one_layout(ranks, tmp_path):
    """1 process, shards on 2 ranks and replicas write the same files, byte for byte."""
    for name, how, world in (("one", "whole", 1), ("shards", "fsdp", 2), ("replicas", "whole", 2)):
        ranks(world, save, how, "error_feedback", str(tmp_path / name))
    assert without_time(tmp_path / "shards") == without_time(tmp_path / "one")
    assert without_time(tmp_path / "replicas") == without_time(tmp_path / "one")


def who_writes(path):
    """Names of files that this process opened below a folder."""
    opened, watching = [], [True]

    def hook(event, arguments):
        if watching[0] and event == "open" and ".fcoptim-partial-" in str(arguments[0]) and arguments[2] & os.O_CREAT:
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(hook)
    save_small("fsdp", path)
    watching[0] = False
    return [name for name in opened if name.endswith(".safetensors")]


def test_every_rank_writes_files_of_its_own(ranks, tmp_path):
    first, second = ranks(2, who_writes, str(tmp_path / "step"))
    written = [path.name for path in (tmp_path / "step").rglob("*.safetensors")]
    assert sorted(first + second) == sorted(written)
    assert len(second) >= 3, (first, second)


def test_deal():
    """As even as the largest job allows, and everything to somebody."""
    sizes = [7, 0, 30, 11, 5, 5, 2, 19]
    owners = deal(sizes, 3)
    shares = [sum(size for size, owner in zip(sizes, owners) if owner == hand) for hand in range(3)]
    assert sorted(shares) == [24, 25, 30]
    assert deal([], 2) == []


class Mixed(torch.nn.Module):
    """Tied, frozen, and with buffers that differ between ranks, each large enough for a file of its own."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(9, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight
        for number in range(4):
            self.register_buffer(f"seen{number}", torch.full((90,), 10 * number + dist.get_rank()))
        self.register_buffer("none", torch.zeros(0, dtype=torch.bool))


def mixed(path):
    """What the model holds after a save and a load into another, and what it was before."""
    opts = [
        FairCastOptimizer(setups.shard(Mixed(seed), "whole_fsdp"), torch.optim.AdamW, lr=1e-3, storage="float32")
        for seed in (0, 1)
    ]
    setups.step_with_gradients(opts[0], range(2))
    save_checkpoint(path, opts[0], max_shard_bytes=500)
    load_checkpoint(path, opts[1])
    before, after = (
        {name: setups.full(value) for name, value in opt.served_model.state_dict().items()} for opt in opts
    )
    return before, after


def test_tied_frozen_and_buffers(ranks, tmp_path):
    """Sharded ones are whole; of others the first rank's are saved, whoever writes the file."""
    first, second = ranks(2, mixed, str(tmp_path / "step"))
    assert_same(first[1], first[0])
    assert_same(second[1], first[0])
    assert not torch.equal(second[0]["seen1"], first[0]["seen1"])


def factored(path):
    made = setups.shard(setups.model(torch.float32), "fsdp")
    opt = FairCastOptimizer(made, torch.optim.Adafactor, lr=1e-3, storage="float32")
    for member in opt._flat():  # as Adafactor keeps it; its own step has no rule for these shards
        if member.param.ndim == 2:
            member.entry["row_var"] = torch.zeros(member.param.shape[0], 1)
    return error_of(save_checkpoint, path, opt)


def test_state_that_can_not_be_cut_again(ranks, tmp_path):
    """It is refused by name, rather than saved as one rank's part."""
    for kind, text in ranks(2, factored, str(tmp_path / "step")):
        assert kind == "CheckpointError"
        assert "row_var of the sharded parameter '0.weight' has shape (13, 1)" in text
        assert "torch.distributed.checkpoint" in text
    assert names(tmp_path) == []


def whole_adafactor(path):
    opt = FairCastOptimizer(setups.model(), torch.optim.Adafactor, lr=1e-3)
    setups.step_with_gradients(opt, range(1))
    save_checkpoint(path, opt)


def load_factored(path):
    made = setups.shard(setups.model(), "fsdp")
    return error_of(load_checkpoint, path, FairCastOptimizer(made, torch.optim.Adafactor, lr=1e-3))


def test_state_that_can_not_be_cut_is_not_loaded(ranks, tmp_path):
    ranks(1, whole_adafactor, str(tmp_path / "step"))
    for kind, text in ranks(2, load_factored, str(tmp_path / "step")):
        assert kind == "CheckpointError"
        assert "row_var" in text and "can't be cut" in text


# ----------------------------------------------------------------- DDP


def replicas(path):
    made = setups.model()
    opt = FairCastOptimizer(made, torch.optim.AdamW, rounding="stochastic", seed=5, lr=1e-3)
    ddp = DistributedDataParallel(opt.served_model)
    setups.train(ddp, opt, range(3))
    save_checkpoint(path, opt)
    fresh = setups.model(seed=1)
    again = FairCastOptimizer(fresh, torch.optim.AdamW, rounding="stochastic", seed=6, lr=1e-2)
    load_checkpoint(path, again)
    assert_same(setups.everything(again), setups.everything(opt))
    setups.train(ddp, opt, range(3, 5))
    setups.train(DistributedDataParallel(fresh), again, range(3, 5))
    assert_same(setups.everything(again), setups.everything(opt))
    if dist.get_rank() == 1:  # the usual idiom, for whoever wants it
        save_checkpoint(f"{path}-alone", opt, process_group=None)
    return True


def test_ddp(ranks, tmp_path):
    assert all(ranks(2, replicas, str(tmp_path / "step-3")))
    assert names(tmp_path) == ["step-3", "step-3-alone"]
    assert audit(tmp_path / "step-3-alone").ok


# ----------------------------------------------------------------- Hugging Face


def llama(path):
    transformers = pytest.importorskip("transformers")
    from torch.distributed.fsdp import fully_shard

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).float()
    for layer in model.model.layers:
        fully_shard(layer, mesh=setups.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=setups.init_device_mesh("cpu", (2,)))
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, storage="float32")
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
    save_checkpoint(path, opt, max_shard_bytes=20_000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    masters = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/masters", dtype="auto")
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}
    for name, value in opt.served_state_dict(full=True):
        assert torch.equal(loaded.state_dict()[name], value), name
    for name, master in opt.named_masters():
        assert torch.equal(masters.state_dict()[name], setups.full(master)), name
    return True


def test_from_pretrained(ranks, tmp_path):
    """A tied Llama that FSDP2 shards loads as any model folder, in shards with an index."""
    pytest.importorskip("transformers")
    assert all(ranks(2, llama, str(tmp_path / "llama")))
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def model_only(path):
    """Weights alone become the masters, on shards too."""
    opt = other("fsdp", "stochastic")
    with pytest.warns(UserWarning, match="holds a model only"):
        load_checkpoint(path, opt)
    return {name: setups.full(master) for name, master in opt.named_masters()}


def test_folder_with_a_model_only(ranks, tmp_path):
    ranks(2, save, "fsdp", "stochastic", str(tmp_path / "step"))
    weights = load_file(tmp_path / "step" / "masters" / "model.safetensors")
    for found in ranks(2, model_only, str(tmp_path / "step" / "masters")):
        assert_same(found, weights)


# ----------------------------------------------------------------- failures


def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fails(path, case):
    """What save_checkpoint raises when something is wrong on one rank, and that it works afterwards."""
    _, opt = setups.built("fsdp", "stochastic")
    setups.step_with_gradients(opt, range(2))
    first = dist.get_rank() == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    target, options = path, {}
    if case == "full":  # the system refuses to write more than some bytes into a file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if not first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    elif case == "step":
        options["step"] = 2 if first else 3
    elif case == "path":
        target = path if first else f"{path}-other"
    elif case == "written" and not first:
        next(iter(opt._flat())).local.param.add_(1.0)
    elif case == "extra":
        options["what"] = object() if first else None
    elif case == "exists":
        target = str(Path(path).parent)
    elif case == "alone":
        options["process_group"] = None
    elif case == "background":
        options["background"] = True
    error = error_of(save_checkpoint, target, opt, **options)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    left = names(Path(path).parent)
    dist.barrier()
    opt.recast_()
    save_checkpoint(path, opt)
    return error, left


CASES = {
    "full": ("OSError", r"checkpoint .* was not saved: on rank 1: File too large"),
    "step": ("CheckpointError", "rank 1 has another step than rank 0 .3 and 2."),
    "path": ("CheckpointError", "rank 1 has another path"),
    "written": ("CheckpointError", "on rank 1: the served weights of .* were written from outside"),
    "extra": ("CheckpointError", "on rank 0: extra holds values that can't be saved"),
    "exists": ("OSError|FileExistsError", "checkpoint .* was not saved: on rank 0: this exists already"),
    "alone": ("NotImplementedError", "parameters are sharded .* leave process_group out"),
    "background": ("NotImplementedError", "background=True can't be used by several ranks"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_on_one_rank_is_raised_on_all(case, ranks, tmp_path):
    """Nothing is left, and the next save is fine."""
    kind, text = CASES[case]
    for error, left in ranks(2, fails, str(tmp_path / "step"), case):
        assert error is not None and error[0] in kind.split("|"), error
        assert re.search(text, error[1]), error[1]
        assert left == [], left
    assert names(tmp_path) == ["step"]
    assert audit(tmp_path / "step").ok


def damaged(path):
    opt = other("fsdp", "stochastic")
    before = setups.everything(opt)
    error = error_of(load_checkpoint, path, opt)
    assert_same(setups.everything(opt), before)
    return error


@pytest.mark.parametrize("part", ["model.safetensors", "masters/model.safetensors", "optimizer/state.safetensors"])
def test_damage_is_found_by_whoever_looks(part, ranks, tmp_path):
    """Files are checked by one rank each; all raise, and nothing is changed."""
    path = tmp_path / "step"
    ranks(2, save, "fsdp", "stochastic", str(path))
    content = bytearray((path / part).read_bytes())
    content[-1] ^= 1
    (path / part).write_bytes(content)
    for error in ranks(2, damaged, str(path)):
        assert error is not None and error[0] == CheckpointError.__name__
        assert f"{part} is not the file that was saved" in error[1]


def misaligned(path):
    error = damaged(path)
    opt = other("fsdp", "stochastic")
    with pytest.warns(UserWarning, match="not what the saved masters"):
        load_checkpoint(path, opt, strict=False)
    return error, opt._shared.watch.foreign(opt._flat()), setups.everything(opt)


def test_halves_that_do_not_belong_together(ranks, tmp_path):
    """Each parameter is rebuilt by one rank; all refuse. strict=False serves what the masters say."""
    path = tmp_path / "step"
    saved = ranks(2, save, "fsdp", "stochastic", str(path))[0][0]
    weights = load_file(path / "model.safetensors")
    for weight in weights.values():
        weight.view(-1)[-1] += 1
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    content = (path / "model.safetensors").read_bytes()

    def change(manifest):
        manifest["files"]["model.safetensors"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    rewrite_manifest(path, change)
    for error, foreign, state in ranks(2, misaligned, str(path)):
        assert error is not None and "not what the saved masters and state serve" in error[1]
        assert f"and {len(weights) - 5} more" in error[1], "each rank has looked at its share"
        assert foreign == []
        assert_same(state, saved)


# ----------------------------------------------------------------- death


@pytest.mark.skipif(os.name != "posix", reason="kills processes")
def test_a_rank_that_dies_leaves_the_previous_checkpoint(tmp_path):
    """Field report 18: killed in the middle of its file, whichever rank it is; the others raise and don't hang."""
    command = [sys.executable, "-m", "tests.distributed.kill_worker", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) >= 4
    for name, (dead, survivor, error) in found.items():
        assert dead < 0, (name, dead)
        assert survivor == 7, (name, survivor)
        assert "can't be reached" in error, error
        folder = tmp_path / name
        left = names(folder)
        partial = [entry for entry in left if entry.startswith(PARTIAL)]
        assert [entry for entry in left if entry not in partial] == ["step-2"], left
        assert bool(partial) == name.startswith("rank 0"), "the first rank, if it lives, removes what was written"
        opt = _whole(seed=9)
        assert load_checkpoint(folder / "step-2", opt)["step"] == 2
        expected = _whole(seed=5)
        setups.step_with_gradients(expected, range(2))
        assert_same(setups.everything(opt), setups.everything(expected))
        save_checkpoint(folder / "step-4", opt)
        assert names(folder) == ["step-2", "step-4"], "the next save removes what is left"


def _whole(seed):
    return FairCastOptimizer(setups.model(), torch.optim.AdamW, rounding="error_feedback", seed=seed, lr=1e-3)
