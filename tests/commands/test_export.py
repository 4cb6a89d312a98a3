"""`grpo export`: the plain folder of any checkpoint, as transformers would write it."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.core_model_loading import Chunk, WeightConverter

from grpo_cli.checkpoints import lookup, manifest, model_folder, provenance
from grpo_cli.checkpoints.checkpointer import Checkpointer, Parts
from grpo_cli.checkpoints.paths import checkpoint_path
from grpo_cli.commands import export
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.models import adapters, loading
from grpo_cli.models.settings import Adapter, Model
from tests import vision_models
from tests.conftest import Grpo
from tests.models.families import BY_NAME
from tests.models.test_architectures import make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def experts() -> PreTrainedModel:
    """A mixture of experts, which transformers keeps in other tensors than it is published in."""
    return make(BY_NAME["qwen3_moe"])


def saved(
    folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, step: int = 7, plain: bool = False
) -> Path:
    path = checkpoint_path(folder, step)
    saver = Checkpointer(Workers("cpu"), print)
    parts = Parts(model, torch.optim.AdamW(model.parameters()))
    saver.save(path, parts, {}, "steps: 1\n", tokenizer, with_model=plain, card="# A card\n")
    assert saver.wait() is None
    return path


def save_adapter(folder: Path, model: PreTrainedModel, tokenizer: object) -> None:
    for name, data in model_folder.files_of_adapter(model, tokenizer).items():
        manifest.write_file(folder / name, data)
    own = adapters.file_tensors(model, adapters.tensors_of(model))
    model_folder.write_safetensors(folder / adapters.WEIGHTS, own)


@pytest.fixture
def path(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A checkpoint, known as one's own in a cache of this test."""
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    return saved(tmp_path, model, tokenizer)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("with_plain", [False, True])
@pytest.mark.parametrize("which", ["model", "experts"])
def test_an_export_is_what_transformers_writes(
    tmp_path: Path,
    out: Path,
    tokenizer: Tokenizer,
    which: str,
    with_plain: bool,
    grpo: Grpo,
    request: pytest.FixtureRequest,
) -> None:
    model: PreTrainedModel = request.getfixturevalue(which)
    path = saved(tmp_path, model, tokenizer, plain=with_plain)
    assert f"exported to {out} (" in grpo("export", str(path), str(out))[1]
    weights, expected = "model.safetensors", tmp_path / "theirs"
    model.save_pretrained(expected)
    assert (out / weights).read_bytes() == (expected / weights).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert (out / name).read_text() == (expected / name).read_text()
    if with_plain:
        assert (path / weights).read_bytes() == (expected / weights).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    assert AutoTokenizer.from_pretrained(out)("1+1=") == tokenizer("1+1=")
    assert not (out / "training").exists()
    assert (out / "README.md").read_text() == "# A card\n"


def test_a_large_model_comes_in_several_files(
    tmp_path: Path,
    out: Path,
    tokenizer: Tokenizer,
    experts: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_folder.write_weights, "__defaults__", (40_000,))
    path = saved(tmp_path, experts, tokenizer)
    total, number = export.export(path, out)
    files = sorted(out.glob("*.safetensors"))
    assert number == len(files) > 2
    assert [p.name for p in files] == [
        f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)
    ]
    assert total == sum(p.stat().st_size for p in files)
    assert number <= 2 * total / 40_000 + 1, "two files in a row could be one"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: p.name for p in files for n in load_file(p)}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in experts.parameters())
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded(IDS).logits, experts.eval()(IDS).logits)


def test_weights_are_cast_and_the_config_says_so(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    model.register_buffer("count", torch.tensor([3]))
    path, out = saved(tmp_path, model, tokenizer), tmp_path / "out"
    export.main(["--dtype", "bfloat16", str(path), str(out)])
    tensors = load_file(out / "model.safetensors")
    assert tensors.pop("count").dtype == torch.int64
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_a_damaged_checkpoint_is_not_exported(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    path = saved(tmp_path, model, tokenizer)
    for step in (10, 3):
        saved(tmp_path, model, tokenizer, step)
    file = path / "training" / "shards" / "__0_0.distcp"
    os.truncate(file, 100)
    with pytest.raises(
        UserError, match=r"is damaged \(training/shards/__0_0.distcp: 100 bytes"
    ) as e:
        export.export(path, tmp_path / "out")
    assert str(e.value).endswith("other checkpoints of this run: step-3, step-10.")
    assert not (tmp_path / "out").exists()


def test_shards_are_evaluated_once_exported_with_the_recipe_of_their_run(path: Path) -> None:
    with pytest.raises(UserError, match=f"that with recipe={path}/training/recipe.yaml"):
        lookup.find_model(str(path))


def test_a_folder_that_holds_something_is_left_alone(path: Path, out: Path) -> None:
    out.mkdir()
    export.export(path, out)  # an empty one is as good as none
    before = sorted(out.iterdir())
    with pytest.raises(UserError, match="is there already, and not empty"):
        export.export(path, out)
    assert sorted(out.iterdir()) == before
    with pytest.raises(UserError, match="is there already"):
        export.export(path, out / "config.json")


@pytest.mark.parametrize("was_there", [False, True])
def test_an_export_that_is_broken_off_leaves_nothing_behind(
    was_there: bool, path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if was_there:
        out.mkdir()

    def breaks_off(files: Path, out: Path, dtype: torch.dtype | None) -> None:
        assert list(out.glob("*.safetensors"))
        (out / "tokenizer").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "copy_others", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        export.export(path, out)
    assert out.exists() == was_there
    assert not list(out.glob("*"))


def test_what_is_published_as_one_tensor_is_put_together(model: PreTrainedModel) -> None:
    kept = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    model._weight_conversions = [WeightConverter("self_attn.kv.weight", kept, [Chunk(dim=0)])]
    state = {name: p.detach() for name, p in model.named_parameters()}
    found = dict(
        model_folder.as_published(model, sorted(state, key=lambda name: name[::-1]), state)
    )
    for layer in (0, 1):
        start = f"model.layers.{layer}."
        both = torch.cat([state.pop(start + name) for name in kept])
        assert torch.equal(found.pop(f"{start}self_attn.kv.weight"), both)
    assert set(found) == set(state)


def test_code_of_a_foreign_checkpoint_runs_only_if_it_is_trusted(
    tmp_path: Path, path: Path, out: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.is_own(path)
    (path / "training" / "recipe.yaml").write_text("model: {trust_remote_code: true}\n")
    remade(path)
    told: list[bool] = []
    load = transformers.AutoConfig.from_pretrained

    def note(files: Path, trust_remote_code: bool) -> object:
        told.append(trust_remote_code)
        return load(files)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", note)
    code, _, err = grpo("export", str(path), str(out))
    assert code == 2
    assert "run code or reach other files and machines: model.trust_remote_code = true. If" in err
    assert "add --trust=true." in err
    assert (told, out.exists()) == ([], False)
    assert grpo("export", str(path), str(out), "--trust=true")[0] == 0
    provenance.note_own(path)
    assert grpo("export", str(path), str(tmp_path / "again"))[0] == 0
    assert told == [True, True]


def test_a_foreign_link_is_not_followed(path: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    (path / "training" / "model" / "notes.txt").symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=r"its link training/model/notes\.txt leads out of it"):
        export.export(path, out)
    assert not out.exists()
    export.export(path, out, trust=True)
    assert (out / "notes.txt").read_text() == "secret"


def remade(path: Path) -> None:
    """Writes a checkpoint's manifest anew, as whoever changes a file can."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    entries = {str(p.relative_to(path)): manifest.write_file(p, p.read_bytes()) for p in files}
    manifest.write(path, entries)


def test_a_forged_index_of_shards_is_one_sentence(path: Path, out: Path, grpo: Grpo) -> None:
    for content in (b"no pickle", pickle.dumps(["of something else"])):
        (path / "training" / "shards" / ".metadata").write_bytes(content)
        remade(path)
        code, _, err = grpo("export", str(path), str(out))
        assert (code, err.count("\n")) == (2, 1)
        assert "the index of its shards cannot be read: " in err


def test_an_adapter_on_a_quantized_model_is_merged_without_quantizing(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is made in float32 from the dequantized weights; the folder has the base's dtype."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300,
    )  # fmt: skip
    base, folder, words = tmp_path / "base", tmp_path / "adapter", tmp_path / "words"
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(base)
    tokenizer.save_pretrained(words)
    quantized = Model(dtype="float32", quantization="nf4", tokenizer=str(words))
    model, _ = loading.load(quantized, base)
    adapters.attach(model, adapters.config_of(Adapter(method="lora", rank=4), str(base), None), 0)
    for p in adapters.tensors_of(model).values():
        p.data += 0.01
    expected = dict(adapters.merged(model))
    save_adapter(folder, model, tokenizer)
    manifest.write_file(
        folder / "training" / "recipe.yaml",
        f"model: {{dtype: float32, quantization: nf4, tokenizer: {words}}}\n".encode(),
    )
    with pytest.raises(UserError, match=f"_path = {base}, model.tokenizer = {words}. If you"):
        export.export(folder, tmp_path / "merged", merge=True)
    export.export(folder, tmp_path / "merged", trust=True, merge=True)
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(t, expected[name].bfloat16()) for name, t in stored.items())
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (written["dtype"], "quantization_config" in written) == ("bfloat16", False)
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    (folder / "training" / "recipe.yaml").unlink()  # an adapter from elsewhere
    tokenizer.save_pretrained(base)
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    provenance.note_own(folder)
    export.main([str(folder), str(tmp_path / "exported")])
    assert provenance.is_own(tmp_path / "exported")  # whose base is merged without a question


def test_a_vision_model_is_exported_with_its_tower(tmp_path: Path) -> None:
    base, out, expected = tmp_path / "base", tmp_path / "out", tmp_path / "theirs"
    model, tokenizer = loading.load(Model(dtype="float32"), vision_models.make("qwen2_5_vl", base))
    export.export(saved(tmp_path, model, tokenizer), out, trust=True)
    model.save_pretrained(expected)
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (expected / weights).read_bytes()


def test_a_merged_adapter_keeps_the_trainings_template_and_processor(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base, folder, out = (tmp_path / name for name in ("base", "adapter", "out"))
    vision_models.make("qwen2_5_vl", base)
    model, tokenizer = loading.load(Model(dtype="float32", chat_template="hermes"), base)
    processor = loading.load_vision(Model(), base, tokenizer)
    adapters.attach(model, adapters.config_of(Adapter(method="lora"), str(base), None), 0)
    save_adapter(folder, model, processor)
    export.export(folder, out, trust=True, merge=True)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert (out / "processor_config.json").exists()


def test_a_merged_sum_is_not_rounded_to_the_dtype_of_the_base(
    tmp_path: Path, model: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    pytest.importorskip("peft")
    base, folder, out = (tmp_path / name for name in ("base", "adapter", "out"))
    model.bfloat16().save_pretrained(base)
    tokenizer.save_pretrained(base)
    wide, _ = loading.load(Model(dtype="float32"), base)
    adapters.attach(wide, adapters.config_of(Adapter(method="lora"), str(base), None), 0)
    for p in adapters.tensors_of(wide).values():
        p.data += 0.01
    save_adapter(folder, wide, tokenizer)
    export.export(folder, out, torch.float32, trust=True, merge=True)
    stored = load_file(out / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in adapters.merged(wide))
