"""Turns of the model as messages, in four formats, sound and broken."""

import json
import random
from typing import Any

import pytest

from grpo_cli.environments.response import FORMATS, MOST_CHARACTERS, MalformedCall, ResponseParser
from tests.environments.templates import MULTIPLY, RESPONSE_TEMPLATE
from tests.tables import rows_of, table


def parse(form: str, text: str, prefix: str = "") -> dict[str, Any]:
    return ResponseParser(FORMATS[form]).parse(text, prefix, [MULTIPLY])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    assert all(c["type"] == "function" for c in message.get("tool_calls", []))
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]


TOO_MUCH = [
    {"form": "hermes", "text": "<tool_call>" + "[" * 100_000, "error": "not valid JSON"},
    {"form": "hermes", "text": '<tool_call>{"name": ' + "1" * 10_000, "error": "not valid JSON"},
]


@table("row", [*rows_of("environments/responses.jsonl"), *TOO_MUCH])
def test_a_turn_is_an_answer_with_calls_and_a_thought_or_malformed(row: dict[str, Any]) -> None:
    text, prefix = row["text"], row.get("prefix", "")
    if "error" in row:
        with pytest.raises(MalformedCall) as error:
            parse(row["form"], text, prefix)
        assert row["error"] in str(error.value)
        assert len(str(error.value)) <= 300
        assert "\n" not in str(error.value)
        return
    message = parse(row["form"], text, prefix)
    assert (message["role"], message["content"]) == ("assistant", row["content"])
    assert message.get("reasoning_content") == row.get("thought")
    expected = [tuple(call) for call in row.get("calls", [])]
    assert (calls_of(message) if "tool_calls" in message else []) == expected


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">",
    '{"name": "f", ', '"arguments": {', "}", "{", "[", "]", '"', "\\", "[TOOL_CALLS]", "[ARGS]",
    "<|python_tag|>", "<think>", "</think>", "é", "\ud83d", "\x00", "1", "e9", " ", "\n", "NaN",
    ",",
]  # fmt: skip


@pytest.mark.parametrize("form", [*FORMATS, "own"])
def test_garbage_is_text_or_a_malformed_call(form: str) -> None:
    parser = ResponseParser(FORMATS.get(form), RESPONSE_TEMPLATE if form == "own" else None)
    rng = random.Random(form)
    malformed = 0
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(1_000)]
    texts += [piece * (MOST_CHARACTERS // len(piece)) for piece in PIECES[:18:4]]
    texts += ["a" * (MOST_CHARACTERS + 1)]
    for text in texts:
        try:
            message = parser.parse(text, "", [MULTIPLY])
        except MalformedCall:
            malformed += 1
            continue
        assert isinstance(message["content"], str)
        for name, arguments in calls_of(message) if "tool_calls" in message else []:
            assert isinstance(name, str)
            assert isinstance(arguments, dict)
            json.dumps(arguments)
    assert 20 < malformed < 1_000
