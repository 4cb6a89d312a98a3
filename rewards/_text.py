"""What the rewards share: the text of a completion, and the final answer inside a text."""

import re
from typing import Any

# A plain dataset gives strings; a chat dataset gives lists of {"role": ..., "content": ...}.
Completions = list[str] | list[list[dict[str, Any]]]

# An escaped character is matched so that `\{` and `\}` are not taken for braces.
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_HASHES_LINE = re.compile(r"(?<!#)####(?!#)[ \t]*(.*)")


def completion_texts(completions: Completions) -> list[str]:
    return [_completion_text(completion) for completion in completions]


def _completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The completion itself, or what the last message of a chat completion says."""
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):  # parts, as multimodal chat templates write them
        return "".join(part.get("text", "") for part in content)
    return content or ""  # None where a message only calls tools


def boxed_answers(text: str) -> list[str]:
    r"""The contents of the closed `\boxed{...}` (or `\fbox{...}`), in the order they open."""
    box_spans = []
    open_braces: list[int | None] = []  # where a box's content starts, None for any other brace
    for token in _BRACES.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                box_spans.append((start, token.start()))
    return [text[start:end] for start, end in sorted(box_spans)]


def count_boxes(text: str) -> int:
    r"""How many `\boxed{` (or `\fbox{`) are opened, whether or not they are ever closed."""
    return sum(token["box"] is not None for token in _BRACES.finditer(text))


def hashes_answer(text: str) -> str | None:
    """What follows the last `####` on its line, as GSM8K ends its solutions; None without one.

    Chat models also write `#### Step 2` as a Markdown heading: a line that begins with a letter is
    an answer only where nothing comes after it.
    """
    text = text.rstrip()
    for line in reversed(list(_HASHES_LINE.finditer(text))):
        answer = line[1].strip()
        is_last_line = line.end() == len(text)
        if answer and (is_last_line or not answer[0].isalpha()):
            return answer
    return None
