"""Words of a command line as settings: types, ranges, mistakes, help."""

from dataclasses import dataclass
from typing import Any

import pytest

from grpo_cli.config import words
from grpo_cli.config.knob import knob
from grpo_cli.errors import UserError


@dataclass
class Settings:
    port: int = knob(8000, "Port to listen at.", ge=1, le=65535)
    share: float | None = knob(None, "Share of the memory.", gt=0)
    mode: str = knob("fast", "Mode.", choices=("fast", "exact"))
    log: str | None = knob(None, "File; null: none.")
    text: str = knob("", "Text.")
    eager: bool = knob(False, "Whether to be eager.")
    nodes: list[str] = knob([], "Node; may be given several times.")
    columns: dict[str, str] = knob({}, "Rename a column: columns.NEW=OLD.")
    args: dict[str, Any] = knob({}, "Any other argument.")


def test_words_are_told_from_those_of_a_recipe() -> None:
    argv = ["port=1", "log=a", "log.report=no", "recipe=x", "columns.a=b", "+loss.beta=0", "PATH"]
    assert words.split(Settings, argv) == (
        ["port=1", "log=a", "columns.a=b"],
        ["log.report=no", "recipe=x", "+loss.beta=0", "PATH"],
    )
    assert words.split(Settings, ["log=a"], skip=("log",)) == ([], ["log=a"])
    words.check_recipe_words(Settings, ["log.report=no", "+loss.beta=0", "~eval", "model@x=y"])
    with pytest.raises(UserError, match=r"prot: there is no such word; .* Did you mean port\?"):
        words.check_recipe_words(Settings, ["prot=1"])


def test_values() -> None:
    given = ["port=81", "share=.5", "log=a: b=1", "text=", "eager=yes", "columns.a=1", "columns.b="]
    with pytest.raises(UserError, match=r"columns\.b: lacks a value; write columns\.b=VALUE\."):
        words.parse(Settings, given)
    more = ["args.a.b=1e3", "args.c=[1, x]", "nodes=a", "nodes=b"]
    settings = words.parse(Settings, [*given[:-1], *more])
    assert settings == Settings(
        81,
        0.5,
        "fast",
        "a: b=1",
        "",
        True,
        ["a", "b"],
        {"a": "1"},
        {"a": {"b": 1e3}, "c": [1, "x"]},
    )
    assert words.parse(Settings, ["log=null", "text=null", "share=null"]) == Settings(text="null")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["port"], "port: lacks a value; write port=VALUE."),
        (["port="], "port: lacks a value; write port=VALUE."),
        (["port=1", "port=2"], "port: is given twice."),
        (["port=many"], "port = many: must be a whole number, >= 1 and <= 65535."),
        (["port=null"], "port = null: must be a whole number, >= 1 and <= 65535."),
        (["port=0"], "port = 0: must be >= 1 and <= 65535."),
        (["share=.nan"], "share = nan: must be a finite number."),
        (["eager=5.5"], "eager = 5.5: must be true or false."),
        (["mode=exat"], "mode = 'exat': must be one of fast, exact. Did you mean exact?"),
        (["columns=a"], "columns=a: write columns.NAME=VALUE."),
        (["args=5"], "args = 5: must be a mapping; write args.NAME=VALUE."),
        (["args.a={b"], "args.a={b: the value is not YAML."),
        (["prot=1"], "prot: there is no such word; there are args, columns, "),
    ],
)
def test_mistakes(given: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        words.parse(Settings, given)
    assert message in str(caught.value)


def test_options() -> None:
    argv = ["a", "--port", "5", "--log=x", "b", "--text="]
    assert words.options_as_words(Settings, argv, "grpo") == ["a", "port=5", "log=x", "b", "text="]
    for argv in (["--prot=1"], ["-port=1"]):
        with pytest.raises(UserError, match=r"grpo: -?-p\w+: there is no such option; .*--port"):
            words.options_as_words(Settings, argv, "grpo")
    with pytest.raises(UserError, match="--port: lacks a value; write --port=VALUE"):
        words.options_as_words(Settings, ["--port", "--eager"], "grpo")
    with pytest.raises(UserError, match=r"--port = 0: must be >= 1"):
        words.parse(Settings, ["port=0"], words.option)


def test_help() -> None:
    lines = words.described(Settings).splitlines()
    assert lines[0] == "  port=8000                Port to listen at."
    assert [line.split()[0] for line in lines[1:]] == [
        "share=N", "mode=fast", "log=null", "text=VALUE", "eager=false", "nodes=VALUE",
        "columns.NAME=VALUE", "args.NAME=VALUE",
    ]  # fmt: skip
    assert lines[2].endswith("Mode. (fast, exact)")
    assert words.described(Settings, dashes=True).startswith("  --port=8000 ")
