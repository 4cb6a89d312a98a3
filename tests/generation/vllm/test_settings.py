"""What a recipe asks of vLLM: every contradiction, and the schema that completions follow."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.config.parsing import parse
from grpo_cli.config.schema import Recipe, Vllm
from grpo_cli.errors import UserError
from grpo_cli.generation.factory import check_settings
from grpo_cli.generation.vllm.settings import REFUSED, dtype_of, of_head, structured_outputs
from grpo_cli.training import prepare
from tests.config.test_parsing import recipe

HERE = {"generation.engine": "vllm_colocate"}
SERVED = {
    "generation.engine": "vllm_server",
    "generation.vllm.servers": ["http://127.0.0.1:8000"],
}
LORA = {"adapter.method": "lora", "adapter.sync": "adapter"}
AHEAD = SERVED | {"generation.vllm.prefetch_steps": 1}
OF_THE_OLD_POLICY = ": with generation.vllm.prefetch_steps the sampler's log-probabilities are the"


def parsed(changes: dict[str, Any]) -> Recipe:
    found = parse(recipe(**changes))
    check_settings(found)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        HERE,
        HERE | {"generation.vllm.regex": "[a-z]+"},
        HERE | {"generation.vllm.json_schema": '{"type": "object"}'},
        HERE | {"generation.vllm.engine_args": {"max_num_batched_tokens": 64}},
        HERE | {"generation.vllm.sleep": 2, "device": "auto"},
        HERE | {"generation.top_p": 0.9, "generation.dynamic_sampling": True},
        HERE | LORA | {"generation.vllm.sleep": 1, "device": "auto"},
        SERVED | LORA,
        SERVED,
        SERVED | {"generation.vllm.servers": ["https://node1:8000/", "http://node2"]},
        SERVED | {"generation.vllm.transfer": "disk"},
        SERVED | {"generation.top_p": 0.9, "generation.dynamic_sampling": True},
        SERVED | {"generation.vllm.regex": "a+", "generation.min_completion_tokens": 2},
        AHEAD | {"generation.temperature": 0.7, "generation.stop": ["\n"]},
        AHEAD | {"generation.vllm.in_flight": True},
    ],
    ids=str,
)
def test_what_is_sound(changes: dict[str, Any]) -> None:
    assert parsed(changes).generation.engine == changes["generation.engine"]


BOTH_SCHEMAS = {"generation.vllm.regex": "a", "generation.vllm.json_schema": '{"type": "object"}'}
SERVERS = "generation.vllm.servers"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (HERE | BOTH_SCHEMAS, "generation.vllm.regex: json_schema is set too"),
        (HERE | {"generation.vllm.json_schema": "/not/there.json"}, "/not/there.json: [Errno 2]"),
        (SERVED | {"generation.vllm.json_schema": "{'a': 1}"}, "json_schema = {'a': 1}: Expecting"),
        (
            HERE | {"generation.vllm.sleep": 1, "device": "cpu"},
            "generation.vllm.sleep = 1: vLLM sleeps on GPUs only",
        ),
        (
            HERE | LORA | {"generation.vllm.sleep": 2, "device": "auto"},
            "adapter.sync = adapter: generation.vllm.sleep = 2 frees the base model's weights",
        ),
        (
            HERE | LORA | {"model.quantization": "nf4"},
            "adapter.sync = adapter: with model.quantization = nf4 vLLM would apply the adapter to",
        ),
        (HERE | LORA | {"adapter.method": "none"}, "adapter.sync = adapter: there is no adapter"),
        ({"generation.engine": "vllm_server"}, f"{SERVERS}: is empty; start one with `grpo serve`"),
        *(
            (SERVED | {SERVERS: [address]}, f"{SERVERS}: {address!r} is no address of a server")
            for address in ("node1:8000", "ftp://node1:8000", "http://", "http://node1:8000/v1")
        ),
        (SERVED | {SERVERS: ["http://a:1", "http://b:1", "http://a:1/"]}, "names a server twice."),
        (AHEAD | {"generation.dynamic_sampling": True}, "cannot be begun ahead with gener"),
        *(
            (AHEAD | {f"generation.{name}": value}, f"generation.{name}{OF_THE_OLD_POLICY}")
            for name, value in {
                "top_p": 0.99, "top_k": 1, "min_p": 0.01, "repetition_penalty": 0.9,
                "min_completion_tokens": 1, "presence_penalty": 1, "logit_bias": {3: 1.0},
                "vllm.regex": "a", "vllm.json_schema": "{}",
            }.items()
        ),
        (
            AHEAD | {"schedules": {"generation": {"top_p": {"to": 0.9}}}},
            f"generation.top_p{OF_THE_OLD_POLICY}",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        parsed(changes)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_engine_arguments_that_are_not_passed_through(name: str) -> None:
    with pytest.raises(UserError) as error:
        parsed(HERE | {"generation.vllm.engine_args": {name: 1}})
    assert str(error.value).startswith(f"generation.vllm.engine_args.{name}: cannot be set: ")


def test_every_contradiction_is_named_at_once() -> None:
    both = {"generation.vllm.servers": ["x"], "generation.dynamic_sampling": True}
    with pytest.raises(UserError) as error:
        parsed(SERVED | both | {"generation.vllm.prefetch_steps": 1, "generation.top_k": 3})
    keys = [line.split(":")[0].split(" =")[0] for line in str(error.value).splitlines()]
    assert keys == [
        "generation.vllm.servers", "generation.vllm.prefetch_steps", "generation.top_k",
    ]  # fmt: skip


def test_what_vllm_is_told_is_not_read_by_another_engine() -> None:
    with pytest.raises(UserError, match=r"generation\.vllm\.regex"):
        parsed({"generation.vllm.regex": "a"})
    with pytest.raises(UserError, match=r"generation\.vllm\.servers"):
        parsed(HERE | {"generation.vllm.servers": ["http://a:1"]})


def test_what_completions_must_match(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    text, file = json.dumps(schema), tmp_path / "answer.json"
    file.write_text(text, encoding="utf-8")
    assert structured_outputs(Vllm()) is None
    assert structured_outputs(Vllm(regex="[ab]+")) == {"regex": "[ab]+"}
    assert structured_outputs(Vllm(json_schema=f"\n {text}")) == {"json": schema}
    assert structured_outputs(Vllm(json_schema=str(file))) == {"json": schema}
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="Expecting property name"):
        structured_outputs(Vllm(json_schema=str(file)))


@pytest.mark.parametrize(
    ("model", "mixed", "engine", "expected"),
    [
        ("float32", "no", "auto", "float32"),
        ("bfloat16", "no", "auto", "bfloat16"),
        ("float32", "bf16", "auto", "bfloat16"),
        ("float32", "bf16", "float32", "float32"),
        ("bfloat16", "no", "float16", "float16"),
    ],
)
def test_type_of_the_engines_arithmetic(model: str, mixed: str, engine: str, expected: str) -> None:
    changes = {"generation.vllm.dtype": engine} if engine != "auto" else {}
    found = parsed(HERE | {"model.dtype": model, "mixed_precision": mixed} | changes)
    assert dtype_of(found) == expected


def test_an_engine_that_is_not_installed_is_said_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    recipe = parsed(HERE)
    with pytest.raises(UserError, match=r"vLLM is not installed here; pip install 'grpo-cli\[vllm"):
        prepare.check_engine(recipe)
    recipe.generation.engine = "transformers"
    prepare.check_engine(recipe)


@pytest.mark.parametrize(
    ("head_dtype", "given", "expected"),
    [
        ("auto", {}, {}),
        ("auto", {"hf_overrides": {"a": 1}}, {}),  # as the recipe gives it
        ("float32", {}, {"head_dtype": "float32"}),
        ("float32", {"hf_overrides": {"a": 1}}, {"head_dtype": "float32", "a": 1}),
        ("float32", {"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
    ],
)
def test_the_output_head_in_float32(
    head_dtype: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert of_head(head_dtype, given) == ({"hf_overrides": expected} if expected else {})
