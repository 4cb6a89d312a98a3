"""Prints completions turn by turn: messages, the reward at each turn, and the reason of the end.

Text that the model has not sampled is dimmed: prompts, and replies of tools and environments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.rule import Rule
from rich.text import Text

from grpo_cli.config.interpolation import printable
from grpo_cli.data.conversations import text_of
from grpo_cli.data.sample import Sample
from grpo_cli.errors import counted

COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def trajectory(sample: Sample) -> Group:
    """Returns a stored completion as a renderable of rich."""
    return Group(Rule(), Text(head(sample), style="bold"), *body(sample))


def body(sample: Sample, prompt_characters: int | None = None) -> list[Text]:
    """Returns the messages of a stored completion, with its rewards and its end.

    Args:
        prompt_characters: characters to show of the prompt's end; None: the complete prompt.
    """
    parts = list(_shortened(sample, prompt_characters))
    if sample.images:
        parts.append(Text(f"  {counted(len(sample.images), 'image')}", style="bold blue"))
    episode = sample.episode
    if episode is None or not episode["messages"]:
        own = {"role": "assistant", "content": sample.prefill + sample.text}
        parts.append(_message(own, foreign=False))
    else:
        parts += _turns(episode, sample.columns.get("token_advantages"))
    return parts + [Text(line, style="bold") for line in _foot(sample)]


def _shortened(sample: Sample, most: int | None) -> Iterator[Text]:
    """Yields the messages of the prompt, or the end of the last one."""
    prompt = sample.prompt
    stored = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [_message(m, foreign=True) for m in stored]
    if most is None or sum(len(m) for m in messages) <= most:
        yield from messages
        return
    last = messages[-1]
    yield Text.assemble(("… ", "dim"), last[max(0, len(last) - most) :])


def _turns(episode: Mapping[str, Any], advantages: Sequence[float] | None) -> Iterator[Text]:
    """Yields the messages of an episode, each turn of the model with its number and reward.

    Args:
        advantages: the advantage of each token, if turns or steps have advantages of their own.
    """
    turns = [turn for turn in episode["turns"] if turn["by"] == "model"]
    number = 0
    for message in episode["messages"]:
        if message.get("role") != "assistant":
            yield _message(message, foreign=True)
            continue
        turn = turns[number] if number < len(turns) else None
        number += 1
        yield _message(message, foreign=False, title=f"assistant, turn {number}")
        said = []
        if turn is not None and turn["reward"] is not None:
            said.append(f"reward of the turn: {turn['reward']:g}")
        if turn is not None and advantages is not None and turn["start"] < len(advantages):
            said.append(f"advantage: {advantages[turn['start']]:.3g}")
        if said:
            yield Text("  " + ", ".join(said), style="bold blue")


def _message(message: Mapping[str, Any], *, foreign: bool, title: str | None = None) -> Text:
    role = str(message.get("role", ""))
    name = f" {message['name']}" if message.get("name") else ""
    text = Text(f"{printable(title or role + name)}: ", style=f"bold {COLOURS.get(role, 'white')}")
    content = message.get("content")
    said = [printable(text_of(content))] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, Mapping):
            pairs = (f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
            arguments = ", ".join(pairs)
        said.append("→ " + printable(f"{function.get('name')}({arguments})"))
    text.append("\n".join(said), style="dim not bold default" if foreign else "not bold default")
    return text


def head(sample: Sample) -> str:
    """Returns the heading of a completion: its step and row, its reward, and why it ended."""
    columns = sample.columns
    named = [
        f"{name} {columns[name]}" for name in ("step", "row", "sample") if _is_number(columns, name)
    ]
    if columns.get("reward") is None:
        named.append("no reward")
    elif _is_number(columns, "reward"):
        named.append(f"reward {columns['reward']:g}")
    if _is_number(columns, "advantage"):
        named.append(f"advantage {columns['advantage']:.3g}")
    ended = sample.episode["stop_reason"] if sample.episode else columns.get("finish_reason")
    if ended:
        named.append(f"ended: {printable(str(ended))}")
    return " · ".join(named)


def _foot(sample: Sample) -> Iterator[str]:
    """Yields the lines about the complete episode: rewards, metrics, errors and tokens."""
    episode, columns = sample.episode, sample.columns
    parts = {k.removeprefix("rewards/"): v for k, v in columns.items() if k.startswith("rewards/")}
    if parts:
        said = (f"{name} {'none' if v is None else f'{v:g}'}" for name, v in parts.items())
        yield "rewards: " + ", ".join(map(printable, said))
    if episode is None:
        return
    for key, title in {"rewards": "of the environment", "metrics": "metrics"}.items():
        if values := episode[key]:
            said = (f"{name} {value:g}" for name, value in values.items())
            yield f"{title}: " + ", ".join(map(printable, said))
    if columns.get("env_error"):
        yield f"the environment failed: {printable(str(columns['env_error']))}"
    turns, sampled = episode["turns"], columns.get("sampled")
    own = sum(turn["by"] == "model" for turn in turns)
    tokens = len(sample.ids or ())
    foreign = 0 if sampled is None else sum(not s for s in sampled)
    yield f"turns of the model: {own}; tokens: {tokens - foreign} sampled, {foreign} of replies"


def _is_number(columns: Mapping[str, Any], name: str) -> bool:
    return isinstance(columns.get(name), (int, float))
