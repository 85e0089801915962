"""The folder is a model of transformers': served weights at the top, masters below."""

import json

import pytest
import torch
from safetensors.torch import load_file, load_model

from fcoptim import FairCastOptimizer, load_checkpoint, save_checkpoint
from tests.optimizer.helpers import ADAM, assert_same, assert_same_run, equal_bits

from .helpers import Mixed, mixed_loss, mixed_pair

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(tied: bool = True, seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def qwen3(seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def mixtral(seed: int = 0):
    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def trained(model, steps: int = 2, **options) -> FairCastOptimizer:
    opt = FairCastOptimizer(model, torch.optim.AdamW, **{**ADAM, **options})
    go_on(model, opt, range(steps))
    return opt


def go_on(model, opt: FairCastOptimizer, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens, labels=tokens).loss.backward()
        opt.step()


MODELS = {"llama-tied": llama, "llama-untied": lambda: llama(tied=False), "qwen3-tied": qwen3, "mixtral": mixtral}


@pytest.mark.parametrize("shard", [None, 20_000])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained(tmp_path, name, shard):
    """Both halves load as they are, with nothing missing or left over, in their dtypes, bit for bit."""
    model = MODELS[name]()
    opt = trained(model)
    save_checkpoint(tmp_path / "a", opt, **({} if shard is None else {"max_shard_bytes": shard}))
    assert (tmp_path / "a" / "model.safetensors.index.json").exists() == (shard is not None)
    for path, dtype, weights in (
        (tmp_path / "a", torch.bfloat16, opt.served_state_dict()),
        (tmp_path / "a" / "masters", torch.float32, opt.master_state_dict()),
    ):
        loaded, said = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(said.values()), said
        assert type(loaded) is type(model)
        assert json.loads((path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert json.loads((path / "config.json").read_text())["architectures"] == [type(model).__name__]
        assert (path / "generation_config.json").exists()
        for key, value in loaded.state_dict().items():
            assert value.dtype is dtype and equal_bits(value, weights[key]), key
        if name.endswith("-tied"):
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_shards_are_as_asked(tmp_path):
    """No shard is larger, and the index knows all of them."""
    opt = trained(llama())
    save_checkpoint(tmp_path / "a", opt, max_shard_bytes=20_000)
    for folder in (tmp_path / "a", tmp_path / "a" / "masters"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert files == sorted(set(index["weight_map"].values())) and len(files) > 1
        held = {name: load_file(folder / name) for name in files}
        assert {key: name for name in files for key in held[name]} == index["weight_map"]
        sizes = [sum(value.nbytes for value in tensors.values()) for tensors in held.values()]
        assert max(sizes) <= 20_000 and sum(sizes) == index["metadata"]["total_size"]


@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_tied_embeddings_resume(tmp_path, shard):
    """One master, written once, still tied after the load; training goes on bit for bit."""
    model, other = llama(), llama(seed=4)
    opt, fresh = trained(model), FairCastOptimizer(other, torch.optim.AdamW, **ADAM)
    save_checkpoint(tmp_path / "a", opt, max_shard_bytes=shard)
    load_checkpoint(tmp_path / "a", fresh)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    go_on(model, opt, range(2, 5))
    go_on(other, fresh, range(2, 5))
    assert_same_run(opt, fresh)


def test_fp32_storage_is_served_in_bf16(tmp_path):
    """What engines load is bf16, however the parameters are stored."""
    opt = trained(llama(), storage="float32")
    save_checkpoint(tmp_path / "a", opt)
    served = load_file(tmp_path / "a" / "model.safetensors")
    assert {value.dtype for value in served.values()} == {torch.bfloat16}
    for name, value in opt.served_state_dict().items():
        if name in served:
            assert equal_bits(value, served[name])


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def test_tokenizer_is_saved(tmp_path):
    """One that is passed, or the files beside the model that was loaded."""
    opt = trained(llama())
    save_checkpoint(tmp_path / "a", opt, tokenizer=tokenizer())
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert found("b a")["input_ids"] == [1, 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    save_checkpoint(tmp_path / "b", trained(model, steps=0))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b")("b a")["input_ids"] == [1, 0]
    load_checkpoint(tmp_path / "b", trained(llama(seed=3), steps=0))


def test_plain_modules_load_with_safetensors(tmp_path):
    """Any torch module's weights, ties among them, are readable by the safetensors library."""
    model, opt = mixed_pair()
    for step in range(2):
        mixed_loss(model, step).backward()
        opt.step()
    save_checkpoint(tmp_path / "a", opt)
    other = Mixed(3)
    assert load_model(other, tmp_path / "a" / "masters" / "model.safetensors") == (set(), [])
    assert_same(
        {name: value.float() for name, value in opt.master_state_dict().items()},
        {name: value.float() for name, value in other.state_dict().items()},
    )


def test_a_hub_folder_is_a_start(tmp_path):
    """Field report 5: where only served weights exist they become the masters, and this is said."""
    opt = trained(llama())
    opt.served_model.save_pretrained(tmp_path / "hf")
    other = llama(seed=4)
    fresh = trained(other, steps=1)
    with pytest.warns(UserWarning, match="holds a model only: its weights are now the masters"):
        assert load_checkpoint(tmp_path / "hf", fresh) == {"step": 0}
    for (name, master), (_, param) in zip(fresh.named_masters(), opt.served_model.named_parameters()):
        assert master.dtype is torch.float32 and torch.equal(master, param.float()), name
    assert_same(dict(opt.served_model.state_dict()), dict(other.state_dict()))
    twin = llama(seed=4)
    twin.load_state_dict(opt.served_model.state_dict())
    built = FairCastOptimizer(twin, torch.optim.AdamW, **ADAM)
    assert_same_run(built, fresh)
    go_on(other, fresh, range(3))
    go_on(twin, built, range(3))
    assert_same_run(built, fresh)
