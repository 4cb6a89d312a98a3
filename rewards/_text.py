"""Helpers of several rewards: the text of a completion, and the final answer inside a text."""

import re
from typing import Any

# A plain dataset gives strings; a chat dataset gives lists of {"role": ..., "content": ...}.
Completions = list[str] | list[list[dict[str, Any]]]

# An escaped character is matched so that `\{` and `\}` are not taken for braces.
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_HASHES_LINE = re.compile(r"(?<!#)####(?!#)[ \t]*(.*)")
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)

# Full-width forms (U+FF01 to U+FF5E) as ASCII. Their `!` ends a sentence, ASCII's is a factorial.
_PLAIN: dict[int, str | None] = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_PLAIN |= {ord("！"): "。", ord("？"): "。", ord("｡"): "。", ord("　"): " ", ord("、"): ", "}
_PLAIN |= dict.fromkeys((0x2010, 0x2011, 0x2212, 0xFE63), "-")  # hyphens and minus signs
# Soft hyphen, zero-width characters, and marks for the direction of writing.
_PLAIN |= dict.fromkeys(
    (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)
)
_PARTS = re.compile("(?<![0-9])([0-9]+)分之([0-9]+)")

_ANNOUNCED = re.compile(
    r"""
    \banswers?\b (?: [^\n.:=!?]{0,60}? \b(?:is|are|be|equals?)\b (?!\s*n[o']t\b)  # the answer is
                   | [*_\s]{0,6} [:=] )                                           # **Answer**:
    | ^[#*_\s]{0,12} (?:final\ )? answer [*_\ \t]* $                              # a heading
    | 答案\s*[】\]]?\s* (?:应该|应当|应|就|即)? (?: [是为选:] | 等于 ) | 【答案】
    | (?<![解回问作应]) 答:                                                        # not 解答:
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_AFTER_ANNOUNCEMENT = re.compile(
    r"""
    [\s:*`]* (?:(?:therefore|thus|simply|just|approximately|about|equal\ to|约为?)[\s:,*]+)?
    (?P<body> \$\$.{1,1000}?\$\$ | \\\[.{1,1000}?\\\] | [^\n]{0,1000} )
    """,
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
ANNOUNCEMENTS = 5
DIFFERENT = 3  # more announced answers that differ are a list, not a correction
# What denies or hedges the value that follows it at once.
_DENIAL = r"""
    (?: \b(?:not|never|neither|nor|hardly|cannot|maybe|perhaps|possibly|anything\ but|other\ than
            |rather\ than|instead\ of)\b
      | n't\b | \\neq?(?![A-Za-z]) | \\not\s*= | ≠ | (?<=\s)!=
      | 不是 | 并非 | 不等于 | 不为 | 可能是 | 也许是? | 或许是? )
    (?: \s+ (?:be|equal(?:\ to)?|is|the|exactly|really|actually|necessarily|just)\b ){0,3}
"""
_BOUND = (
    r"\b(?:(?:less|more|greater|smaller|fewer|larger)\ than|at\ (?:least|most)|between|either)\b"
)
_DENIED_BEFORE = re.compile(rf"{_DENIAL} [\s$\\(\[{{:*\"`]* \Z", re.IGNORECASE | re.VERBOSE)
# A body up to its value: "definitely not 7", "nowhere near 7".
_DENIED_BODY = re.compile(
    rf"\A [^0-9$\\\n]*? (?: {_DENIAL} | {_BOUND} | \bnowhere\b )", re.IGNORECASE | re.VERBOSE
)
_WRONG = (
    r"(?:(?:is|was|are|be)\s+(?:wrong|incorrect|false|not\s+(?:right|correct|true|it|the\s+"
    r"(?:\w+\s+)?answer))|isn't\s+(?:right|correct|true|it|the\s+(?:\w+\s+)?answer))\b"
    r"|不对|不正确|是错"
)
_GUESS = r"\b(?:maybe|perhaps|possibly|or\ not|not\ really|(?:just|only)\ kidding)\b|\?\s*\Z"
_TAKEN_BACK = re.compile(rf"\b{_WRONG}|{_GUESS}|\bnot[.!\s]*\Z", re.IGNORECASE)
_TAKEN_BACK_AT_ONCE = re.compile(
    rf"[\s$\\)\]}}*]*(?:(?:[.,]\s*(?:that|this|it|which)\s+)?(?:{_WRONG})|,?\s*(?:{_GUESS}))",
    re.IGNORECASE,
)
# The end of a clause before an announcement, where it says that the announcement does not hold.
_DENIED_LEAD = re.compile(
    r"""
    (?: (?:n't|\bnot|\bnever)\s+(?:think|believe|say|claim|mean|sure)\b | \b(?:doubt|deny)\b
      | (?:\b(?:wrong|incorrect|false|untrue) | (?:\bnot|n't)\s+(?:true|right|correct|the\ case))
        \s+(?:to\ say\s+)? that\b
    ) [^\n]* \Z
    | \b(?:if|whether|unless|suppose|supposing|assume|assuming|imagine|pretend|maybe|perhaps
          |possibly|wrong|incorrect|false|not)
      \s+ (?:that\s+)? (?:(?:the|my|our|your|an?)\s+)? (?:(?:final|correct|right)\s+)* \Z
    | (?:如果|假设|并非|不是)\Z
    """,
    re.IGNORECASE | re.VERBOSE,
)
_DENIED_VERB = re.compile(
    r"(?:\b(?:not|never|hardly|cannot|might|may|could)|n't)\s+(?:\w+\s+)?(?:is|are|be|equals?)\s*\Z",
    re.IGNORECASE,
)
_CLAUSE_START = re.compile(
    r"[.,;:!?。，\n]|\b(?:but|so|then|hence|thus|therefore)\b", re.IGNORECASE
)
CLAUSE = 80  # characters before an announcement in which its clause is looked for
_SENTENCE_END = re.compile(r"\.[*]*(?=\s|$)|。")
_BOLD = re.compile(r"(?<=\S)\*\*(?=[\s.,;:]|$)|(?:^|(?<=\s))\*\*(?=\S)")  # not 2**3


def completion_texts(completions: Completions) -> list[str]:
    return [_completion_text(completion) for completion in completions]


def _completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Returns the completion, or the content of the last message of a chat completion.

    An episode that ends with a message of a tool has no answer: "".
    """
    if isinstance(completion, str):
        return completion
    if not completion or (len(completion) > 1 and completion[-1].get("role") != "assistant"):
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):  # parts, as multimodal chat templates write them
        return "".join(part.get("text", "") for part in content)
    return content or ""  # None where a message only calls tools


def plain_characters(text: str) -> str:
    """Returns full-width characters as ASCII and 4分之3 as 3/4, without invisible characters."""
    if text.isascii():
        return text
    return _PARTS.sub(r"\2/\1", text.translate(_PLAIN))


def without_thoughts(text: str, unclosed: bool = False) -> str:
    """Returns the text after the last `</think>`.

    A text whose last `<think>` is never closed has no answer: "" is returned, unless `unclosed`
    lets such thoughts count.
    """
    text = text.rpartition("</think>")[2]
    return text if unclosed or "<think>" not in text else ""


def boxed_answers(text: str) -> list[str]:
    r"""Returns the contents of closed `\boxed{...}` or `\fbox{...}`, in the order they open."""
    return [text[start:end] for _, start, end in _box_spans(text)]


def _box_spans(text: str) -> list[tuple[int, int, int]]:
    """Returns where each closed box begins, where its content begins, and where that ends."""
    spans = []
    open_braces: list[tuple[int, int] | None] = []  # None for a brace of no box
    for token in _BRACES.finditer(text):
        if token["box"]:
            open_braces.append(token.span())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None:
                spans.append((*box, token.start()))
    return sorted(spans)


def final_box(text: str) -> str | None:
    r"""Returns the content of the last closed box that is not denied; None without one.

    Boxes with nothing but commas, "and" or "or" between them are one list: `\boxed{3}, \boxed{5}`
    is `3, 5`. A box inside a box belongs to the outer one. "Not \boxed{3}" and "\boxed{3} is
    wrong" are no answers.
    """
    outer: list[tuple[int, int, int]] = []
    for span in _box_spans(text):
        if not outer or span[0] > outer[-1][2]:
            outer.append(span)
    while outer:
        joined = [outer.pop()]  # the last one first
        while outer and _BETWEEN_BOXES.fullmatch(text, outer[-1][2] + 1, joined[-1][0]):
            joined.append(outer.pop())
        first, end = joined[-1][0], joined[0][2] + 1
        before, after = text[max(0, first - CLAUSE) : first], text[end : end + CLAUSE]
        if not _DENIED_BEFORE.search(before) and not is_taken_back(after):
            contents = dict.fromkeys(text[start:end] for _, start, end in reversed(joined))
            return _INNER_BOX.sub("{", ", ".join(filter(str.strip, contents)))
    return None


_BETWEEN_BOXES = re.compile(
    r"[\s$\\()\[\],;.]{0,20}(?:and|or|和|或|\\text\{\s*(?:and|or)\s*\})?[\s$\\()\[\],;.]{0,20}"
)
_INNER_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def count_boxes(text: str) -> int:
    r"""Counts `\boxed{` and `\fbox{`, whether or not they are ever closed."""
    return sum(token["box"] is not None for token in _BRACES.finditer(text))


def hashes_answer(text: str) -> str | None:
    """Returns the text behind the last `####` on its line, as GSM8K ends solutions; or None.

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


def tagged_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>...</answer>`; None without one."""
    start, answer = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            start, answer = None, text[start : tag.start()].strip()
    return answer


def announced_answer(text: str) -> str | None:
    """Returns the rest of the sentence after the last "the answer is", "Answer:", 答案是 or 答:.

    It is looked for on the next line where its own line ends there. Of several, the last one counts
    that holds a digit or a formula, so that "I hope this answer is right" hides none; no more than
    the last five are looked at. One that is denied or a guess counts for nothing ("if the answer is
    3", "the answer is anything but 3", "the answer could be 3"), nor do more than three different
    ones. The text has `plain_characters`.
    """
    words: str | None = None
    values: list[str] = []
    for announcement in list(_ANNOUNCED.finditer(text))[: -1 - ANNOUNCEMENTS : -1]:
        after = _AFTER_ANNOUNCEMENT.match(text, announcement.end())
        assert after is not None, "it also matches the empty string"
        body = after["body"]
        if not body.startswith(("$$", r"\[")):
            body = _SENTENCE_END.split(body, maxsplit=1)[0]
        body = _BOLD.sub("", body).strip(" \t*`,;:")
        if not any(character.isdigit() or character in "$\\" for character in body):
            words = words or body
        elif not (is_denied(text, announcement) or denies(body)):
            values.append(body)
    if len(set(values)) > DIFFERENT:
        return None
    return values[0] if values else words


def announces(text: str) -> bool:
    """Returns whether a text announces an answer, whether it counts or not."""
    return _ANNOUNCED.search(text) is not None


def is_denied(text: str, announcement: re.Match[str]) -> bool:
    """Returns whether the clause of an announcement says that it does not hold, or might not."""
    lead = text[max(0, announcement.start() - CLAUSE) : announcement.start()]
    clause = _CLAUSE_START.split(lead)[-1]
    return bool(_DENIED_LEAD.search(clause) or _DENIED_VERB.search(announcement[0]))


def is_taken_back(rest: str) -> bool:
    """Returns whether what follows an answer at once says that it is wrong or a guess."""
    return _TAKEN_BACK_AT_ONCE.match(rest) is not None


def denies(body: str) -> bool:
    """Returns whether a stated answer begins with a denial or a guess, or takes itself back."""
    return bool(_DENIED_BODY.match(body) or _TAKEN_BACK.search(body))
