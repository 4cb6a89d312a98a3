"""Reward: the completion's final answer equals the gold answer mathematically (Math-Verify)."""

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from grpo_cli.rewards._text import Completions, boxed_answers, completion_texts, hashes_answer

# No final answer is this long. Math-Verify's patterns take seconds on long repetitive text, which
# is what a collapsed model writes.
MAX_ANSWER_CHARACTERS = 1000

logger = logging.getLogger(__name__)


def math(
    completions: Completions, answer: list[Any], *, timeout: int = 3, **_: Any
) -> list[float | None]:
    r"""1.0 where the completion's final answer is mathematically equal to the gold one, else 0.0.

    The final answer is the content of the last closed `\boxed{...}`; without one, what follows the
    last `####` on its line; without that, what Math-Verify finds in the last 1,000 characters:
    LaTeX, an expression or a number. The gold answer is read alike, so a column of whole worked
    solutions serves too. A boxed answer of more than 1,000 characters is wrong.

    Two plain numbers are equal when their values are, exactly. Other answers are equal when their
    text is, spacing aside, or when Math-Verify says so; a gold answer that it cannot read, such as
    a name, is thus compared as text. Signs and words for units count for nothing: `18\%`, `\$18`
    and `18 dollars` all equal 18, and 0.18 does not equal `18\%`. A number may omit its base, not
    give another: `31` equals `31_4`, `31_5` does not.

    Recipe args:
        timeout: whole seconds for reading one answer, and again for comparing it. An answer that
            takes longer scores 0.0. It works by SIGALRM, so only in the main thread.

    A row whose gold answer is missing (None or blank) gives None.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 1:
        raise ValueError(
            f"math: timeout is {timeout!r}; it must be a whole number of seconds, 1 or more."
        )
    with _one_warning_for_timeouts(timeout):
        return [
            float(_is_right(text, str(gold), timeout)) if _is_present(gold) else None
            for text, gold in zip(completion_texts(completions), answer, strict=True)
        ]


def _is_present(gold: Any) -> bool:
    return gold is not None and str(gold).strip() != ""


def _is_right(completion: str, gold: str, timeout: int) -> bool:
    stated_gold = _stated_answer(gold)
    gold_answer = _normalised(gold if stated_gold is None else stated_gold)
    stated = _stated_answer(completion)
    if stated is not None:
        return _same_answer(gold_answer, stated, timeout)
    if _same_text(gold_answer, completion):
        return True
    return _verify(gold_answer, _readable_tail(completion), timeout)


def _stated_answer(text: str) -> str | None:
    boxes: list[str] = boxed_answers(text)
    hashes: str | None = hashes_answer(text)
    return boxes[-1] if boxes else hashes


def _same_text(gold: str, text: str) -> bool:
    return len(text) <= MAX_ANSWER_CHARACTERS and _normalised(text) == gold


def _same_answer(gold: str, stated: str, timeout: int) -> bool:
    if len(stated) > MAX_ANSWER_CHARACTERS:
        return False
    stated = _normalised(stated)
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(stated):
        return Decimal(gold) == Decimal(stated)
    if gold == stated:
        return True
    return (
        bool(stated) and not _bases_differ(gold, stated) and _verify(gold, f"${stated}$", timeout)
    )


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_DIGIT_GROUPS = re.compile(r"([+-]?[0-9]{1,3}(?:[ ,][0-9]{3})+)((?:\.[0-9]+)?)")
_NUMBER_WITH_WORDS = re.compile(rf"({_NUMBER.pattern})(?: +[A-Za-z]{{2,}})+")
_THIN_SPACE = re.compile(r"(?:,\\!|\{,\})(?=[0-9]{3})|(?<!\\)\\[!,;:]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_LOOSE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_BASE = re.compile(r"\b[0-9][0-9A-Z]*_\{?([0-9]+)\}?")


def _normalised(answer: str) -> str:
    r"""The answer without what never changes its value: thousands marks, `$`, `%`, loose spaces."""
    answer = _THIN_SPACE.sub("", answer)
    answer = answer.replace(r"\$", "").replace("$", "").replace(r"\%", "").replace("%", "")
    answer = " ".join(answer.split()).rstrip(".,").strip()
    if whole_text := _TEXT_COMMAND.fullmatch(answer):
        answer = whole_text[1].strip()
    if grouped := _DIGIT_GROUPS.fullmatch(answer):
        return re.sub("[ ,]", "", grouped[1]) + grouped[2]
    if with_words := _NUMBER_WITH_WORDS.fullmatch(answer):
        return with_words[1]
    if _WORDS.fullmatch(answer):
        return answer.lower()
    return _LOOSE_SPACE.sub("", answer)


def _bases_differ(gold: str, stated: str) -> bool:
    # Math-Verify drops the subscript: to it, 31_4 and 31_5 are both 31.
    gold_base, stated_base = _BASE.search(gold), _BASE.search(stated)
    return bool(gold_base and stated_base and gold_base[1] != stated_base[1])


_MARK_BEFORE_CLOSING = re.compile(r"[.,;]\s*(?=\$|\\\]|\\\))")


def _readable_tail(completion: str) -> str:
    # A full stop inside the formula stops Math-Verify's parser short: it reads $16\sqrt{2}.$ as 16.
    tail = completion[-MAX_ANSWER_CHARACTERS:].replace(r",\!", "")
    return _MARK_BEFORE_CLOSING.sub("", tail)


def _verify(gold: str, text: str, timeout: int) -> bool:
    """Math-Verify's judgement. It turns whatever SymPy raises on odd text into "not equal"."""
    from math_verify import verify

    # Relation against set: -2 <= x <= 7 is the interval [-2, 7].
    return bool(
        verify(
            _parsed_gold(gold, timeout),
            _parsed(text, timeout),
            allow_set_relation_comp=True,
            timeout_seconds=timeout,
        )
    )


@functools.lru_cache(maxsize=1024)  # every completion of a group is held against the same gold
def _parsed_gold(gold: str, timeout: int) -> list[Any]:
    return _parsed(f"${gold}$", timeout)


def _parsed(text: str, timeout: int) -> list[Any]:
    from math_verify import parse

    answers: list[Any] = parse(text, parsing_timeout=timeout)
    return answers


@contextmanager
def _one_warning_for_timeouts(timeout: int) -> Iterator[None]:
    """Sum up Math-Verify's own warnings, each of which may hold a whole completion."""
    count = 0

    def count_timeouts(record: logging.LogRecord) -> bool:
        nonlocal count
        is_timeout = record.getMessage().startswith("Timeout during")
        count += is_timeout
        return not is_timeout

    loggers = [logging.getLogger(f"math_verify.{module}") for module in ("parser", "grader")]
    for one in loggers:
        one.addFilter(count_timeouts)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(count_timeouts)
    if count:
        logger.warning(
            "math: reading or comparing an answer took over %d s, %d times; it scores 0.0.",
            timeout,
            count,
        )
