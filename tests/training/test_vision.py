"""Runs with images: resumed, on two processes, with broken pictures, of models that read text."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_cli import cli
from tests import programs, vision_models
from tests.vision_models import picture

pytestmark = pytest.mark.runs

ROWS = 12
TALK = """
from grpo_cli.environments.protocol import Observation

class Talk:
    def reset(self, row, seed):
        self.turns = 0
        return Observation([{"role": "user", "content": "Not at <image>, but well."}])

    def step(self, message):
        self.turns += 1
        return Observation([{"role": "user", "content": "And now?"}], done=self.turns > 2)

    def get_reward(self):
        return float(self.turns)
"""
COLUMNS = ("images", "prompt")
REWARD = """
def brightness(completions, image, **kwargs):
    assert all(i is None or i.mode == "RGB" for i in image), image
    return [float(len(c[-1]["content"]) % 3) + (0 if i is None else i.getpixel((0, 0))[0] / 255)
            for c, i in zip(completions, image)]
"""


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed, (32, 48) if seed % 2 else (32, 32)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, data of which some rows have no image, and a reward."""
    folder = tmp_path_factory.mktemp("vision")
    vision_models.make("idefics3", folder / "model")
    write(folder / "rows.parquet", [None if i % 4 == 3 else png(i) for i in range(ROWS)])
    (folder / "bright.py").write_text(REWARD)
    (folder / "talk.py").write_text(TALK)
    return folder


def write(path: Path, pictures: list[bytes | None], prompts: list[str] | None = None) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    cells = [None if p is None else {"bytes": p, "path": None} for p in pictures]
    prompts = prompts or [f"How many in {i}?" for i in range(len(cells))]
    columns = {"prompt": prompts, "image": cells}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(path)


def train(parts: Path, folder: Path, *words: str, processes: int = 1, data: str = "rows") -> Any:
    """Trains for four steps; with one process in this one, which is quicker."""
    recipe = [
        *("recipe=arithmetic_tiny", "model=qwen2_5_0_5b_instruct", "reward=[]"),
        f"dataset.train={parts / data}.parquet",
        *("dataset.prompt='{prompt}'", "dataset.solution=null", "dataset.chat=true"),
        *("dataset.eval=null", "dataset.max_prompt_tokens=96", "eval.every=0"),
        *("steps=4", "prompts_per_step=4", "generation.num_generations=3", "device=cpu"),
        *("generation.max_completion_tokens=6", "checkpoint.every=2", "loss.beta=0.05"),
        "log.completions_every=4",
    ]
    command = ["train", *recipe, f"output_dir={folder}", *words]
    if "reward=[environment]" not in words:
        command.append("+reward.bright.function=bright:brightness")
    if not any(word.startswith("model") for word in words):
        command.append(f"model.path={parts / 'model'}")
    if processes > 1:
        started = programs.started(processes, "-m", "grpo_cli", *command)
        return programs.run(started, PYTHONPATH=f"{programs.ROOT}:{parts}", HF_HUB_OFFLINE="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PYTHONPATH", f"{programs.ROOT}:{parts}")  # of the reward's worker
        patch.syspath_prepend(str(parts))
        patch.setattr(sys, "argv", ["grpo"])  # Hydra replaces them
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run_command(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step-4" / "model.safetensors")


@pytest.fixture(scope="module")
def straight(parts: Path) -> Path:
    folder = parts / "straight"
    ended = train(parts, folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def test_a_resumed_run_has_the_same_weights(parts: Path, straight: Path, tmp_path: Path) -> None:
    before = load_file(parts / "model" / "model.safetensors")
    tower = [n for n in before if "vision_model" in n and "k_proj.bias" not in n]
    assert all(not torch.equal(before[n], weights(straight)[n]) for n in tower)
    shutil.copytree(straight, tmp_path / "halted")
    shutil.rmtree(tmp_path / "halted" / "checkpoints" / "step-4")
    (tmp_path / "halted" / "summary.json").unlink()
    (tmp_path / "halted" / "completions" / "step-4.parquet").unlink()
    ended = train(parts, tmp_path / "halted", "resume=auto")
    assert ended.returncode == 0, ended.stderr
    expected = weights(straight)
    assert all(torch.equal(w, expected[n]) for n, w in weights(tmp_path / "halted").items())
    first, second = (f / "completions" / "step-4.parquet" for f in (straight, tmp_path / "halted"))
    assert first.read_bytes() == second.read_bytes()
    (pictures, prompts) = (parquet.read_table(first)[name].to_pylist() for name in COLUMNS)
    assert {len(cell) for cell in pictures} <= {0, 1}
    numbers = [int(p.split(" in ")[1].split("?")[0]) for p in prompts]
    rows = [[] if n % 4 == 3 else [{"bytes": png(n), "path": None}] for n in numbers]
    assert pictures == rows


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_match(parts: Path, straight: Path, tmp_path: Path, strategy: str) -> None:
    ended = train(parts, tmp_path / "two", f"distributed={strategy}", processes=2)
    assert ended.returncode == 0, ended.stderr
    expected = weights(straight)
    for name, weight in weights(tmp_path / "two").items():
        assert torch.allclose(weight, expected[name], atol=1e-5), name
    folders = straight, tmp_path / "two"
    one, two = (
        parquet.read_table(f / "completions" / "step-4.parquet", columns=[*COLUMNS, "columns"])
        for f in folders
    )
    assert one.equals(two)


def test_processes_without_images(parts: Path, tmp_path: Path) -> None:
    """Nor may all of them in a step, which leaves the vision tower as it is."""
    write(parts / "few.parquet", [png(i) if i == 5 else None for i in range(ROWS)])
    runs = {"one": 1, "two": 2}
    for name, processes in runs.items():
        words = ["distributed=fsdp2"] if processes == 2 else []
        more = "steps=3", "checkpoint.every=1", "checkpoint.keep_last=3", "optimizer.warmup_steps=0"
        ended = train(parts, tmp_path / name, *words, *more, processes=processes, data="few")
        assert ended.returncode == 0, ended.stderr
    for step in (1, 2, 3):
        one, two = (
            load_file(tmp_path / name / "checkpoints" / f"step-{step}" / "model.safetensors")
            for name in runs
        )
        for name, weight in two.items():
            assert torch.allclose(weight, one[name], atol=1e-5), (step, name)


def test_the_reference_reads_the_images(parts: Path, tmp_path: Path) -> None:
    """Before the first update the KL divergence is 0; every matrix of an adapter moves."""
    words = "adapter=lora", "adapter.target_modules=[q_proj,v_proj]"
    vision_models.make("qwen2_5_vl", tmp_path / "model")
    more = f"model.path={tmp_path / 'model'}", "optimizer.warmup_steps=0"
    ended = train(parts, tmp_path / "run", *words, *more, "steps=2")
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kl = [step["kl"] for line in lines if "kl" in (step := json.loads(line))]
    assert len(kl) == 2
    assert kl[0] < 1e-9 < kl[1]
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    of_b = load_file(folder / "adapter_model.safetensors")
    moved = [bool(w.any()) for name, w in of_b.items() if "lora_B" in name]
    assert len(moved) == 4
    assert all(moved)


def test_an_environment_talks_about_the_images(parts: Path, tmp_path: Path) -> None:
    """The sampler differs from the policy only by tokens of images, which it never samples."""
    vision_models.make("qwen2_5_vl", tmp_path / "model")
    ended = train(
        parts,
        tmp_path / "run",
        *("reward=[environment]", "environment.path=talk:Talk", "steps=2"),
        f"generation.stop_token_ids={list(range(20, 120))}",  # so that turns end
        *("generation.max_completion_tokens=60", "episode.turn_tokens=6"),
        *("dataset.max_prompt_tokens=256", f"model.path={tmp_path / 'model'}"),
    )
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    turns = [step["episode/turns/mean"] for step in steps if "episode/turns/mean" in step]
    assert turns
    assert min(turns) > 1
    name = "sampling/sampling_logp_difference/max"
    assert all(step[name] < 0.03 for step in steps if name in step)


def test_a_checkpoint_loads_by_transformers(straight: Path) -> None:
    folder = straight / "checkpoints" / "step-4"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    text = processor.apply_chat_template(messages, tokenize=False)
    inputs = processor(text=[text], images=[[picture(0)]], return_tensors="pt")
    assert model(**inputs).logits.isfinite().all()


def test_a_broken_picture_stops_the_run_or_is_left_out(parts: Path, tmp_path: Path) -> None:
    told = "row 0, column 'image': the image cannot be read"  # rewards are tried out on it
    write(parts / "broken.parquet", [b"no picture", *map(png, range(1, 5))])
    ended = train(parts, tmp_path / "stops", data="broken")
    assert ended.returncode != 0
    assert told in ended.stdout + ended.stderr
    assert "bad_rows=drop" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    ended = train(parts, tmp_path / "drops", "dataset.bad_rows=drop", data="broken")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(told) == 1  # not in each of the four epochs
    assert json.loads((tmp_path / "drops" / "summary.json").read_text())["steps"] == 4


def test_broken_held_out_pictures_are_left_out_at_the_start(parts: Path, tmp_path: Path) -> None:
    write(parts / "held_out.parquet", [png(0), png(1)[:300], png(2)])
    held_out = f"dataset.eval={parts / 'held_out.parquet'}", "eval.accuracy=bright", "eval.every=4"
    ended = train(parts, tmp_path / "drops", *held_out, "dataset.bad_rows=drop")
    assert ended.returncode == 0, ended.stderr
    assert "row 1, column 'image': the image cannot be read" in ended.stdout
    ended = train(parts, tmp_path / "stops", *held_out)
    assert ended.returncode == 2
    assert "held_out.parquet, row 1, column 'image': the image cannot be read" in ended.stderr


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("all-linear", {"vision_model", "connector", "text_model"}),
        (r".*text_model.*\.(q_proj|v_proj)", {"text_model"}),
    ],
    ids=["both", "language"],
)
def test_adapters_of_parts(parts: Path, tmp_path: Path, targets: str, found: set[str]) -> None:
    """The adapter moves in the parts that it is asked for."""
    words = ["adapter=lora", "adapter.rank=2", f"adapter.target_modules='{targets}'"]
    ended = train(parts, tmp_path, *words, "steps=2", "optimizer.learning_rate=1e-3")
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "checkpoints" / "step-2"
    adapter = load_file(folder / "adapter_model.safetensors")
    moved = {name for name, w in adapter.items() if "lora_B" in name and bool(w.any())}
    assert {name.removeprefix("base_model.model.model.").split(".")[0] for name in moved} == found
    AutoProcessor.from_pretrained(folder)
