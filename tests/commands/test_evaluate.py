"""The words of `grpo eval`, and which knobs it reads."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from grpo_cli.commands.evaluate import spelt_out
from grpo_cli.config.compose import compose_and_call
from grpo_cli.config.parsing import parse
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import Dataset
from grpo_cli.errors import UserError
from grpo_cli.evaluation.knobs import check_read, check_rows, settings, without_training
from grpo_cli.evaluation.settings import Benchmark


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("generation.temperature=0.5", "is only read in training; evaluation reads eval.temp"),
        ("steps=5", "steps=5: is only read in training."),
    ],
)
def test_what_only_training_reads_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_read([word])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_evaluation_reads_is_not() -> None:
    words = ["recipe=math_qwen", "seed=3", "+model.args.use_safetensors=true", "distributed=fsdp2"]
    words += ["generation.stop=[x]", "generation.vllm.memory=0.5", "dataset.final_assistant=drop"]
    words += ["eval.tempreture=1", "-m", "hydra.sweep.dir=x", "resume=auto", "~reward.format"]
    check_read(words)


@pytest.mark.parametrize(
    "word", ["dataset.eval=a.jsonl", "reward=math", "eval.accuracy=math", "dataset.system=S"]
)
def test_held_out_rows_are_not_those_of_benchmarks(word: str) -> None:
    check_rows([word], Recipe())
    with pytest.raises(UserError, match="benchmarks are evaluated in their place: own"):
        check_rows(["seed=1", word], Recipe(benchmark={"own": Benchmark()}))
    check_rows(["seed=1"], Recipe(benchmark={"own": Benchmark()}))


def composed(**changes: Any) -> Any:
    cfg = OmegaConf.structured(Recipe)
    cfg.model.path, cfg.dataset.eval = "some/model", "a.jsonl"
    cfg.reward = {"math": {}}
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    return cfg


@pytest.mark.parametrize(
    "changes",
    [
        {"loss.entropy_target": 1.0, "loss.entropy_coef": 2.0},
        {"generation.tools.seconds": 9.0},
    ],
    ids=str,
)
def test_mistakes_about_training_are_none_of_evaluation(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        parse(composed(**changes))
    cfg = composed(**changes)
    without_training(cfg, [])
    parse(cfg)


def test_a_chat_template_is_read_for_benchmarks_too() -> None:
    own = {"model.chat_template": "{{ messages }}", "dataset.chat": False}
    with pytest.raises(UserError, match=r"is only read with dataset\.chat = auto or true"):
        parse(composed(**own))
    parse(composed(**own, benchmark={"own": {"data": "a.jsonl"}}))


def told(**changes: Any) -> str:
    cfg = composed(**changes)
    without_training(cfg, [])
    found: str = settings(parse(cfg))["settings_hash"]
    return found


TIR = {"modes": {"tir": {"prompt": "{question}"}}}
OWN = {"benchmark": {"own": {"data": "a.jsonl", **TIR}}}


@pytest.mark.parametrize(
    ("always", "changes"),
    [
        ({}, {"seed": 1}),
        ({}, {"mixed_precision": "bf16"}),
        ({"dataset.chat": True}, {"model.chat_template_kwargs": {"enable_thinking": False}}),
        ({"dataset.chat": True}, {"dataset.final_assistant": "drop"}),
        ({}, {"dataset.eval_limit": 3}),
        (OWN, {"dataset.max_pixels": 4096}),
        ({}, {"reward": {"math": {"args": {"units": True}}}}),
        ({}, {"eval.num_samples": 3}),
        ({"eval.num_samples": 3}, {"eval.temperature": 0.5}),
        (OWN, {"benchmark": {"own": {"data": "a.jsonl", **TIR, "stop": ["x"]}}}),
        ({**OWN, "eval.mode": ["tir"]}, {"generation.tools.max_calls": 2}),
    ],
    ids=str,
)
def test_other_settings_have_another_hash(always: dict[str, Any], changes: dict[str, Any]) -> None:
    assert told(**always) != told(**{**always, **changes})


@pytest.mark.parametrize(
    "name",
    ["plain.jsonl", "my-set_v1.2&x%.jsonl", "it's.csv", "a b.jsonl.gz", "x=(1){2}.json", "前.csv"],
)
def test_a_file_of_any_name_is_a_benchmark(name: str) -> None:
    (word,) = spelt_out(f"benchmark=folder/{name}")
    found: list[Any] = []
    key = word.partition("=")[0].split(".")[1]

    def task(cfg: Any) -> None:
        found.append(cfg.benchmark[key].data)

    compose_and_call([word], task, "_bare")
    assert found == [str(Path("folder", name).resolve())]


def test_training_rows_are_only_read_where_held_out_rows_come_from_them() -> None:
    with pytest.raises(UserError, match="is only read in training"):
        check_rows(["dataset.train=a.jsonl"], Recipe())
    check_rows(["dataset.train=a.jsonl"], Recipe(dataset=Dataset(test_split_size=0.1)))


def test_sampling_as_in_training_reads_the_knobs_of_training() -> None:
    check_read(["eval.sampling=training", "generation.temperature=0.5", "generation.top_k=5"])
    with pytest.raises(UserError, match="evaluation reads eval"):
        check_read(["eval.sampling=training", "generation.num_generations=5"])
