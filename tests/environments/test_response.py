"""Turns of the model as messages, in four formats, sound and broken."""

import json
import random
from typing import Any

import pytest

from grpo_cli.environments.response import FORMATS, MOST_CHARACTERS, MalformedCall, ResponseParser
from tests.environments.templates import MULTIPLY
from tests.tables import table

HERMES = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
XML = "<function=multiply>\n<parameter=a>\n6\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
QWEN3_5 = f"<tool_call>\n{XML}</function>\n</tool_call>"
LLAMA3 = '{"name": "multiply", "parameters": {"a": 6, "b": 7}}'
MISTRAL = '[TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 6, "b": 7}, "id": "abcdefghi"}]'
CALL = ("multiply", {"a": 6, "b": 7})
IN_JSON = {"hermes": "<tool_call>{}</tool_call>", "llama3": "{}", "mistral": "[TOOL_CALLS][{}]"}


def h(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def parse(form: str, text: str, prefix: str = "") -> dict[str, Any]:
    return ResponseParser(FORMATS[form]).parse(text, prefix, [MULTIPLY])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    assert all(c["type"] == "function" for c in message.get("tool_calls", []))
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]


@table(
    ("form", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", [CALL]),
        ("hermes", f"I multiply.\n{HERMES}", "I multiply.", [CALL]),
        ("hermes", f"{HERMES}\n{HERMES}", "", [CALL, CALL]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [CALL]),
        ("hermes", h('{"name": "f"}'), "", [("f", {})]),
        ("hermes", h('{"name": "f", "arguments": null}'), "", [("f", {})]),
        ("hermes", h('{"name": "f", "arguments": ""}'), "", [("f", {})]),
        ("hermes", h('{"name": "multiply", "arguments": "{\\"a\\": 6, \\"b\\": 7}"}'), "", [CALL]),
        ("hermes", h('{"name": "multiply", "arguments": {"a": "6", "b": 7}}'), "", [CALL]),
        (
            "hermes",
            h('{"name": "multiply", "arguments": {"note": "7", "x": "7"}}'),
            "",
            [("multiply", {"note": "7", "x": "7"})],
        ),
        (
            "hermes",
            '<tool_call>{"name":"é","arguments":{"日":"\\u00e9"}}',
            "",
            [("é", {"日": "é"})],
        ),
        ("hermes", h('{"name": "f", "arguments": {"a": 1, "a": 2}}'), "", [("f", {"a": 2})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"t": "</x>"}}',
            "",
            [("f", {"t": "</x>"})],
        ),
        ("qwen3_5", QWEN3_5, "", [CALL]),
        ("qwen3_5", f"Well.\n\n{QWEN3_5}{QWEN3_5}", "Well.", [CALL, CALL]),
        ("qwen3_5", h("<function=f></function>"), "", [("f", {})]),
        (
            "qwen3_5",
            "<tool_call><function=multiply><parameter=note>\n7\n8\n</parameter></function>",
            "",
            [("multiply", {"note": "7\n8"})],
        ),
        (
            "qwen3_5",
            h("<function=multiply><parameter=a>x</parameter></function>"),
            "",
            [("multiply", {"a": "x"})],
        ),
        ("llama3", LLAMA3, "", [CALL]),
        ("llama3", f"<|python_tag|>{LLAMA3}; {LLAMA3}", "", [CALL, CALL]),
        ("llama3", '{"name": "multiply"}', "", [("multiply", {})]),
        ("llama3", '<|python_tag|>{"name": "f"}', "", [("f", {})]),
        ("mistral", MISTRAL, "", [CALL]),
        ("mistral", f"So: {MISTRAL}", "So:", [CALL]),
        ("mistral", '[TOOL_CALLS]multiply[ARGS]{"a": 6, "b": 7}', "", [CALL]),
        ("mistral", '[TOOL_CALLS]multiply[CALL_ID]x[ARGS]{"a": 6, "b": 7}', "", [CALL]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "", [("f", {}), ("g", {})]),
    ],
)
def test_calls_are_read(form: str, text: str, content: str, calls: list[Any]) -> None:
    message = parse(form, text)
    assert calls_of(message) == calls
    assert (message["role"], message["content"]) == ("assistant", content)


@table(
    ("form", "text"),
    [(form, text) for form in FORMATS for text in ("", "42", "</tool_call> 6 < 7", "a\nb")]
    + [
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"answer":'),
        ("llama3", '{"name": "Ada"}'),
        ("llama3", '{"name": ["multiply"]}'),
        ("llama3", "{42}"),
        ("mistral", '[{"name": "multiply"}]'),
    ],
)
def test_an_answer_has_no_calls(form: str, text: str) -> None:
    assert parse(form, text) == {"role": "assistant", "content": text}


@table(
    ("form", "text", "expected"),
    [
        ("hermes", "<tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>{</tool_call>", "not valid JSON"),
        ("hermes", HERMES[:-20], "not valid JSON"),
        ("hermes", f"<tool_call>{HERMES}</tool_call>", "not valid JSON"),
        ("hermes", h("6"), "must have a name and arguments; found: 6"),
        ("hermes", h('["multiply"]'), "must have a name"),
        ("hermes", h('{"arguments": {}}'), "must have a name"),
        ("hermes", h('{"name": 6}'), "name of a call must be text, not 6"),
        ("hermes", h('{"name": ""}'), "must be text"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": [6]}',
            "arguments of f must be a mapping",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "6"}',
            "arguments of f must be a mapping",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', "not a finite number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}', "not a finite number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}', "surrogates"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("hermes", '<tool_call>{"name": ' + "1" * 10_000, "not valid JSON"),
        ("hermes", h("") * 2_000, "more than 1,000 calls"),
        ("qwen3_5", h("multiply(6, 7)"), "must be <function=NAME>"),
        ("qwen3_5", "<tool_call>\n" + XML, "must be <function=NAME>"),
        ("qwen3_5", h("<function=f</function>"), "not closed by >"),
        ("qwen3_5", h("<function=></function>"), "must be text"),
        ("qwen3_5", h("<function=f>6</function>"), "must be <parameter=NAME>"),
        ("qwen3_5", "<tool_call><function=f><parameter=a></function>", "must be <parameter=NAME>"),
        ("llama3", '{"name": "multiply", "parameters": {"a": 6', "not valid JSON"),
        ("llama3", '<|python_tag|>print("a")', "not valid JSON"),
        ("llama3", "<|python_tag|>{}", "must have a name and parameters"),
        ("llama3", f"{LLAMA3} and more", "not valid JSON"),
        ("llama3", LLAMA3 + "{}", "must have a name and parameters"),
        ("mistral", "[TOOL_CALLS]", "not valid JSON"),
        ("mistral", "[TOOL_CALLS] []", "must be followed by calls"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "not valid JSON"),
        ("mistral", MISTRAL[:-9], "not valid JSON"),
    ],
)
def test_a_call_that_was_begun_and_cannot_be_read(form: str, text: str, expected: str) -> None:
    with pytest.raises(MalformedCall) as error:
        parse(form, text)
    assert expected in str(error.value)
    assert len(str(error.value)) <= 300
    assert "\n" not in str(error.value)


@table(
    ("text", "prefix", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\n42", "", "hm", "42"),
        ("hm\n</think>\n\n42", "<|im_start|>assistant\n<think>\n", "hm", "42"),
        (f"<think>{HERMES}</think>42", "", HERMES, "42"),  # a call in a thought is none
        (f"<think>{HERMES}", "", HERMES, ""),
        ("42 <think>", "", None, "42 <think>"),
        ("42", "<think>\n\n</think>\n\n", None, "42"),
    ],
)
def test_thoughts_are_kept_apart(text: str, prefix: str, thought: str | None, content: str) -> None:
    message = parse("hermes", text, prefix)
    expected: dict[str, Any] = {"role": "assistant", "content": content}
    assert message == expected | ({} if thought is None else {"reasoning_content": thought})


def test_a_call_follows_a_thought() -> None:
    message = parse("hermes", f"<think>hm</think>\n{HERMES}")
    assert calls_of(message) == [CALL]
    assert message["reasoning_content"] == "hm"


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">",
    '{"name": "f", ', '"arguments": {', "}", "{", "[", "]", '"', "\\", "[TOOL_CALLS]", "[ARGS]",
    "<|python_tag|>", "<think>", "</think>", "é", "\ud83d", "\x00", "1", "e9", " ", "\n", "NaN",
    ",",
]  # fmt: skip


@pytest.mark.parametrize("form", [*FORMATS, "own"])
def test_garbage_is_text_or_a_malformed_call(form: str) -> None:
    own = {
        "start_anchor": "assistant",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    parser = ResponseParser(template=own) if form == "own" else ResponseParser(FORMATS[form])
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
