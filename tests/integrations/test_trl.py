"""What is particular about TRL: models and adapters that it makes itself, and its weight sync to a rollout engine."""

import shutil
import warnings
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
from peft import LoraConfig
from trl.generation.vllm_generation import VLLMGeneration

import fcoptim.integrations.transformers as for_transformers
from fcoptim import FairCastOptimizer, unwrap
from fcoptim.integrations.trl import FairCastMixin

from . import tiny
from .trainers import KINDS, assert_same_bits, lies_on_grid, pair, snapshot, trainer


@pytest.fixture
def folder(tmp_path):
    """A model's folder, for trainers that take a name."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("kind", ["SFTTrainer", "GRPOTrainer"])
def test_mixin_with_a_model_given_by_name(kind, storage, folder, tmp_path):
    """Trap 19: TRL loads the model; the mixin wraps what TRL's arguments ask for, on the masters of that model."""
    run = trainer(
        kind,
        tmp_path,
        folder,
        mixin=FairCastMixin,
        fair_cast={"rounding": "dither", "storage": storage},
        weight_decay=0.1,
        adam_beta1=0.8,
        bf16=True,
    )
    run.train()
    opt = unwrap(run.optimizer)
    assert opt.served_model is run.model and isinstance(opt.wrapped, torch.optim.AdamW)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    assert {group["betas"][0] for group in opt.param_groups} == {0.8}
    assert {group["rounding"] for group in opt.param_groups} == {"dither"}
    names = {name for name, _ in opt.named_masters()}
    assert names == {name for name, _ in run.model.named_parameters()}, "real names, not positions"
    for name, master in opt.named_masters():
        assert lies_on_grid(run.model.get_parameter(name)) and not lies_on_grid(master)
    assert [e["step"] for e in run.state.log_history if "fcoptim/changed" in e] == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_mixin_resumes(kind, folder, tmp_path):
    """A mixin trainer, made anew, resumes from its checkpoint bit for bit; a second ``train()`` wraps nothing twice."""
    mixin = for_transformers.FairCastMixin if kind == "Trainer" else FairCastMixin
    options = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "bf16": True, "mixin": mixin}

    def given() -> Any:
        return tiny.model() if kind == "Trainer" else folder

    whole = trainer(kind, tmp_path / "whole", given(), **options)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = trainer(kind, tmp_path / "resumed", given(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same_bits(snapshot(whole.optimizer), snapshot(resumed.optimizer))
    opt = unwrap(resumed.optimizer)
    resumed.train()
    assert unwrap(resumed.optimizer) is opt and not isinstance(opt.wrapped, FairCastOptimizer)


def test_mixin_with_an_optimizer_of_choice(tmp_path):
    """``optimizer_cls_and_kwargs`` chooses the optimizer inside; an optimizer passed as such is wrapped too."""
    choice = (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})
    mixin = for_transformers.FairCastMixin
    run = trainer("Trainer", tmp_path, tiny.model(), mixin=mixin, optimizer_cls_and_kwargs=choice)
    run.train()
    assert isinstance(unwrap(run.optimizer).wrapped, torch.optim.SGD)
    model = tiny.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    run = trainer("Trainer", tmp_path, model, mixin=mixin, optimizers=(plain, None))
    run.train()
    assert unwrap(run.optimizer).wrapped is plain


@pytest.mark.parametrize("engine", ["DeepSpeed", "FSDP 1"])
def test_mixin_refuses_engines_it_cannot_serve(engine, tmp_path):
    """Trap 18: DeepSpeed casts inside, FSDP 1 has no parameters left to name; the message says what to do instead."""
    run = trainer("Trainer", tmp_path, tiny.model(), mixin=for_transformers.FairCastMixin)
    setattr(run, "is_deepspeed_enabled" if engine == "DeepSpeed" else "is_fsdp_enabled", True)
    run.accelerator.state.fsdp_plugin = type("Plugin", (), {"fsdp_version": 1})()
    try:
        with pytest.raises(ValueError, match="Exporter" if engine == "DeepSpeed" else "fsdp_version: 2"):
            run.create_optimizer()
    finally:
        run.accelerator.state.fsdp_plugin = None


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("kind", ["SFTTrainer", "GRPOTrainer"])
def test_mixin_with_adapters_made_by_trl(kind, storage, folder, tmp_path):
    """A model by name and a ``peft_config``: adapters get masters, the base is rounded once and stays."""
    run = trainer(
        kind,
        tmp_path,
        folder,
        mixin=FairCastMixin,
        peft_config=LoraConfig(**LORA),
        fair_cast={"storage": storage},
        bf16=True,
    )
    run.train()
    opt = unwrap(run.optimizer)
    assert {name for name, _ in opt.named_masters()} == {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name, _ in opt.named_masters())
    original = tiny.model().state_dict()
    base = run.model.unload().state_dict() if kind == "SFTTrainer" else run.model.get_base_model().state_dict()
    for name, value in base.items():
        name = name.replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(value.to(torch.bfloat16), original[name].to(torch.bfloat16)) and lies_on_grid(value)


def test_an_optimizer_from_before_the_adapters_is_refused(tmp_path):
    """Trap 19: an optimizer built on the model that TRL then freezes under adapters would train nothing."""
    model, opt = pair()
    run = trainer("SFTTrainer", tmp_path, model, optimizers=(opt, None), peft_config=LoraConfig(**LORA))
    for_transformers.FairCastCallback().attach(run)
    with pytest.raises(ValueError, match=r"built on other parameters.*lora_.*peft_config.*FairCastMixin"):
        run.train()


def test_head_in_fp32(tmp_path):
    """TRL's ``cast_lm_head_to_fp32`` widens one parameter of the served model: storage changes, values do not."""
    model, opt = pair()
    run = trainer("GRPOTrainer", tmp_path, model, optimizers=(opt, None), bf16=True, cast_lm_head_to_fp32=True)
    run.train()
    assert model.lm_head.weight.dtype is torch.float32 and lies_on_grid(model.lm_head.weight)
    assert not lies_on_grid(dict(opt.named_masters())["model.embed_tokens.weight"])
    assert opt.served_state_dict()["lm_head.weight"].dtype is torch.bfloat16


class StubEngine(VLLMGeneration):
    """TRL's class, with the engine behind it replaced: what it is sent is written down, generation uses the weights."""

    received: dict[str, torch.Tensor]
    passes: int

    def _init_vllm(self) -> None:
        self.received, self.passes, engine = {}, 0, self
        self._llm_weights_sleeping = False

        class Client:
            def update_named_params(self, metadata: list[Any], params: Any) -> None:
                engine.load_weights(params, {name: (dtype, shape) for name, dtype, shape in metadata})

            def reset_prefix_cache(self) -> None:
                engine.passes += 1

            def get_server_info(self) -> dict[str, Any]:
                return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        self.vllm_client = Client()
        # The path that TRL's colocated mode walks down to vLLM's model.
        self.llm = type("LLM", (), {"reset_prefix_cache": Client.reset_prefix_cache})()
        runner = type("Runner", (), {"model": self})()
        worker = type("Worker", (), {"model_runner": runner})()
        executor = type("Executor", (), {"driver_worker": worker})()
        self.llm.llm_engine = type("Engine", (), {"model_executor": executor})()

    def load_weights(self, params: Any, announced: dict[str, Any] | None = None) -> None:
        for name, value in params:
            if announced is not None:
                assert announced[name] == (str(value.dtype).removeprefix("torch."), list(value.shape))
            self.received[name] = value.detach().to(torch.bfloat16, copy=True)  # as vLLM into its own parameter
            if value.dtype is not torch.bfloat16:
                assert torch.equal(self.received[name].float(), value.float()), f"{name}: the engine's cast loses bits"

    def generate(self, prompts: list[Any], images: Any, num_generations: int, profiler: Any) -> Any:
        generator = torch.Generator().manual_seed(self.passes)
        ids = torch.randint(3, 30, (len(prompts), 6), generator=generator).tolist()
        return prompts, ids, [[[-1.0]] * 6 for _ in prompts], [[[i] for i in row] for row in ids]


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", StubEngine)
    monkeypatch.setattr(trl.trainer.grpo_trainer, "is_vllm_available", lambda *a, **k: True, raising=False)


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_weight_sync_sends_the_served_weights(mode, storage, stub, tmp_path):
    """Trap 18: what TRL's ``sync_weights`` sends before each rollout is ``served_state_dict()``, bit for bit."""
    model, opt = pair(storage)
    run = trainer("GRPOTrainer", tmp_path, model, optimizers=(opt, None), bf16=True, use_vllm=True, vllm_mode=mode)
    engine, sent = run.vllm_generation, []
    assert type(engine).sync_weights is VLLMGeneration.sync_weights

    class Look(for_transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            sent.append(dict(engine.received))
            served.append({name: value.clone() for name, value in opt.served_state_dict().items()})

    served = [{name: value.clone() for name, value in opt.served_state_dict().items()}]
    run.add_callback(Look())
    run.train()
    assert len(sent) == 3
    for received, expected in zip(sent, served):
        assert received.keys() == {name for name, _ in model.named_parameters()}
        for name, value in received.items():
            assert torch.equal(value, expected[name]), name
    assert any(not torch.equal(sent[0][name], sent[1][name]) for name in sent[0])
    engine.sync_weights()
    final = opt.served_state_dict()
    assert all(torch.equal(value, final[name]) for name, value in engine.received.items())


def test_plain_adamw_sends_what_its_model_does_not_compute_with(stub, tmp_path):
    """The control: without the wrapper TRL sends fp32 masters, and the engine's own cast rounds them to nearest."""
    run = trainer("GRPOTrainer", tmp_path, tiny.model(), bf16=True, use_vllm=True, vllm_mode="server")
    with pytest.raises(AssertionError, match="the engine's cast loses bits"):
        run.train()


def test_merged_adapters_are_warned_of(stub, folder, tmp_path):
    """Trap 20: TRL merges ``base + B A`` itself, by rounding to nearest: the mixin says so."""
    options = {"peft_config": LoraConfig(**LORA), "bf16": True, "use_vllm": True, "vllm_mode": "server"}
    run = trainer("GRPOTrainer", tmp_path, folder, mixin=FairCastMixin, **options)
    with pytest.warns(UserWarning, match=r"merges the adapters.*Exporter"):
        run.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="TRL merges")
        run = trainer("GRPOTrainer", tmp_path, folder, mixin=FairCastMixin, use_vllm=True, vllm_mode="server")
        run.create_optimizer()
