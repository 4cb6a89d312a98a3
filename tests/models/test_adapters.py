"""Adapters: the base is not changed, and all ways of computing with them give the same numbers."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.checkpoints import model_folder
from grpo_cli.checkpoints.shards import Parts
from grpo_cli.errors import UserError
from grpo_cli.generation.vllm.weights import Weights
from grpo_cli.models import adapters, loading
from grpo_cli.models.adapter_methods import METHODS
from grpo_cli.models.policy_logprobs import SIMPLEST, ForwardMode, PolicyLogprobs
from grpo_cli.models.reference import AdapterReference
from grpo_cli.models.settings import Adapter, Model
from tests.models.families import Family
from tests.models.test_architectures import flat_gradient as gradient
from tests.models.test_architectures import make
from tests.models.test_policy_logprobs import make_rollouts, weighted

pytest.importorskip("peft")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    **{method: Adapter(method=method, rank=4) for method in METHODS},
    "biases": Adapter(method="lora", rank=2, args={"bias": "lora_only"}),
    "norms": Adapter(method="lora", rank=2, args={"modules_to_save": ["input_layernorm", "norm"]}),
    "pissa": Adapter(method="lora", rank=2, args={"init_lora_weights": "pissa"}),
    "experts": Adapter(
        method="lora", rank=2, target_modules=QKV, args={"target_parameters": EXPERTS}
    ),
}
EACH = pytest.mark.parametrize("kind", KINDS)
SOME = pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("lora", "rslora", "biases")])


def base_of(kind: str) -> PreTrainedModel:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    families = {"experts": Family("qwen3_moe", settings), "router": Family("phimoe", settings)}
    return make(families.get(kind, Family("qwen2")))


def adapted(kind: str, *, moved: bool = True) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(model with an adapter, the model before); moved, since a fresh adapter changes nothing."""
    base = base_of(kind)
    model = copy.deepcopy(base)
    adapters.attach(model, adapters.config_of(KINDS[kind], "base", None), 7)
    if moved:
        move(model)
    return model, base


@torch.no_grad()
def move(model: PreTrainedModel, seed: int = 5) -> None:
    random = torch.Generator().manual_seed(seed)
    for p in adapters.tensors_of(model).values():
        p.add_(torch.randn(p.shape, generator=random) * 0.05)


def logprobs(model: PreTrainedModel, mode: ForwardMode = SIMPLEST) -> Tensor:
    policy = PolicyLogprobs(model, packed=mode.packed, chunked=mode.chunked)
    return policy._by(mode, make_rollouts(), 1.0)[0]


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@SOME
def test_only_the_adapter_trains(kind: str) -> None:
    model, base = adapted(kind)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapters.tensors_of(model).keys()
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert all(".default" in name for name in trained)  # peft's name of the adapter
    optimizer = torch.optim.AdamW(trained.values(), lr=0.1)
    logprobs(model).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if kind == "pissa":  # its base is what the adapter leaves of the model
        return
    before = dict(base.named_parameters())
    for name, p, _ in adapters.plain_parameters(model):
        if not p.requires_grad:
            assert torch.equal(p, before[name]), name


@SOME
def test_packed_matches_padded(kind: str) -> None:
    model, base = adapted(kind)
    assert apart(logprobs(model), logprobs(base)) > 1e-3, "the adapter does nothing"
    expected = logprobs(model)
    slope = gradient(model, weighted(list(expected)))
    for mode in (ForwardMode(True, True), ForwardMode(True, False), ForwardMode(False, True)):
        found = logprobs(model, mode)
        assert torch.allclose(found, expected, rtol=2e-6, atol=5e-6)
        other = gradient(model, weighted(list(found)))
        assert (other - slope).norm() < 1e-5 * slope.norm()


def test_check_finds_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = adapted("lora", moved=False)
    said: list[str] = []
    policy = PolicyLogprobs(model, say=said.append)
    right = policy._by

    def detached(mode: ForwardMode, *args: Any, **kwargs: Any) -> Any:
        logprobs, entropies = right(mode, *args, **kwargs)
        return (logprobs if mode == SIMPLEST else logprobs * 3 - logprobs.detach() * 2), entropies

    monkeypatch.setattr(policy, "_by", detached)
    policy.check(make_rollouts(), 1.0)
    assert policy.mode == SIMPLEST
    assert "gradients differ" in said[0]


@EACH
def test_merged_weights_match(kind: str) -> None:
    model, base = adapted(kind)
    before = copy.deepcopy(model.state_dict())
    merged = dict(adapters.merged(model))
    shapes = [(n, tuple(p.shape), p.dtype) for n, p in base.named_parameters()]
    assert [(n, tuple(t.shape), t.dtype) for n, t in merged.items()] == shapes
    assert [(i.name, i.shape, i.dtype) for i in Weights(model).infos()] == shapes
    assert [name for name, _ in Weights(model)] == [name for name, _, _ in shapes]
    base.load_state_dict(merged, strict=False)
    assert apart(logprobs(base), logprobs(model)) < 2e-5
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_merging_leaves_the_model_unchanged() -> None:
    base = base_of("lora").bfloat16()
    model = copy.deepcopy(base)
    adapters.attach(model, adapters.config_of(KINDS["lora"], "base", None), 7)
    move(model)
    first = dict(adapters.merged(model))
    for _ in range(3):
        again = dict(adapters.merged(model))
    assert all(torch.equal(again[n], t) and t.dtype == torch.bfloat16 for n, t in first.items())
    before = dict(base.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p, _ in adapters.plain_parameters(model))


def reference_of(model: PreTrainedModel) -> AdapterReference:
    return AdapterReference(PolicyLogprobs(model, packed=False, chunked=False))


@pytest.mark.parametrize("kind", ["lora", "norms"])
def test_fresh_reference_is_the_base(kind: str) -> None:
    model, base = adapted(kind, moved=False)
    reference = reference_of(model)
    move(model)
    policy = logprobs(model)
    assert torch.equal(reference.logprobs(make_rollouts(), 1.0)[0], logprobs(base))
    assert torch.equal(logprobs(model), policy), "the policy has its own weights again"
    assert reference.weights_to_save is None
    assert reference.nbytes == sum(p.nbytes for p in adapters.tensors_of(model).values())


@pytest.mark.parametrize("kind", ["lora", "pissa", "biases"])
def test_a_reference_with_a_copy(kind: str) -> None:
    model, _ = adapted(kind)
    begun = logprobs(model)
    reference = reference_of(model)
    move(model, 6)
    assert apart(logprobs(model), begun) > 1e-3
    assert torch.equal(reference.logprobs(make_rollouts(), 1.0)[0], begun)
    reference.refresh(model, 1.0)
    assert torch.equal(reference.logprobs(make_rollouts(), 1.0)[0], logprobs(model))
    assert reference.weights_to_save is reference.weights
    reference.logprobs.check(make_rollouts(), 1.0)


@SOME
def test_folder_for_peft(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from peft import PeftModel

    base = base_of(kind)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = copy.deepcopy(base)
    where = str(tmp_path / "base")
    adapters.attach(model, adapters.config_of(KINDS[kind], where, None), 7)
    move(model)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, data in model_folder.files_of_adapter(model, tokenizer).items():
        (folder / name).write_bytes(data)
    own = adapters.file_tensors(model, adapters.tensors_of(model))
    model_folder.write_safetensors(folder / adapters.WEIGHTS, own)
    assert not (folder / "config.json").exists()
    expected = logprobs(model)
    plain = AutoModelForCausalLM.from_pretrained(where)
    theirs = PeftModel.from_pretrained(plain, str(folder)).get_base_model().eval()
    assert apart(logprobs(theirs), expected) < 2e-5
    loaded, own_tokenizer = loading.load(Model(), folder)
    assert apart(logprobs(loaded.eval()), expected) < 2e-5
    assert own_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not any(p.requires_grad for p in loaded.parameters())
    again = AutoModelForCausalLM.from_pretrained(where).eval()
    adapters.load(again, folder, trained=True)
    assert apart(logprobs(again), expected) < 2e-5
    trained = {n for n, p in again.named_parameters() if p.requires_grad}
    assert trained == adapters.tensors_of(model).keys()


def test_checkpoint_holds_only_the_adapter() -> None:
    model, _ = adapted("norms")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    logprobs(model).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    tensors = Parts(model, optimizer, {"a": torch.ones(2)}).tensors()
    own = adapters.tensors_of(model).keys()
    assert {n.removeprefix("model.") for n in tensors if n.startswith("model.")} == own
    moments = {n.rpartition(".")[0] for n in tensors if n.startswith("optimizer.")}
    assert moments == {f"optimizer.{name}" for name in own}
    assert torch.equal(tensors["reference.a"], torch.ones(2))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nearest": ({"target_modules": ["q_porj"]}, "the model has no module q_porj. Did you mean q_p"),
    "pattern": ({"target_modules": r"(([\w.]+)+)+!"}, "matches no module"),
    "head": ({"target_modules": ["lm_head"]}, "lm_head is an embedding or the output head"),
    "router": ({}, "model.layers.0.mlp.router is a router"),
    "field": ({"args": {"rnak_pattern": {}}}, "rnak_pattern"),
    "random": ({"args": {"init_lora_weights": "pissa_niter_4"}}, "is random and changes the model"),
    "rows": ({"args": {"trainable_token_indices": [1]}}, "trains rows of the embeddings"),
    "bias": ({"args": {"lora_bias": True}}, "has no place for"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_adapter_that_does_not_fit(name: str) -> None:
    settings, message = BAD[name]
    adapter = replace(Adapter(method="lora"), **settings)
    with pytest.raises(UserError, match="adapter") as raised:
        adapters.attach(base_of(name), adapters.config_of(adapter, "base", None), 0)
    assert message in str(raised.value)


def test_a_copy_of_a_tied_weight_is_refused() -> None:
    base = make(Family("qwen2", {"tie_word_embeddings": True}))
    adapter = Adapter(method="lora", args={"modules_to_save": ["lm_head"]})
    with pytest.raises(UserError, match="lm_head is tied"):
        adapters.attach(base, adapters.config_of(adapter, "base", None), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, _ = adapted("lora")
    (tmp_path / adapters.CONFIG).write_bytes(adapters.config_file(model))
    save_file(adapters.file_tensors(model, adapters.tensors_of(model)), tmp_path / adapters.WEIGHTS)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_that_does_not_fit(folder: Path) -> None:
    wrong = (
        r"does not fit the model: base_model\.model\.model\.layers\.0\.[a-z_.]+\.lora_[AB]\.weight "
        r"has the shape \[\d+, \d+\], not \[\d+, \d+\]\.$"
    )
    with pytest.raises(UserError, match=wrong):
        adapters.load(make(Family("qwen2", {"hidden_size": 64})), folder, trained=True)
    stored = load_file(folder / adapters.WEIGHTS)
    name = next(iter(stored))
    save_file({n: t for n, t in stored.items() if n != name}, folder / adapters.WEIGHTS)
    with pytest.raises(UserError, match="is only in the "):
        adapters.load(base_of("lora"), folder, trained=True)
    change(folder / adapters.CONFIG, peft_type="PREFIX_TUNING")
    with pytest.raises(UserError, match="is of type PREFIX_TUNING"):
        adapters.load(base_of("lora"), folder, trained=True)
    (folder / adapters.CONFIG).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        adapters.load(base_of("lora"), folder, trained=True)


def test_missing_base(folder: Path) -> None:
    change(folder / adapters.CONFIG, base_model_name_or_path=str(folder / "gone"))
    with pytest.raises(UserError, match=r"its base model .*gone is gone"):
        loading.load(Model(), folder)
    change(folder / adapters.CONFIG, base_model_name_or_path=None)
    with pytest.raises(UserError, match="names no base_model_name_or_path"):
        loading.load(Model(), folder)
    change(folder / adapters.CONFIG, base_model_name_or_path=str(folder))
    with pytest.raises(UserError, match="is an adapter itself"):
        loading.load(Model(), folder)


def test_unsafe_adapter_config(folder: Path) -> None:
    change(folder / adapters.CONFIG, runtime_config={"ephemeral_gpu_offload": True})
    adapters.load(base_of("lora"), folder, trained=False)
    change(folder / adapters.CONFIG, target_modules=5)
    with pytest.raises(UserError, match="not iterable"):
        adapters.load(base_of("lora"), folder, trained=False)
    change(folder / adapters.CONFIG, megatron_config={}, megatron_core="megatron.mine")
    adapters.read_config(folder)  # peft imports nothing without a config
    change(folder / adapters.CONFIG, megatron_config={"a": 1})
    with pytest.raises(UserError, match="megatron_config imports the modules"):
        adapters.load(base_of("lora"), folder, trained=False)
