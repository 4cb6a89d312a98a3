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
        HERE | {"generation.vllm.json_schema": '{"type": "object"}'},
        HERE | LORA | {"generation.vllm.sleep": 1, "device": "auto"},
        SERVED | LORA,
        SERVED | {"generation.vllm.servers": ["https://node1:8000/", "http://node2"]},
        SERVED | {"generation.top_p": 0.9, "generation.dynamic_sampling": True},
        AHEAD | {"generation.temperature": 0.7, "generation.vllm.in_flight": True},
    ],
    ids=str,
)
def test_valid_settings(changes: dict[str, Any]) -> None:
    assert parsed(changes).generation.engine == changes["generation.engine"]


BOTH_SCHEMAS = {"generation.vllm.regex": "a", "generation.vllm.json_schema": '{"type": "object"}'}
SERVERS = "generation.vllm.servers"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (HERE | BOTH_SCHEMAS, "generation.vllm.regex: json_schema is set too"),
        (HERE | {"generation.vllm.engine_args": {"max_model_len": "4k"}}, "= 4k: must be a who"),
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
            for address in ("node1:8000", "http://node1:8000/v1")
        ),
        (SERVED | {SERVERS: ["http://a:1", "http://b:1", "http://a:1/"]}, "names a server twice."),
        (AHEAD | {"generation.dynamic_sampling": True}, "cannot be begun ahead with gener"),
        *(
            (AHEAD | {f"generation.{name}": value}, f"generation.{name}{OF_THE_OLD_POLICY}")
            for name, value in {
                "top_p": 0.99, "logit_bias": {3: 1.0}, "vllm.regex": "a",
            }.items()
        ),
        (
            AHEAD | {"schedules": {"generation": {"top_p": {"to": 0.9}}}},
            f"generation.top_p{OF_THE_OLD_POLICY}",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_contradictions(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        parsed(changes)


def test_refused_engine_arguments() -> None:
    with pytest.raises(UserError) as error:
        parsed(HERE | {"generation.vllm.engine_args": dict.fromkeys(REFUSED, 1)})
    for name in REFUSED:
        assert f"generation.vllm.engine_args.{name}: cannot be set: " in str(error.value)


def test_vllm_settings_need_vllm() -> None:
    with pytest.raises(UserError, match=r"generation\.vllm\.regex"):
        parsed({"generation.vllm.regex": "a"})
    with pytest.raises(UserError, match=r"generation\.vllm\.servers"):
        parsed(HERE | {"generation.vllm.servers": ["http://a:1"]})


def test_json_schema_and_regex(tmp_path: Path) -> None:
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
        ("float32", "bf16", "auto", "bfloat16"),
        ("bfloat16", "no", "float16", "float16"),
    ],
)
def test_engine_dtype(model: str, mixed: str, engine: str, expected: str) -> None:
    changes = {"generation.vllm.dtype": engine} if engine != "auto" else {}
    found = parsed(HERE | {"model.dtype": model, "mixed_precision": mixed} | changes)
    assert dtype_of(found) == expected


def test_missing_engine_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    recipe = parsed(HERE)
    with pytest.raises(UserError, match=r"vllm_colocate needs vLLM: pip install 'vllm>="):
        prepare.check_engine(recipe)
    recipe.generation.engine = "transformers"
    prepare.check_engine(recipe)


@pytest.mark.parametrize(
    ("head_dtype", "given", "expected"),
    [
        ("auto", {"hf_overrides": {"a": 1}}, {}),  # as the recipe gives it
        ("float32", {"hf_overrides": {"a": 1}}, {"head_dtype": "float32", "a": 1}),
        ("float32", {"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
    ],
)
def test_float32_head(head_dtype: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert of_head(head_dtype, given) == ({"hf_overrides": expected} if expected else {})
