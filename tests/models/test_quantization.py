"""Quantized base models: their weights stay, and all ways of computing give the same numbers."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.errors import UserError
from grpo_cli.generation.vllm.weights import Weights
from grpo_cli.models import adapters, flops, loading, quantization
from grpo_cli.models.settings import Adapter, Model
from tests.models.families import Family
from tests.models.test_adapters import apart, logprobs, move
from tests.models.test_architectures import make

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    base = make(Family("qwen2", SIZES))
    for p in base.parameters():
        p.data *= 0.5  # log-probabilities of about -5, as a language model's
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder: Path, method: str) -> PreTrainedModel:
    model, _ = loading.load(Model(quantization=method), folder)
    return model


def adapted(folder: Path, kind: str = "lora") -> PreTrainedModel:
    model = load(folder, "nf4")
    config = adapters.config_of(Adapter(method=kind, rank=4), str(folder), None)
    adapters.attach(model, config, 7)
    move(model)
    return model


def dequantized_base(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A plain model with the weights that the quantized ones stand for."""
    plain = load(folder, "none")
    state = {
        name: quantization.dequantized(p) if quantization.is_quantized(p) else p
        for name, p, _ in adapters.plain_parameters(model)
    }
    plain.load_state_dict(state, strict=False)
    return plain.eval()


def test_the_quantized_weights_are_counted(folder: Path) -> None:
    model = load(folder, "nf4")
    inside = [p for p in model.parameters() if quantization.is_quantized(p)]
    weights = sum(map(quantization.numel, inside))
    # 2 layers of q, k, v, o, gate, up, down with hidden size 64, 32 keys, 128 within.
    assert weights == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
    assert "in nf4" in (quantization.summary(model) or "")
    assert not quantization.is_quantized(model.get_output_embeddings().weight)
    plain = load(folder, "none")
    assert quantization.summary(plain) is None
    assert flops.params_in_products(model) == flops.params_in_products(plain)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_of_a_quantized_model(folder: Path, kind: str) -> None:
    model = adapted(folder, kind)
    with torch.no_grad():
        logprobs(model.eval())  # which must not repack the weights
    plain = load(folder, "none").eval()
    merged = dict(adapters.merged(model))
    shapes = [(n, tuple(p.shape), p.dtype) for n, p in plain.named_parameters()]
    assert [(n, tuple(t.shape), t.dtype) for n, t in merged.items()] == shapes
    assert [(i.name, i.shape, i.dtype) for i in Weights(model).infos()] == shapes
    unmerged = dequantized_base(model, folder)
    if kind == "lora":  # by hand: W + alpha/r B A
        layer = model.model.layers[0].mlp.up_proj
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * (32 / 4)
        expected = unmerged.model.layers[0].mlp.up_proj.weight + product
        assert apart(merged["model.layers.0.mlp.up_proj.weight"], expected) < 1e-6
    plain.load_state_dict(merged, strict=False)
    assert apart(logprobs(plain), logprobs(model)) < 1e-5
    adapters.attach(unmerged, copy.deepcopy(adapters.attached_config(model)), 0)  # type: ignore[arg-type]
    adapters.fill(unmerged, adapters.copied(model))
    assert apart(logprobs(unmerged), logprobs(model)) < 1e-5


def test_training_leaves_quantized_weights(folder: Path) -> None:
    base, model = load(folder, "nf4").eval(), adapted(folder)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    logprobs(model).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    assert apart(logprobs(model), logprobs(base)) > 1e-3


@pytest.mark.parametrize("half", [True, False])
def test_compute_dtype(folder: Path, half: bool) -> None:
    """That of mixed precision, or of the stored weights; autocast does not decide it."""
    given = torch.bfloat16 if half else None
    model, _ = loading.load(Model(quantization="nf4"), folder, half_type=given)
    dtypes = {x.compute_dtype for x in model.modules() if hasattr(x, "compute_dtype")}
    assert dtypes == {torch.bfloat16 if half else torch.float32}
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    layer = model.model.layers[0].mlp.up_proj
    weight = quantization.dequantized(layer.weight)
    dtype = dtypes.pop()
    expected = (x.to(dtype) @ weight.to(dtype).T).float()
    assert torch.equal(layer(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == x.dtype


def test_experts_keep_their_dtype(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    settings = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make(Family("qwen3_moe", settings)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, "nf4")
    names = {n for n, p in model.named_parameters() if quantization.is_quantized(p)}
    assert names
    assert all("self_attn" in name for name in names)
    adapter = Adapter(
        method="lora",
        rank=2,
        target_modules=["q_proj", "v_proj"],
        args={"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    )
    adapters.attach(model, adapters.config_of(adapter, "base", None), 0)
    move(model)
    plain = load(tmp_path, "none").eval()
    plain.load_state_dict(dict(adapters.merged(model)), strict=False)
    assert apart(logprobs(plain), logprobs(model)) < 5e-5


@pytest.mark.parametrize(
    ("name", "part"), [("modules_to_save", "o_proj"), ("target_parameters", "q_proj.weight")]
)
def test_unsupported_uses_of_quantized_weights(folder: Path, name: str, part: str) -> None:
    adapter = Adapter(method="lora", args={name: [part]})
    with pytest.raises(UserError, match=f"adapter.args.{name}: {part} is quantized"):
        adapters.attach(load(folder, "nf4"), adapters.config_of(adapter, "base", None), 0)


def test_a_weight_that_is_not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight are not finite"):
        load(folder, "nf4")


def test_stored_quantized_weights(folder: Path) -> None:
    model = load(folder, "none")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(folder)
    with pytest.raises(UserError, match=r"its weights are stored quantized \(gptq\); give the"):
        loading.load(Model(), folder, trains=True)
    with pytest.raises(UserError, match="its weights are stored quantized"):
        load(folder, "nf4")


def test_block_size_must_divide_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """bitsandbytes would compute with wrong weights, without an error."""
    make(Family("qwen2", SIZES | {"intermediate_size": 96})).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layers.0.mlp.down_proj has 96 inputs, which is no mult"):
        load(tmp_path, "nf4")
