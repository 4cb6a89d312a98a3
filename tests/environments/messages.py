"""Turns of a model, and the texts of replies, for tests of environments."""

from typing import Any

from grpo_cli.environments.protocol import Message, Observation


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*calls: tuple[str, Any]) -> Message:
    """Returns a turn that calls tools, given as (name, arguments)."""
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {**says(""), "tool_calls": made}


def texts(observation: Observation) -> list[str]:
    return [m["content"] for m in observation.messages]
