"""Which parameters go to Muon and which to AdamW, how they are cut into matrices, and what is said about it."""

import pytest
import torch
from torch import nn

from fcoptim import Muon

from .helpers import noise


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.output = nn.Linear(width, width, bias=False)  # a head's name, but inside a block


class Transformer(nn.Module):
    """Embedding, positions as a bare table, two blocks, an output head that may be tied."""

    def __init__(self, width=8, vocab=20, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.pos_table = nn.Parameter(torch.zeros(16, width))
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


BLOCK_MATRICES = ["attn.qkv.weight", "attn.out.weight", "output.weight"]
MATRICES = {f"layers.{n}.{name}" for n in range(2) for name in BLOCK_MATRICES}


def routed(model, **options):
    """Names by algorithm, read back from an optimizer."""
    opt = Muon(Muon.param_groups(model, **options), lr=1e-3)
    names = {"muon": set(), "adamw": set()}
    for group in opt.param_groups:
        names[group["algorithm"]] |= set(group["param_names"])
    return names


@pytest.mark.parametrize("tied", [False, True])
def test_transformer(tied):
    """Hidden matrices to Muon; embedding, position table, head (tied or not), norms and biases to AdamW."""
    model = Transformer(tied=tied)
    names = routed(model)
    assert names["muon"] == MATRICES
    everything = {name for name, _ in model.named_parameters()}
    assert names["adamw"] == everything - MATRICES
    assert ("lm_head.weight" in names["adamw"]) is not tied


def test_a_model_or_its_groups_are_the_same():
    model = Transformer()
    direct, grouped = Muon(model, lr=1e-3), Muon(Muon.param_groups(model, lr=1e-3))
    assert [g["params"] for g in direct.param_groups] == [g["params"] for g in grouped.param_groups]
    assert repr(direct) == repr(grouped)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrappers_do_not_change_names(wrapper):
    assert routed(wrapper(Transformer()))["muon"] == MATRICES


def test_patterns_override():
    """muon= and adamw= go before the rules, one pattern or several, and by any name of a tied parameter."""
    names = routed(Transformer(), muon="pos_*", adamw=["*.out.weight", "layers.1.output.weight"])
    assert "pos_table" in names["muon"]
    assert names["muon"] - {"pos_table"} == MATRICES - {n for n in MATRICES if ".out." in n} - {
        "layers.1.output.weight"
    }
    tied = routed(Transformer(tied=True), muon="lm_head.weight")
    assert "embed.weight" in tied["muon"]


def test_frozen_parameters_are_left_out():
    model = Transformer()
    model.layers[0].requires_grad_(False)
    names = routed(model)
    assert names["muon"] == {name for name in MATRICES if name.startswith("layers.1")}
    assert not any(name.startswith("layers.0") for name in names["adamw"])


def test_last_linear_layer_of_a_plain_net_is_its_head():
    names = routed(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    assert names["muon"] == {"0.weight", "2.weight"}
    assert routed(nn.Linear(4, 8))["muon"] == {"weight"}


def test_sides_of_one_and_batch_norm():
    """Field report 19: vectors in disguise and 1-D parameters go to AdamW; convolutions are matrices."""
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 1, 1), nn.Conv1d(8, 4, 3), nn.Flatten()
    )
    names = routed(model)
    assert names["muon"] == {"0.weight", "3.weight"}
    assert names["adamw"] == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias"}


TINY = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def transformers_model(kind):
    transformers = pytest.importorskip("transformers")
    llama = {**TINY, "intermediate_size": 24, "num_key_value_heads": 1}
    gpt2 = {"vocab_size": 67, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    t5 = {"vocab_size": 67, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    moe = {**llama, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**llama, tie_word_embeddings=False),
        "llama tied": lambda: transformers.LlamaConfig(**llama, tie_word_embeddings=True),
        "gpt2": lambda: transformers.GPT2Config(**gpt2),
        "t5": lambda: transformers.T5Config(**t5, decoder_start_token_id=0),
        "moe": lambda: transformers.Qwen3MoeConfig(**moe, head_dim=8),
        "classifier": lambda: transformers.BertConfig(**TINY, intermediate_size=24),
    }
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "classifier": transformers.AutoModelForSequenceClassification}
    return auto.get(kind, transformers.AutoModelForCausalLM).from_config(configs[kind]())


@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt2", "t5", "moe", "classifier"])
def test_transformers_models(kind):
    """In real architectures nothing with a vocabulary-sized side is Muon's, and all matrices of the blocks are."""
    model = transformers_model(kind)
    opt = Muon(model, lr=1e-3)
    of = {id(p): g["algorithm"] for g in opt.param_groups for p in g["params"]}
    assert "muon" in of.values()
    for name, param in model.named_parameters():
        table = 67 in param.shape or any(word in name for word in ("embed", "wte", "wpe", "relative", "classifier"))
        expected = "adamw" if param.ndim < 2 or table else "muon"
        assert of[id(param)] == expected, name


def updates(shape, data, options=None, **groups):
    """The update of one step on a parameter of some shape, from zero."""
    param = nn.Parameter(torch.zeros(shape))
    param.grad = data.reshape(shape).clone()
    group = {"params": [param], "algorithm": "muon", **groups}
    Muon([group], lr=1.0, weight_decay=0, **(options or {})).step()
    return param.detach()


@pytest.mark.parametrize("scale", ["match_rms_adamw", "spectral"])
def test_convolutions_are_flattened(scale):
    """Field report 19: Conv (64, 1, 3, 3) and Linear (64, 9) with the same data get the same update, bit for bit."""
    flat = updates((64, 9), noise(64, 9), {"scale": scale})
    conv = updates((64, 1, 3, 3), noise(64, 9), {"scale": scale})
    assert torch.equal(conv.reshape(64, 9), flat)
    model = nn.Conv1d(6, 8, 3, bias=False)
    expected = updates((8, 18), noise(8, 18), {"scale": scale})
    model.weight.data.zero_()
    model.weight.grad = noise(8, 18).reshape(8, 6, 3)
    Muon(model, lr=1.0, weight_decay=0, scale=scale).step()
    assert torch.equal(model.weight.reshape(8, 18), expected)


def test_channels_last_convolutions():
    """Strides of weight and gradient are the memory format's; the update is the same."""
    weight = nn.Parameter(torch.zeros(8, 4, 3, 3).to(memory_format=torch.channels_last))
    weight.grad = noise(8, 4, 3, 3).to(memory_format=torch.channels_last)
    Muon([weight], lr=1.0, weight_decay=0).step()
    assert torch.equal(weight, updates((8, 4, 3, 3), noise(8, 4, 3, 3)))


def test_expert_stacks_are_batches():
    """Each matrix of a 3-D stack gets the update it would get alone."""
    data = noise(5, 12, 20)
    data[2] *= 1e-6
    stack = updates((5, 12, 20), data)
    for number in range(5):
        assert torch.allclose(stack[number], updates((12, 20), data[number]), atol=1e-5)
    nested = updates((5, 2, 6, 20), data, matrices="stack")
    assert torch.allclose(nested[1, 1], updates((6, 20), data[1, 6:]), atol=1e-5)


@pytest.mark.parametrize("parts", [3, [8, 8, 8], [16, 4, 4]], ids=str)
def test_split_equals_separate_updates(parts):
    """A fused QKV that is split gets, block for block, the updates of separate parameters; with their scales."""
    fused = updates((24, 10), noise(24, 10), split=parts)
    sizes = [24 // parts] * parts if isinstance(parts, int) else parts
    expected = [updates((size, 10), block) for size, block in zip(sizes, noise(24, 10).split(sizes))]
    assert torch.allclose(fused, torch.cat(expected), atol=1e-5)
    assert not torch.allclose(fused, updates((24, 10), noise(24, 10)), atol=0.1)


def test_split_by_pattern_from_a_model():
    model = Transformer()
    groups = Muon.param_groups(model, split={"*.qkv.weight": 3})
    split = {name: group["split"] for group in groups if group["algorithm"] == "muon" for name, _ in group["params"]}
    assert split == {name: 3 if "qkv" in name else 1 for name in MATRICES}


def test_transposed_storage_is_split_along_its_columns():
    """Conv1D of transformers stores (in, out): output features are columns, and scales see rows and columns swapped."""
    fused = updates((10, 24), noise(10, 24), {"scale": "spectral"}, split=3, transposed=True)
    expected = updates((24, 10), noise(10, 24).T, {"scale": "spectral"}, split=3)
    assert torch.allclose(fused.T, expected, atol=1e-5)
    groups = Muon.param_groups(transformers_model("gpt2"), split={"*c_attn.weight": 3})
    assert all(group["transposed"] for group in groups if group["algorithm"] == "muon")


def test_bare_parameters():
    """Without a model, two and more dimensions are Muon's, the rest AdamW's, each in the order given."""
    params = [nn.Parameter(noise(*shape)) for shape in [(3, 4), (5,), (), (2, 3, 4), (6,), (4, 1)]]
    opt = Muon(iter(params), lr=1e-3)
    assert [group["algorithm"] for group in opt.param_groups] == ["muon", "adamw"]
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(params[n]) for n in (0, 3, 5)]
    assert [id(p) for p in opt.param_groups[1]["params"]] == [id(params[n]) for n in (1, 2, 4)]


def test_named_pairs_and_groups():
    """Names bring patterns along; a group's own options hold for both of its halves; others keep the defaults."""
    pairs = list(Transformer().named_parameters())
    opt = Muon(pairs, lr=1e-3, adamw=["embed*", "lm_head*", "pos*"], split={"*qkv.weight": 3})
    names = {name for group in opt.param_groups if group["algorithm"] == "muon" for name in group["param_names"]}
    assert names == MATRICES
    opt = Muon([{"params": pairs[:6], "lr": 0.5}, {"params": pairs[6:], "weight_decay": 0.25}], lr=0.125, adamw_lr=0.75)
    found = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in opt.param_groups]
    assert found == [("muon", 0.5, 0.1), ("adamw", 0.5, 0.1), ("muon", 0.125, 0.25), ("adamw", 0.75, 0.25)]


def test_add_param_group():
    """A group that mixes matrices and vectors is added as two; one with an algorithm as it is."""
    opt = Muon([nn.Parameter(noise(3, 4))], lr=0.5, adamw_lr=0.25)
    opt.add_param_group({"params": [nn.Parameter(noise(4, 5)), nn.Parameter(noise(4))], "weight_decay": 0.0})
    opt.add_param_group({"params": nn.Parameter(noise(4, 5)), "algorithm": "adamw", "lr": 0.125})
    found = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in opt.param_groups]
    assert found == [("muon", 0.5, 0.1), ("muon", 0.5, 0.0), ("adamw", 0.25, 0.0), ("adamw", 0.125, 0.1)]
    before = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    opt.step()
    assert all(not torch.equal(p, b) for p, b in zip((p for g in opt.param_groups for p in g["params"]), before))


def test_repr_says_what_goes_where():
    """The routing is read from repr: algorithm, options, and names with the layer's number left out."""
    text = repr(Muon(Transformer(), lr=1e-3, adamw_lr=2e-4, split={"*.qkv.weight": 3}))
    assert "muon, 2 parameters, 384 values" in text and "muon, 4 parameters, 256 values" in text
    assert "    layers.*.attn.qkv.weight 24 x 8, 2 of them" in text
    assert "    embed.weight 20 x 8" in text
    assert "lr=0.0002" in text and "split=3" in text and "orthogonalize='polar_express'" in text


WRONG = [
    ({"muon": "nothing*"}, "muon pattern 'nothing\\*' matches no parameter; names look like 'pos_table'"),
    ({"adamw": ["layers.*", "typo"]}, "adamw pattern 'typo' matches no parameter"),
    (
        {"muon": "*.out.weight", "adamw": "layers.0.*"},
        "'layers.0.attn.out.weight' matches a pattern of muon= and one of",
    ),
    ({"muon": "*.bias"}, "is no matrix; narrow the pattern"),
    ({"split": {"*.qkv.weight": 5}}, "split=5 does not divide the 24 output rows of a parameter of shape \\(24, 8\\)"),
    ({"split": {"*.qkv.weight": [8, 8]}}, "split=\\(8, 8\\) does not divide the 24"),
    (
        {"split": {"*.qkv.weight": "3"}},
        "split must be a number of equal parts, or a list of their sizes in rows, got '3'",
    ),
    ({"split": {"*.qkv.weight": 0}}, "split must be .* got 0"),
    ({"split": {"embed.weight": 2}}, "matches only parameters that AdamW trains"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_patterns(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(Transformer(), lr=1e-3, **options)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        Muon(nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(ValueError, match="go by parameter names, but the parameters have none"):
        Muon([nn.Parameter(noise(3, 4))], split={"*": 3})
