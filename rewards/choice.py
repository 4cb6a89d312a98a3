r"""Reward: a multiple-choice completion chooses the right option."""

import functools
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._text import (
    Completions,
    completion_texts,
    final_box,
    is_stated,
    is_taken_back,
    plain_characters,
    tagged_answer,
    without_thoughts,
)

SEVERAL = ""  # what is read where more than one option is named in one breath

REACH = 80  # characters that are read of one place where an option may be named
LEADS = 100  # places, from the end, where the words that lead to an option are followed up

# What says that an option follows.
_LEAD = re.compile(
    r"""
    (?: answer (?: \ (?:choice|option) )? (?: \ to\ [^.:\n]{1,60}? )?
        [\s*_`]{0,8} (?: \bis\b | [:=] )
      | (?<![a-z]) (?:correct|right|best) \  (?:choice|option|letter) [\s*_`]{0,8}
        (?: \bis\b | \b(?:would|must|should)\ be\b | [:=] )
      | [,;.] \s (?:so|thus|therefore|hence) (?= [\s,:(]{1,3} [A-Za-z0-9] [\s).]* \Z )
      | (?: 答案 | 正确选项 | 正確選項 ) [\s*_`]{0,8}
        (?: 应该是 | 应为 | 应选 | 是 | 为 | 為 | 选 | 選 | : )
      | (?<![不别可]) [选選] [择擇]?
    )
    [\s*_`:]{0,8}
    """,
    re.IGNORECASE | re.VERBOSE,
)

# What is only there for looks: LaTeX that sets text, Markdown, quotation marks.
_LOOKS = re.compile(
    r"""\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|mbox|bf|rm|q?quad)(?![A-Za-z])"""
    r"""|\\(?=\s|\Z)|\\[\[\](),;!]|[{}$*`~"“”]|(?<![A-Za-z])['‘’]|['‘’](?![A-Za-z])"""
)

# "B. Wait, no, C.", "B, but it is C"
_CONTRADICTED = re.compile(
    r"[^.\n]{0,80}(?:\bbut\s+(?:it|i|mine|the)\b|[.?!]\s+(?:wait|no|sorry)\b)", re.IGNORECASE
)

# Before another word, `a`, `A` or `I` is a word itself, unless the other is one of these.
_CONNECTIVE = "because|since|as|and|which|but|with|from|where|when|is|was"


@dataclass(frozen=True)
class _Patterns:
    """Patterns of the options of one set of letters."""

    option: re.Pattern[str]  # the whole text is a letter, perhaps with the option's text after it
    stated: re.Pattern[str]  # text that follows begins with a letter
    alone: re.Pattern[str]  # the whole text is a letter
    another: re.Pattern[str]  # what follows a letter names another
    correct: re.Pattern[str]  # "option B is correct"


@reward
def choice(
    completions: Completions,
    answer: list[Any],
    *,
    letters: str = "ABCDEFGHIJ",
    unclosed_think: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""Returns 1.0 where the letter that the completion chooses is the gold one, else 0.0.

    It is read after the last `</think>`, if there is one, from the first of these that is there:

    1. the last `\boxed{B}`, also `\boxed{\text{(B)}}` or `\boxed{B. Paris}`;
    2. the last `<answer>B</answer>`;
    3. the last of "answer is (B)", "Answer: B", "correct option is B", "答案是B", "选B";
    4. a last line that is nothing but the letter, such as `**(B)**` or `B.`.

    A letter anywhere else counts for nothing, nor does one that is a word ("the answer is a bit
    long"), one that is denied or taken back ("I don't think the answer is B", "not \boxed{B}",
    "the answer is B? No."); two letters in one place ("A or B") are no choice, and give 0.0.

    Recipe args:
        letters: what the options are labelled with, one character each; upper and lower case are
            equal.
        unclosed_think: whether a completion may choose whose last `<think>` never closes.

    The gold answer may be written in the same ways, as in "b" or "(B) Paris". A row where it is
    missing (None or blank) gives None.
    """
    if (
        not isinstance(letters, str)
        or not letters.isalnum()
        or len(set(letters.upper())) != len(letters)
    ):
        raise ValueError(
            f"choice: letters is {letters!r}; it must be letters or digits, none of them twice."
        )
    patterns = _patterns(letters)
    return [
        None
        if gold is None or not str(gold).strip()
        else float(
            _chosen(without_thoughts(text, unclosed_think), patterns)
            == _gold_letter(str(gold), letters)
        )
        for text, gold in zip(completion_texts(completions), answer, strict=True)
    ]


def _gold_letter(gold: str, letters: str) -> str:
    patterns = _patterns(letters)
    text = re.sub(r"(?<=\w)[.:]\s*\w\Z", "", plain_characters(gold).strip())  # "B. A" is B
    letter = _option(text, patterns) or _chosen(gold, patterns)
    if not letter:
        raise ValueError(
            f"choice: answer is {gold!r:.200}; it must be one of the letters {letters}."
        )
    return letter


@functools.lru_cache
def _patterns(letters: str) -> _Patterns:
    label = f"[{letters.upper()}{letters.lower()}]"
    # These are not words, so that one counts before any word.
    sure = f"[{''.join(one for one in letters.upper() if one.isalpha() and one not in 'AI')}]"
    sure = sure if sure != "[]" else r"(?!)"
    bracketed = rf"[(\[【]\s?({label})\s?[)\]】]"
    unnamed = rf"[(\[【]\s?{label}\s?[)\]】]"
    name = r"\s*(?:(?:option|choice|letter|选项|選項)\s*)?"
    mark = r"[.,:;!?](?!\d)|[)\]】|。—–\u3400-\u9fff]"
    another = (
        rf"[)\]】]?[ \t]*(?:{unnamed}"
        rf"|(?:(?:[(,/&;|]|(?:and|or|vs\.?|versus|unless|also|maybe|perhaps|possibly)\b|或者|[或和与與])"
        rf"[ \t]*)+(?:{unnamed}|{label}[)\]】]?)"
        rf"(?=\s*(?:\Z|\n|[),/&;.。|]|(?:and|or)\b|[或和与與]))"
        rf"|[.:]\s*{label}\s*\Z)"
    )
    return _Patterns(
        option=re.compile(rf"(?i:{name})(?:{bracketed}|({label})(?=\s*\Z|[.,:)](?!\d)|{another}))"),
        stated=re.compile(
            rf"(?i:{name})(?:{bracketed}"
            rf"|({label})(?=\s*\Z|\s*\n|{mark}|</|{another}"
            rf"|[ \t]+(?:[(\[—–]|-\s|(?:{_CONNECTIVE})\b))"
            rf"|({sure})(?=[ \t]+\w))"
        ),
        correct=re.compile(
            rf"(?:\A|[.,;:\n]|\b(?i:so|that|thus|therefore|hence))[ \t]?(?i:option|choice|answer)\s"
            rf"(?:{bracketed}|({label}))\s(?i:is)\s(?i:the\s)?(?i:correct|right|answer)\b",
            re.MULTILINE,
        ),
        alone=re.compile(rf"[(\[【]?\s?({label})\s?[)\]】]?\s?[.。:,!]?"),
        another=re.compile(another),
    )


def _chosen(text: str, patterns: _Patterns) -> str | None:
    text = plain_characters(text)
    for read in (_boxed, _tagged, _stated, _alone):
        letter = read(text, patterns)
        if letter is not None:
            return letter
    return None


def _boxed(text: str, patterns: _Patterns) -> str | None:
    box = final_box(text)
    return None if box is None else _option(box, patterns)


def _tagged(text: str, patterns: _Patterns) -> str | None:
    content = tagged_answer(text)
    if content is None:
        return None
    for read in (_option, _alone):
        letter = read(content, patterns)
        if letter is not None:
            return letter
    return None


def _stated(text: str, patterns: _Patterns) -> str | None:
    for lead in reversed(deque(_LEAD.finditer(text), maxlen=LEADS)):
        letter = _letter(patterns.stated, text[lead.end() : lead.end() + REACH], patterns)
        if letter is not None and is_stated(text, lead.start() + (lead[0][0] in ",;.")):
            return letter
    named = list(patterns.correct.finditer(text))
    if not named or is_taken_back(text[named[-1].end() :]):
        return None
    return next(letter for letter in named[-1].groups() if letter).upper()


def _alone(text: str, patterns: _Patterns) -> str | None:
    line = text.rstrip()[-REACH:].rpartition("\n")[2]
    found = patterns.alone.fullmatch(_LOOKS.sub("", line).strip())
    return found[1].upper() if found else None


def _option(text: str, patterns: _Patterns) -> str | None:
    return _letter(patterns.option, text.strip()[:REACH], patterns)


def _letter(pattern: re.Pattern[str], text: str, patterns: _Patterns) -> str | None:
    text = _LOOKS.sub("", text).strip()
    found = pattern.match(text)
    if found is None or is_taken_back(text[found.end() :]):
        return None
    if patterns.another.match(text, found.end()) or _CONTRADICTED.match(text, found.end()):
        return SEVERAL
    return next(letter for letter in found.groups() if letter).upper()
