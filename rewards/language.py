"""Reward: the completion is written in the wanted script."""

import functools
import re
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of
from grpo_cli.rewards._text import Completions, completion_texts

# A name in recipes and the Unicode scripts that it stands for, where these are not the name's own.
MIXTURES = {
    "japanese": ("Han", "Hiragana", "Katakana"),
    "kana": ("Hiragana", "Katakana"),
    "korean": ("Hangul", "Han"),
}
SCRIPTS = (
    "arabic", "armenian", "bengali", "cyrillic", "devanagari", "ethiopic", "georgian", "greek",
    "gujarati", "gurmukhi", "han", "hangul", "hebrew", "hiragana", "kannada", "katakana", "khmer",
    "lao", "latin", "malayalam", "mongolian", "myanmar", "sinhala", "tamil", "telugu", "thai",
    "tibetan",
)  # fmt: skip

# In Markdown and LaTeX a dollar that opens a formula has no space after it, one that closes it has
# none before it and no digit after it, so that prices stay what they are.
_DOLLARS = re.compile(r"\$(?=\S)[^$\n]*+(?<=\S)\$(?![0-9])")
_COMMAND = re.compile(r"\\(?:begin|end)\s?\{[A-Za-z]{1,30}\*?\}|\\[A-Za-z]+")
_FENCE = re.compile(r"`{3,}|~{3,}")
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9_-]{0,30}>")


@reward
def language(completions: Completions, *, script: str = "latin", **_: Any) -> list[float | None]:
    r"""Returns the share of the completion's letters in the wanted script, from 0.0 to 1.0.

    In the manner of DeepSeek-R1's language-consistency reward (arXiv 2501.12948), by letters rather
    than words. Digits, punctuation, symbols and accents are not letters; nor does what stands in
    code, in formulas (`$...$`, `$$...$$`, `\(...\)`, `\[...\]`), in the names of LaTeX commands
    such as `\frac` and in tags such as `<think>` count.

    Recipe args:
        script: the Unicode script, such as latin, han, hangul, cyrillic, arabic, devanagari, greek,
            hebrew or thai; "japanese" is kana and han, "kana" hiragana and katakana, "korean"
            hangul and han.

    A script is not a language: latin holds English and French alike. A completion without letters
    gives None.
    """
    one_of("language: script", script, sorted((*SCRIPTS, *MIXTURES)))
    return [_share(text, script) for text in completion_texts(completions, "<think>")]


def _share(text: str, script: str) -> float | None:
    text = _without_fences(text)
    for opening, closing in (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)")):
        text = _without(text, opening, closing)
    for pattern in (_INLINE_CODE, _DOLLARS, _COMMAND, _TAG):
        text = pattern.sub(" ", text)
    others, unwanted = _patterns(script)
    letters = others.sub("", text)
    return len(unwanted.sub("", letters)) / len(letters) if letters else None


@functools.lru_cache
def _patterns(script: str) -> tuple[Any, Any]:
    """Returns patterns of what is not a letter of one script, and of what is not wanted."""
    import regex

    wanted = "".join(rf"\p{{Script={name}}}" for name in MIXTURES.get(script, (script,)))
    # Letters that scripts share, such as the mathematical italics, say nothing of the language.
    return regex.compile(r"[\P{L}\p{Script=Common}]+"), regex.compile(rf"[^{wanted}]+")


def _without_fences(text: str) -> str:
    """Returns the text without fenced code; a fence that nothing closes runs to the end."""
    kept: list[str] = []
    fence = ""
    for line in text.split("\n"):
        mark = line.strip()
        ticks = _FENCE.match(mark)
        if fence:
            is_end = ticks is not None and ticks[0] == mark and mark.startswith(fence)
            fence = "" if is_end else fence
        elif ticks and "`" not in mark[ticks.end() :]:
            fence = ticks[0]
        else:
            kept.append(line)
    return "\n".join(kept)


def _without(text: str, opening: str, closing: str) -> str:
    """Returns the text without all between the two; an opening that nothing closes stays."""
    kept: list[str] = []
    place = 0
    while True:
        start = text.find(opening, place)
        end = text.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            return "".join((*kept, text[place:]))
        kept.append(text[place:start])
        place = end + len(closing)
