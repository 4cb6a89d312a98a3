"""What a recipe asks of vLLM: every contradiction, and the schema that completions follow."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.config.parsing import parse
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.generation.factory import check_settings
from grpo_cli.generation.settings import Vllm
from grpo_cli.generation.vllm.checks import REFUSED, dtype_of, of_head, structured_outputs
from grpo_cli.training import prepare
from tests.config.test_parsing import recipe
from tests.tables import rows_of

HERE = {"generation.engine": "vllm_colocate"}
ROWS = rows_of("generation/vllm/checks.jsonl")


def parsed(changes: dict[str, Any]) -> Recipe:
    found = parse(recipe(**changes))
    check_settings(found)
    return found


# JSON has no numbers as keys.
AHEAD = {"generation.vllm.prefetch_steps": 1, "generation.logit_bias": {3: 1.0}}
SERVED = {"generation.engine": "vllm_server", "generation.vllm.servers": ["http://a:1"]}
ROWS.append({"changes": SERVED | AHEAD, "said": "generation.logit_bias: with generation.vllm.pref"})


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_settings(row: dict[str, Any]) -> None:
    """A row whose `said` is null is valid."""
    changes, said = row["changes"], row["said"]
    if said is None:
        assert parsed(changes).generation.engine == changes["generation.engine"]
        return
    with pytest.raises(UserError, match=re.escape(said)):
        parsed(changes)


def test_refused_engine_arguments() -> None:
    with pytest.raises(UserError) as error:
        parsed(HERE | {"generation.vllm.engine_args": dict.fromkeys(REFUSED, 1)})
    for name in REFUSED:
        assert f"generation.vllm.engine_args.{name}: cannot be set: " in str(error.value)


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


def test_missing_engine_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
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
