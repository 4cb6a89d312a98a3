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

# Only these announce an answer; what stands before them in their clause is on a list too.
_ANNOUNCED = re.compile(
    r"""
    (?: \b(?:(?:the|my|our)\s+)? (?:(?:final|correct|right)\s+){0,2}
        (?: answers? | solutions? | (?<=correct\s)(?:option|choice) )
        \s+ (?: is | are | equals? | (?:would|must|should)\ be ) \b
      | \b(?:(?:the|my|our)\s+)? (?:(?:final|correct|right)\s+){0,2} answers? [*_\s]{0,6} [:=] )
    | ^[#*_\s]{0,12} (?:final\ )? answer [*_\ \t]* $                              # a heading
    | 答案\s*[】\]]?\s* (?:应该|应当|应|就|即)? (?: [是为选:] | 等于 ) | 【答案】
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_LEAD = re.compile(
    r"""
    (?: [\s*_#>`$\\()\[\]-] | \b(?:so|thus|therefore|hence|then|and|but|finally|now|ok|okay|well
      |wait|yes|no|i|we|you|think|believe|conclude|get|find|see|know|say|have|that|which|means|gives
      |implies|shows|this\ (?:means|gives|implies|shows)|here|it|follows|also|indeed|overall|again
      |step|in|conclusion|summary|the|my|our|final|correct|right|best|would|be)\b
      | (?!如果|假设|若|不|没|错|非|友|他说|她说|认为|可能|或|难道|骗|据说|以为|假|怀疑|要是|有人)
        [\u3400-\u9fff】【] )*
    """,
    re.IGNORECASE | re.VERBOSE,
)
_AFTER_ANNOUNCEMENT = re.compile(
    r"""
    [\s:*`]* (?:(?:therefore|thus|just|simply|about|approximately|equal\ to|that|there\ (?:is|are)
               |一共|总共|共|有|是|约为?|大约)[\s:,*]*)*
    (?P<body> (?:\$\$.{1,1000}?\$\$ | \\\[.{1,1000}?\\\])(?=[ \t.,]*(?:\n|\Z)) | [^\n]{0,1000} )
    """,
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
# What may follow a value: "18, because ...", "18 (as said)", "18，因为...".
_REMARK = re.compile(
    r"[,;]\s*(?=(?:因为|由于|即(?!两)|也就是))"
    r"|[,;]\s+(?=(?:because|since|as|not|but\s+not|given|where|when|of\s+course|in\s+total|which\s+is\s+the)\b"
    r"|[0-9]+\s+(?:more|less|fewer)\s+than\s+(?:before|last|the)\b)"
    r"|\s+(?=(?:because|since|as\s+(?!an?\b|often|[0-9])|not|but\s+not|of\s+(?:the\s+)?[a-z]+)\b)"
    r"|\s+(?=\((?=\w+\s+\w+\s+\w|as\b|\w+-\w+\))(?![^()]*[0-9])[^()]*\)\Z)",
    re.IGNORECASE,
)
ANNOUNCEMENTS = 5
DIFFERENT = 3  # more announced answers that differ are a list, not a correction
# What denies or hedges the value that follows it at once.
_DENIAL = r"""
    (?: \b(?:not|never|neither|nor|hardly|cannot|maybe|perhaps|possibly|anything\ but|other\ than
            |rather\ than|instead\ of)\b
      | n't\b | \\neq?(?![A-Za-z]) | \\not\s*= | ≠ | (?<=\s)!=
      | \brejects?\b | \bdiffers?\ from\b | \bexcludes?\b | \brules?\ out\b
      | 不是 | 并非 | 不等于 | 不为 | 可能是 | 也许是? | 或许是? )
    (?: \s+ (?:be|equal(?:\ to)?|is|the|exactly|really|actually|necessarily|just)\b ){0,3}
"""
_DENIED_BEFORE = re.compile(rf"{_DENIAL} [\s$\\(\[{{:*\"`]* \Z", re.IGNORECASE | re.VERBOSE)
_WRONG = (
    r"(?:(?:is|was|are|be)\s+(?:\w+ly\s+)?(?:wrong|incorrect|false|not\s+(?:right|correct|true|it|the\s+"
    r"(?:\w+\s+)?answer))|isn't\s+(?:right|correct|true|it|the\s+(?:\w+\s+)?answer))\b"
    r"|不对|不正确|是错|错了"
)
_GUESS = r"\b(?:maybe|perhaps|possibly|or\ not|not\ really|(?:just|only)\ kidding)\b|\?\s*\Z"
# What a remark after a value must not say: "18, doubled", "18, or else 20".
_CHANGES = re.compile(
    r"\A(?!\W*(?:because|since|as\b|因为|由于)).*\b(?:or|probably|incorrect|wrong|false|rejected|sorry"
    r"|correction|instead|actually|rather|unless|if|except|plus|minus|times|doubled|halved|tripled"
    r"|no|wait|squared|hundred|thousand|million|dozen|half|approximately|cubed|divided|most|least|yet|base|bound"
    r"|but(?!\ not))\b|其实"
    r"|\A(?:[,;]|\s*of)\s*(?:two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE | re.DOTALL,
)
_NEGATION = re.compile(r"(?:\w+ly\s+)?not\b|n't\b", re.IGNORECASE)  # The answer is not 5. It is 7.
# The sentence after an announced answer takes it back.
_CORRECTED = re.compile(
    r"[\s.$*]*(?:(?:no|sorry|correction|oops|wait|actually|scratch that|i lied|just joking"
    r"|my mistake|disregard|or maybe|false|hmm|it's|at least|multiply"
    r"|(?:this|that)(?:'s|\s+is)\s+(?:wrong|not|incorrect))\b"
    r"|不|错|更正)",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(rf"\b{_WRONG}|{_GUESS}|\bnot[.!\s]*\Z", re.IGNORECASE)
_TAKEN_BACK_AT_ONCE = re.compile(
    rf"[\s$\\)\]}}*]*(?:(?:[.,]\s*(?:that|this|it|which)\s+)?(?:{_WRONG})|,?\s*(?:{_GUESS})"
    r"|[.,:;?!]?\s*(?:I\s+was\s+wrong|I\s+take|wrong\b|turned\s+out|can(?:no|')t\s+be|wait\b|but\s+(?:this|that|it)\s+(?:does|is|did)\s+not\b|fails\b|false\b|but\s+the\s+correct"
    r"|no\s+wait|\\text\{\s*is\s+(?:in|not)|is\s+(?:ruled\s+out|excluded|too\b)|不成立)"
    r"|\(\s*(?:(?:just|only)\s+kidding|excluded|incorrect|wrong|false|rejected|no|not)\b)",
    re.IGNORECASE,
)
# It is false, that the answer is 7. Wrong: the answer is 7.
_NOT_SO = re.compile(
    r"\bit(?:'s|\s+is)\s+(?:false|wrong|incorrect|untrue)\b|\A\W*(?:false|wrong|incorrect)\b"
    r"|\b(?:wrong|incorrect|false)\s+\w+:|\b(?:friend|book|says?|claims?|believes|myth|suppose|assume"
    r"|refuse|no\s+way|lie)\b",
    re.IGNORECASE,
)
_CLAUSE_START = re.compile(
    r"[.,;:!?。，\n>}]|\b(?:since|as|because)\b[^.,;:!?\n]*(?=the\b)|\b(?:but|so|then|hence|thus|therefore)\b",
    re.IGNORECASE,
)
CLAUSE = 80  # characters before an announcement in which its clause is looked for
_SENTENCE_END = re.compile(r"\.[*]*(?=\s|$)|。")
_BOLD = re.compile(r"(?<=\S)\*\*(?=[\s.,;:]|$)|(?:^|(?<=\s))\*\*(?=\S)")  # not 2**3


def completion_texts(completions: Completions, opening: str | None = None) -> list[str]:
    """Returns each completion, or the content of the last message of a chat completion.

    An episode that ends with a message of a tool has no answer: "".

    Args:
        opening: the tag before the thoughts of an episode's message; None: they are left out.
    """
    return [_completion_text(completion, opening) for completion in completions]


def _completion_text(completion: str | list[dict[str, Any]], opening: str | None) -> str:
    if isinstance(completion, str):
        return completion
    if not completion or (len(completion) > 1 and completion[-1].get("role") != "assistant"):
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):  # parts, as multimodal chat templates write them
        return "".join(part.get("text", "") for part in content)
    content = content or ""  # None where a message only calls tools
    thoughts = completion[-1].get("reasoning_content")
    if opening is None or thoughts is None:
        return content
    return f"{opening}{thoughts}</think>{content}" if content else opening + thoughts


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
    wrong" are not answers.
    """
    text = _BARE_BOX.sub(r"\\boxed{\1}", text)
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
            if _BESIDE_BOX.match(after) or _BEFORE_BOX.search(before):
                return ""
            sign = "-" if re.search(r"(?:\A|[=$({\s])-\Z", before) else ""  # -\boxed{7}
            return sign + _INNER_BOX.sub("{", ", ".join(filter(str.strip, contents)))
    return None


_BETWEEN_BOXES = re.compile(
    r"[\s$\\()\[\],;.]{0,20}(?:and|or|和|或|\\text\{\s*(?:and|or)\s*\})?[\s$\\()\[\],;.]{0,20}"
)
# Text beside a box, so that its content is not the answer: half of \boxed{7}, \boxed{7}^2.
_BEFORE_BOX = re.compile(
    r"\\(?:[dt]?frac|sqrt|overline|x?cancel)\s*(?:\{[^{}]*\})?\s*\{\s*\Z|(?:\\neg|~~|<del>|<!--)\s*\Z"
    r"|[+/*^]\s*\Z|[0-9A-Za-z)]\s*-\Z"
    r"|\b(?:twice|half\s+of|far\s+from|avoid|(?:less|more|fewer|greater)\s+than)[\s$]*\Z"
    r"|(?:\b(?:wrong|false|incorrect)\b|错误)[^.,;\n]{0,30}\Z",
    re.IGNORECASE,
)
_BESIDE_BOX = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|[!/*+0-9]|\\(?:cdot|times|pi|sqrt|over|div|leq?|geq?)(?![A-Za-z])"
    r"|-\s*[0-9]|(?:or|and)\s+[0-9]|(?:hundred|thousand|million|billion|trillion|dozen)\b|\$?\s*(?:squared|cubed|[万亿千百]|的(?:两?倍|相反|倒数)))"
)
_BARE_BOX = re.compile(r"\\boxed\s*([0-9A-Za-z])(?![0-9A-Za-z/^_\\]|[.,][0-9])")  # \boxed 7
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
            return "" if _CORRECTED.match(text, line.end()) else answer
    return None


def tagged_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>...</answer>`; None without one."""
    start, answer = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            before, after = text[max(0, start - CLAUSE) : start - 8], text[tag.end() :][:CLAUSE]
            denied = _DENIED_BEFORE.search(before) or _BEFORE_BOX.search(before)
            taken_back = is_taken_back(after) or denied
            start, answer = None, "" if taken_back else text[start : tag.start()].strip()
    return answer


def announced_answer(text: str) -> str | None:
    """Returns the rest of the sentence after the last "the answer is", "Answer:" or 答案是.

    It is looked for on the next line where its own line ends there. Of several, the last one counts
    that holds a digit or a formula, so that "I hope the answer is right" hides none; no more than
    the last five are looked at. One counts for nothing whose clause begins with other words than
    "so", "I think" and the like, or whose remark takes it back; nor do more than three different
    ones. The text has `plain_characters`.
    """
    words: str | None = None
    values: list[str] = []
    denied: set[str] = set()
    for announcement in list(_ANNOUNCED.finditer(text))[: -1 - ANNOUNCEMENTS : -1]:
        after = _AFTER_ANNOUNCEMENT.match(text, announcement.end())
        assert after is not None, "it also matches the empty string"
        body, end = after["body"], after.end()
        sentence = None if body.startswith(("$$", r"\[")) else _SENTENCE_END.search(body)
        if sentence:
            body, end = body[: sentence.start()], after.start("body") + sentence.end()
        body = _BOLD.sub("", body).strip(' \t*`,;:"“”')
        if denial := _NEGATION.match(body):
            denied.add(body[denial.end() :].strip())
        if denial or not is_stated(text, announcement.start()):
            continue
        if not any(character.isdigit() or character in "$\\" for character in body):
            words = words or body
        elif body not in denied and not _CORRECTED.match(text, end):
            values.append(body)
    if len(set(values)) > DIFFERENT:
        return None
    return values[0] if values else words


def without_remark(body: str) -> str:
    """Returns a stated answer without the remark that may follow it."""
    return _REMARK.split(body, maxsplit=1)[0]


def announces(text: str) -> bool:
    """Returns whether a text announces an answer, whether it counts or not."""
    return _ANNOUNCED.search(text) is not None


def is_stated(text: str, start: int) -> bool:
    """Returns whether the clause of an announcement begins with words such as "so I think"."""
    lead = text[max(0, start - CLAUSE) : start]
    if _NOT_SO.search(re.split(r"[.!?。\n]", lead)[-1]):
        return False
    return _LEAD.fullmatch(_CLAUSE_START.split(lead)[-1]) is not None


def is_taken_back(rest: str) -> bool:
    """Returns whether what follows an answer at once says that it is wrong or a guess."""
    return _TAKEN_BACK_AT_ONCE.match(rest) is not None


def denies(remark: str) -> bool:
    """Returns whether a remark after an answer takes it back or changes it."""
    return bool(_TAKEN_BACK.search(remark) or _CHANGES.search(remark))
