"""PEFT: adapters over a frozen bf16 base, saved and resumed; the merge happens outside the optimizer."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file

from fcoptim import Exporter, FairCastOptimizer

from . import tiny
from .trainers import assert_same_bits, lies_on_grid, snapshot

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(storage: str = "bfloat16", rounding: str = "stochastic", autocast: bool = True, seed: int = 0):
    """A bf16 base under LoRA, and the optimizer on both."""
    torch.manual_seed(seed)
    base = tiny.model().bfloat16()
    model = get_peft_model(base, LoraConfig(**LORA), autocast_adapter_dtype=autocast)
    return model, FairCastOptimizer(model, torch.optim.AdamW, lr=1e-2, rounding=rounding, storage=storage)


def train(model, opt, steps: range) -> None:
    for step in steps:
        ids = torch.randint(3, 30, (4, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()


def base_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither", "error_feedback"])
def test_only_adapters_get_masters(rounding, storage, autocast):
    """PEFT makes adapters fp32 or bf16 (``autocast_adapter_dtype``): they are served fair, the base stays."""
    model, opt = adapted(storage, rounding, autocast)
    base = base_of(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name, _ in opt.named_masters()] == trained
    assert len(opt.state_dict()["state"]) == len(trained) == 8
    train(model, opt, range(3))
    assert_same_bits(base, base_of(model))
    for name, master in opt.named_masters():
        param = model.get_parameter(name)
        assert param.dtype is getattr(torch, storage) and lies_on_grid(param) and not lies_on_grid(master)


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_saves_and_resumes(rounding, storage, tmp_path):
    """Adapters by ``save_pretrained``, the optimizer by ``torch.save``: the run goes on bit for bit."""
    model, opt = adapted(storage, rounding)
    train(model, opt, range(3))
    model.save_pretrained(tmp_path)
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    served = opt.served_state_dict()
    for name, value in load_file(tmp_path / "adapter_model.safetensors").items():
        assert torch.equal(value.to(torch.bfloat16), served[name.replace(".weight", ".default.weight")])
    train(model, opt, range(3, 5))

    base = tiny.model().bfloat16()
    again = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    resumed = FairCastOptimizer(again, torch.optim.AdamW, lr=1e-2, rounding=rounding, storage=storage)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(again, resumed, range(3, 5))
    assert_same_bits(snapshot(opt), snapshot(resumed))


def test_modules_to_save_are_trained_whole():
    """A copy of the head that PEFT trains beside the adapters gets a master; the original stays."""
    base = tiny.model()
    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    model = get_peft_model(base.bfloat16(), LoraConfig(**LORA, modules_to_save=["lm_head"]))
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-2)
    train(model, opt, range(2))
    whole = [name for name, _ in opt.named_masters() if "modules_to_save" in name]
    assert whole and all(lies_on_grid(model.get_parameter(name)) for name in whole)


def test_kbit_preparation_before_the_optimizer():
    """``prepare_model_for_kbit_training`` makes everything fp32; the optimizer made after it serves bf16 again."""
    base = prepare_model_for_kbit_training(tiny.model().bfloat16(), use_gradient_checkpointing=False)
    model = get_peft_model(base, LoraConfig(**LORA))
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-2)
    train(model, opt, range(2))
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())


def test_adapters_added_later():
    """A second adapter joins through ``add_param_group``; the first keeps its masters."""
    model, opt = adapted()
    train(model, opt, range(1))
    model.add_adapter("second", LoraConfig(**LORA))
    model.set_adapter("second")
    opt.add_param_group({"params": [p for n, p in model.named_parameters() if ".second." in n]})
    before = snapshot(opt)
    train(model, opt, range(1, 3))
    after = snapshot(opt)
    moved = {name for name in before if name.startswith("master") and not torch.equal(before[name], after[name])}
    assert moved and all(".second." in name for name in moved)
    assert {name for name, _ in opt.named_masters() if ".second." in name} == {
        n.removeprefix("master of ") for n in moved
    }


def merged_in_fp32(model, masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``base + scaling B A`` with fp32 adapters, under the base model's names."""
    merged = {}
    for name, value in model.get_base_model().state_dict().items():
        if "lora_" in name:
            continue
        stem = name.removesuffix(".base_layer.weight")
        value = value.float()
        if stem != name:
            key = f"base_model.model.{stem}"
            scaling = model.get_submodule(key).scaling["default"]
            value = value + scaling * masters[f"{key}.lora_B.default.weight"] @ masters[f"{key}.lora_A.default.weight"]
        merged[name.replace(".base_layer", "")] = value
    return merged


def test_trap_20_the_exporter_serves_the_merged_state():
    """Trap 20: a fair cast of adapters does not make PEFT's merge fair; the Exporter on the fp32 merge is.

    The merged change here is far below half an ulp of the base: PEFT's own bf16 merge does not show it at all,
    the Exporter's mean over many exports does, within five sigma.
    """
    model, opt = adapted("float32")
    opt.param_groups[0]["lr"] = 1e-5
    train(model, opt, range(2))
    merged = merged_in_fp32(model, dict(opt.named_masters()))
    name = "model.layers.0.self_attn.v_proj.weight"
    base = tiny.model().bfloat16().state_dict()[name].float()
    ulp = torch.ldexp(torch.ones_like(base), torch.frexp(base).exponent - 8)
    plain = base.abs() > 2**-8  # smaller weights have a finer grid than the change
    base, ulp, merged = base[plain], ulp[plain], merged[name][plain]
    share = (merged - base) / ulp
    assert share.abs().mean() > 0 and share.abs().max() < 0.5
    nearest = merged.bfloat16().float()
    assert torch.equal(nearest, base), "round-to-nearest serves nothing of what was learned"
    export, casts = Exporter("stochastic"), 400
    moved = sum((export({name: merged})[name].float() - base) / ulp for _ in range(casts)) / casts
    error = (moved - share).abs()
    sigma = (share.abs() * (1 - share.abs()) / casts).sqrt()
    assert (error <= 5 * sigma + 1e-3).float().mean() > 0.999
    assert float((moved * share.sign()).sum()) == pytest.approx(float(share.abs().sum()), rel=0.2)
