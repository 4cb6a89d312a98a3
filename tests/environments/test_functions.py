"""Tools: what of a function the model sees, and how its calls are answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from grpo_cli.environments.functions import Functions, ToolError, as_text, load_tools, make_tool
from grpo_cli.environments.protocol import Observation
from grpo_cli.errors import UserError
from tests.environments import samples
from tests.environments.messages import calls as turn
from tests.environments.messages import texts
from tests.tables import table

TOOLS = {name: f"tests.environments.samples:{name}" for name in ("multiply", "wait_for", "does")}


def step(*calls: tuple[str, Any]) -> Observation:
    return asyncio.run(Functions(load_tools(TOOLS)).step(turn(*calls)))


def content(name: str, arguments: Any) -> str:
    observation = step((name, arguments))
    (answer,) = observation.messages
    assert answer["role"] == "tool"
    assert answer["name"] == name
    assert not observation.done
    text: str = answer["content"]
    return text


def test_the_schema_is_that_of_transformers_under_the_name_of_the_recipe() -> None:
    (schema,) = Functions(load_tools({"times": TOOLS["multiply"]})).schemas
    expected = get_json_schema(samples.multiply)
    assert schema == {**expected, "function": {**expected["function"], "name": "times"}}
    assert list(schema["function"]["parameters"]["properties"]) == ["a", "b"]


@table(
    ("arguments", "expected"),
    [
        ({"a": 6, "b": 7}, "42"),
        ({"a": "6", "b": " 7 "}, "42"),
        ({"a": 6.0, "b": -7}, "-42"),
        ({"a": 6}, "missing argument 'b'; arguments: a, b"),
        ({"x": 6, "a": 1, "b": 2}, "unknown argument 'x'; arguments: a, b"),
        ({"a": 6, "b": "seven"}, "argument 'b': 'seven' is not of type 'integer'"),
        ({"a": 6, "b": 7.5}, "argument 'b': 7.5 is not of type 'integer'"),
        ({"a": 6, "b": True}, "argument 'b': True is not of type 'integer'"),
    ],
)
def test_arguments_are_checked_and_texts_become_numbers(arguments: Any, expected: str) -> None:
    text = content("multiply", arguments)
    if expected.lstrip("-").isdigit():
        assert text == expected
    else:
        assert json.loads(text)["error"].startswith(expected)


def typed(
    kind: Literal["a", "b"] = "a",
    count: int | None = None,
    flag: bool = False,
    names: list[str] | None = None,
    share: float = 0.0,
    either: int | str = 0,
) -> Any:
    """Returns its arguments.

    Args:
        kind: one.
        count: two.
        flag: three.
        names: four.
        share: five.
        either: six.
    """
    return [kind, count, flag, names, share, either]


@table(
    ("given", "expected"),
    [
        ({}, ["a", None, False, None, 0.0, 0]),
        ({"count": None, "names": None}, ["a", None, False, None, 0.0, 0]),
        ({"count": "null"}, ["a", None, False, None, 0.0, 0]),
        ({"count": "3", "flag": "True", "share": "1e-1"}, ["a", 3, True, None, 0.1, 0]),
        ({"names": '["x", "y"]'}, ["a", None, False, ["x", "y"], 0.0, 0]),
        ({"share": "nan"}, "argument 'share'"),
        ({"share": 2}, ["a", None, False, None, 2, 0]),
        ({"kind": "c"}, "argument 'kind': 'c' is not one of ['a', 'b']"),
        ({"names": [1]}, "argument 'names"),
        ({"either": "7"}, ["a", None, False, None, 0.0, "7"]),
        ({"flag": "perhaps"}, "argument 'flag'"),
    ],
)
def test_types_of_transformers_schemas(given: dict[str, Any], expected: Any) -> None:
    tool = make_tool(typed, "typed", "tools.typed")
    if isinstance(expected, list):
        assert typed(**tool.arguments(given)) == expected
        return
    with pytest.raises(ToolError, match=re.escape(expected)):
        tool.arguments(given)


def test_calls_of_a_turn_are_answered_in_their_order() -> None:
    observation = step(
        ("multiply", {"a": 1, "b": 2}),
        ("wait_for", {"text": "slow", "seconds": 0.02}),
        ("wait_for", {"text": "quick"}),
        ("nothing", {}),
        ("multiply", {"a": 3, "b": 4}),
    )
    names = ["multiply", "wait_for", "wait_for", "nothing", "multiply"]
    assert [m["name"] for m in observation.messages] == names
    said = texts(observation)
    assert (said[:3], said[4]) == (["2", "slow", "quick"], "12")
    assert "there is no tool 'nothing'; there are: does, multiply, wait_for" in said[3]
    assert [call.failed for call in observation.calls] == [False, False, False, True, False]


def test_neighbouring_async_calls_run_at_the_same_time() -> None:
    order: list[str] = []

    async def note(text: str, steps: int) -> str:
        """Notes.

        Args:
            text: a text.
            steps: of the event loop.
        """
        for _ in range(steps):
            await asyncio.sleep(0)
        order.append(text)
        return text

    tools = Functions({"note": make_tool(note, "note", "")})
    calls = turn(("note", {"text": "a", "steps": 5}), ("note", {"text": "b", "steps": 1}))
    observation = asyncio.run(tools.step(calls))
    assert order == ["b", "a"]
    assert texts(observation) == ["a", "b"]


@table(
    ("what", "expected"),
    [
        ("raise", '{"error": "RuntimeError: on purpose"}'),
        ("exit", '{"error": "SystemExit: 3"}'),
        ("interrupt", '{"error": "KeyboardInterrupt"}'),
        ("none", "null"),
        ("number", '{"error": "ValueError: Exceeds the limit'),
        ("bytes", "\ufffd\ufffdabc\ufffd"),
        ("control", "a\ufffdb\ufffd[31mc\ufffdd\n\t"),
        ("object", '"<function fault.<locals>.<lambda> at 0x'),
    ],
)
def test_whatever_a_tool_does_becomes_text(what: str, expected: str) -> None:
    text = content("does", {"what": what})
    assert text.startswith(expected)
    text.encode()


@table(
    ("result", "text"),
    [
        (1.5, "1.5"),
        ({"ä": [1, None]}, '{"ä": [1, null]}'),
        ({1, 2}, "[1, 2]"),
        (object, "\"<class 'object'>\""),
    ],
)
def test_results_become_json(result: Any, text: str) -> None:
    assert as_text(result) == text


def no_docstring(a: int) -> str:
    return str(a)


def stars(*numbers: int) -> str:
    return str(numbers)


def unknown_name(a: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Has a type that does not exist."""
    return str(a)


@table(
    ("function", "says"),
    [
        (no_docstring, "it has no docstring; a tool needs a docstring"),
        (stars, "the model cannot give the argument *numbers"),
        (unknown_name, "name 'Nowhere' is not defined"),
        (dict, "tools.x = here: "),
    ],
)
def test_a_function_that_is_no_tool(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        make_tool(function, "x", "tools.x = here")
    assert says in str(error.value)


@table(
    ("tools", "says"),
    [
        ({"x": "math"}, "tools.x = math: is not a function; give it as my_module:my_function."),
        ({"x": "tests.environments.samples:multipy"}, "Did you mean multiply?"),
        ({"a b": TOOLS["multiply"]}, "a tool cannot be called 'a b'"),
    ],
)
def test_what_cannot_be_loaded(tools: dict[str, str], says: str) -> None:
    with pytest.raises(UserError) as error:
        load_tools(tools)
    assert says in str(error.value)


class One:
    """A callable object."""

    def __call__(self) -> int:
        """Returns one."""
        return 1


def test_a_callable_object_is_a_tool() -> None:
    tool = make_tool(One(), "one", "")
    observation = asyncio.run(Functions({"one": tool}).step(turn(("one", {}))))
    assert observation.messages[0]["content"] == "1"
