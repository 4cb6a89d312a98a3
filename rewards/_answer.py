r"""Reads a final answer to its last character.

    5\text{ cm}           Value("5", unit="cm")
    x = 3 \text{ or } 4   Several("or", (Value("3"), Value("4")))
    2 < x \le 5           Reals((("2", False, "5", True),))
    5\text{ plus }3       Words("5 plus 3")

A text that the grammar does not cover as a whole is `Words`, which equal the same text only, so
that nothing is ever skipped. docs/math.md shows the grammar by examples.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from string import ascii_lowercase

from grpo_cli.rewards._spelling import CHINESE, as_words, normal
from grpo_cli.rewards._units import (
    CODES,
    COUNTED,
    CURRENCIES,
    GLUED,
    NO_CHINESE,
    NO_NOUNS,
    UNIT_LETTERS,
    UNIT_NAMES,
    UnreadableError,
    beside,
    words_of,
)

MAX_ANSWER_CHARACTERS = 1000
MAX_DEPTH = 8  # of brackets


@dataclass(frozen=True)
class Value:
    """A number or an expression, and separately its unit, its power of ten and its percent sign."""

    text: str  # LaTeX
    unit: str = ""  # short name of a unit, or a count noun in the singular
    power: int = 0  # of ten, in words: 6 in `3 million`
    percent: bool = False


@dataclass(frozen=True)
class Words:
    """A text answer."""

    text: str


@dataclass(frozen=True)
class Named:
    r"""A name that is set equal to an answer: `x = 5`, `f(3) = 5`, `\text{Area} = 5`."""

    name: str
    answer: Answer


@dataclass(frozen=True)
class Chain:
    r"""Values that are said to be equal; `approximate` tells which are after `\approx`."""

    members: tuple[Value, ...]
    approximate: tuple[bool, ...]


@dataclass(frozen=True)
class Several:
    """Answers in any order, joined by `,`, `and` or `or`, or in the braces of a set."""

    joint: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Row:
    """Answers in an order: a point, an interval, a vector, a row or a column of a matrix."""

    brackets: str  # the opening and the closing one
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Ratio:
    """Values with colons between them: `3:4`; a time of day."""

    items: tuple[Value, ...]
    unit: str = ""


@dataclass(frozen=True)
class Reals:
    """A union of intervals: (from, whether it counts, to, whether it counts) of each."""

    parts: tuple[tuple[str, bool, str, bool], ...]
    bracketed: bool = False  # written as intervals
    name: str = ""  # of the variable


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that names no value: `2x+4y=3`."""

    left: str
    sign: str
    right: str


@dataclass(frozen=True)
class Choice:
    """A letter of a choice with what it stands for: `(B) 5`."""

    letter: str
    answer: Answer


Answer = Value | Words | Named | Chain | Several | Row | Ratio | Reals | Relation | Choice


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Answer:
    """Returns the answer that a text is, as a whole."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return Words(text)
    plain = normal(text)
    try:
        return _answer(plain)
    except (UnreadableError, RecursionError):
        return Words(as_words(plain))


_OPEN, _CLOSE = r"\\\{|\\langle(?![A-Za-z])|[({\[]", r"\\\}|\\rangle(?![A-Za-z])|[)}\]]"
_JOINT = r",|;|(?<![\\A-Za-z\"])(?:and|or)(?![A-Za-z])|[和与或]"
_SIGNS = {
    **{"=": "=", r"\approx": "≈", r"\simeq": "≈", "<": "<", ">": ">", r"\le": "≤", r"\ge": "≥"},
    **{r"\ne": "≠", r"\in": "∈"},
}
_RELATION = r"(?<![<>!\\:])=(?!=)|[<>]|\\(?:approx|simeq|le|ge|ne|in)(?![A-Za-z])"
_LETTERS_ONLY = re.compile(r"(?!(?:[A-Za-z]-)+[A-Za-z]\Z)[A-Za-z][A-Za-z'’. -]*")
_CHOICE = re.compile(r"\(\s*\"?([A-Z])\"?\s*\)\s*(.*)|\"?([A-Z])\"?(?:\)|[.:](?=\s))\s*(.*)")
_DATE = re.compile(r"[0-9]+(?:\s?[-–]\s?[0-9]+)+|[0-9]{1,4}(?:([./])[0-9]{1,4})(?:\1[0-9]{1,4})+")
_CODE = re.compile(r"(?=.*[A-Z])(?=.*[0-9])(?![0-9A-F]+_)(?:[0-9A-Z]|_\{?[0-9]+\}?)+")  # A1, H_2O
_ALL_REALS = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?|\"?(?:the )?(?:set of )?all real(?: numbers|s)\"?|全体实数|一切实数",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"""
    \\?[A-Za-z]+(?:_\{?\w+\}?)?'*                                  # x, \theta, a_5, S
    | \\?[A-Za-z]+'*(?:\^\{-1\})?(?:_\{?\w+\}?)?\s*\((?:[^()]|\([^()]*\))*\) # f(3), P(A)
    | \|\s*[A-Z]+\s*\| | \[\s*[A-Z]+\s*\] | \|[a-z]\|
    | m?\s*\\(?:angle|triangle|overline|vec|hat|bar|overrightarrow)\s*\{?\s*[A-Za-z]+\s*\}?
    | \(\s*(?:[a-z]|\\[a-z]+)(?:\s*,\s*(?:[a-z]|\\[a-z]+))+\s*\) | \\frac\{d\w?\}\{d\w\}
    | \\(?:sin|cos|tan|cot|max|min)\s*\\?[A-Za-z]*
    | \"[^\"]*\"(?:\s*[A-Za-z]\w*)? | [A-Za-z]{2,} | [\u3400-\u9fff]{1,8}
    """,
    re.VERBOSE,
)
_MARKS = words_of(
    "angle triangle overline vec hat bar overrightarrow frac sin cos tan cot max min cap cup mid"
)
# These are not nouns, and stand in names: "Area of the square", "total time".
_OF_NAMES = words_of("of total per time times max min maximum minimum square base")
_SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*|\\?[A-Za-z]+\s*\([A-Za-z, ]*\)")


def split(text: str, at: str) -> tuple[list[str], list[str]]:
    """Splits where a pattern matches outside of brackets; returns the parts and the matches."""
    parts, marks, depth, start = [], [], 0, 0
    for token in re.finditer(rf'"[^"]*"|(?P<at>{at})|(?P<open>{_OPEN})|(?P<close>{_CLOSE})', text):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth = max(depth - 1, 0)
        elif token["at"] and depth == 0:
            parts.append(text[start : token.start()].strip())
            marks.append(token["at"])
            start = token.end()
    return [*parts, text[start:].strip()], marks


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Returns the opening bracket, the content and the closing bracket of a text in brackets."""
    first = re.match(_OPEN, text)
    if first is None:
        return None
    depth = 0
    for token in re.finditer(rf"(?P<open>{_OPEN})|{_CLOSE}", text):
        depth += 1 if token["open"] else -1
        if depth == 0:
            if token.end() != len(text):
                return None
            return first[0], text[first.end() : token.start()].strip(), token[0]
    return None


def _answer(text: str) -> Answer:
    text = text.lstrip(" ,;:").rstrip(" .,;:")
    while (inner := _enclosed(text)) and inner[0] == "{":
        text = inner[1]
    if _ALL_REALS.fullmatch(text):
        return Reals((("-\\infty", False, "\\infty", False),))
    if (choice := _CHOICE.fullmatch(text)) and not re.match(_JOINT, choice[2] or choice[4] or ""):
        letter, rest = choice[1] or choice[3], choice[2] or choice[4]
        return Choice(letter, read(rest)) if rest else Words(letter.lower())
    if _LETTERS_ONLY.fullmatch(text):
        is_product = len(text) <= 3 and text.islower() and not re.search("[aeiou]", text)
        if not is_product and len(text) > 1 and not re.search(r"\b(?:and|or)\b", text):
            return Words(as_words(text))
    if _DATE.fullmatch(text) or _CODE.fullmatch(text):
        raise UnreadableError
    if re.match(r"\\begin|\].*\[\Z", text) and (row := _row(text)):
        return row
    items, joints = split(text, _JOINT)
    if len(items) == 1:
        return _single(text)
    items = [item for item in items if item]
    kinds = {
        "or" if j in ("or", "或") else "and" if j in ("and", "和", "与") else "," for j in joints
    }
    if {"and", "or"} <= kinds or not items:
        raise UnreadableError
    joint = next(iter(kinds - {","}), ",")
    answers = tuple(_single(item) for item in items)
    if any(isinstance(one, Words) and re.search(r"\d", one.text) for one in answers):
        raise UnreadableError
    if all(isinstance(one, Reals) and not one.bracketed for one in answers):
        return _joined([one for one in answers if isinstance(one, Reals)], joint)
    if joint == ",":  # 5, 3 \pm 1
        flat = [
            one.items if isinstance(one, Several) and one.joint == "," else (one,)
            for one in answers
        ]
        answers = tuple(item for items in flat for item in items)
    return Several(joint, answers) if len(answers) > 1 else answers[0]


def _text_answer(text: str) -> Answer:
    items, _ = split(text, _JOINT)
    if len(items) > 1 and all(items):
        kind = "or" if re.search(r"\bor\b", text) else "and" if re.search(r"\band\b", text) else ","
        return Several(kind, tuple(Words(as_words(item)) for item in items))
    if re.search(r"[0-9]", text):
        return _answer(text)
    return Words(as_words(text))


def _single(text: str) -> Answer:
    text = text.strip()
    while (inner := _enclosed(text)) and inner[0] == "{":
        text = inner[1].strip()
    if not text:
        raise UnreadableError
    if quoted := re.fullmatch(r'"([^"]*)"', text):
        return _text_answer(quoted[1])
    if _ALL_REALS.fullmatch(text):
        return Reals((("-\\infty", False, "\\infty", False),))
    unions, _ = split(text, r"\\cup(?![A-Za-z])")
    if len(unions) > 1:
        rows = [_single(one) for one in unions]
        parts = [part for row in rows for part in interval(row).parts]
        return Reals(tuple(parts), bracketed=True)
    if builder := re.fullmatch(r"\\\{\s*(\\?\w+)\s*(?:\\mid|\\vert|[|:])\s*(.+)\\\}", text):
        answer = _answer(builder[2])
        if isinstance(answer, Reals) and answer.name in ("", builder[1]):
            return answer
        raise UnreadableError
    members, signs = split(text, _RELATION)
    if signs:
        return _related(members, [_SIGNS[sign] for sign in signs])
    if row := _row(text):
        return row
    if text.count(r"\pm") == 1 and not re.search(r"[:,]", text):
        plus = re.sub(r"\A\s*\\pm|(?<=[({])\s*\\pm", "", text).replace(r"\pm", "+")
        return Several(",", (_value(plus), _value(text.replace(r"\pm", "-"))))
    ratio, colons = split(text, ":")
    if colons:
        values = [_value(part) for part in ratio]
        if any(value.unit for value in values[:-1]) or any(value.power for value in values):
            raise UnreadableError
        return Ratio(tuple(replace(value, unit="") for value in values), values[-1].unit)
    return _value(text)


def _related(members: list[str], signs: list[str]) -> Answer:
    if set(signs) <= {"=", "≈"}:
        return _equal(members, signs)
    if not all(members):
        raise UnreadableError
    if signs == ["∈"]:
        if not _SYMBOL.fullmatch(members[0]) and not re.fullmatch(
            r"\([a-z](,\s*[a-z])+\)", members[0]
        ):
            raise UnreadableError
        inside = _answer(members[1])
        if isinstance(inside, Row | Reals):
            return replace(interval(inside), bracketed=False, name=members[0])
        if isinstance(inside, Several):
            return inside
        raise UnreadableError
    variables = [i for i, member in enumerate(members) if _has_letters(member)]
    if len(variables) == 1 and _SYMBOL.fullmatch(members[variables[0]]):
        bounds = [None if i in variables else bare(_value(m)) for i, m in enumerate(members)]
        at = variables[0]
        if signs == ["≠"]:
            point = bounds[1 - at]
            assert point is not None, "the other member is a bound"
            two = (("-\\infty", False, point, False), (point, False, "\\infty", False))
            return Reals(two, name=members[at])
        if (len(signs) == 2 and at == 1) or len(signs) == 1:
            low, high = ("-\\infty", False), ("\\infty", False)
            for i, bound in enumerate(bounds):
                if bound is not None:
                    sign = signs[min(i, at)]
                    is_low = (sign in "<≤") == (i < at)
                    end = (bound, sign in "≤≥")
                    low, high = (end, high) if is_low else (low, end)
            if set(signs) <= set("<≤") or set(signs) <= set(">≥"):
                return Reals(((*low, *high),), name=members[at])
    if len(signs) == 1:
        return Relation(bare(_value(members[0])), signs[0], bare(_value(members[1])))
    raise UnreadableError


def bare(value: Value) -> str:
    """Returns the formula of a value beside which nothing stands."""
    if value.unit or value.power or value.percent:
        raise UnreadableError
    return value.text


def _equal(members: list[str], signs: list[str]) -> Answer:
    name = None
    while len(members) > 1 and (not members[0] or _is_name(members[0])):
        name = name or members[0]
        members, signs = members[1:], signs[1:]
    if not name and len(members) == 2 and _SYMBOL.fullmatch(members[1]):
        return _equal(members[::-1], signs)
    if len(members) > 1 and not name and _has_letters(members[0]) and len(members) == 2:
        return Relation(bare(_value(members[0])), "=", bare(_value(members[1])))
    if not _has_letters(members[-1]):  # A = bh = 12
        for member in members:
            _value(member)
            if _has_letters(member) and (not name or name in member):
                raise UnreadableError
        kept = [i for i, member in enumerate(members) if not _has_letters(member)]
        approximate = tuple(i > 0 and signs[i - 1] == "≈" for i in kept)
        members = [members[i] for i in kept]
    else:
        approximate = (False, *(sign == "≈" for sign in signs))
    answer: Answer
    if len(members) == 1:
        answer = _single(members[0])
    else:
        answer = Chain(tuple(map(_value, members)), approximate)
    if name and name[0] == "(" and not isinstance(answer, Row):
        raise UnreadableError
    return Named(name.strip('" '), answer) if name else answer


def _is_name(text: str) -> bool:
    if not _NAME.fullmatch(text):
        return False
    if set(re.findall(r"\\([A-Za-z]+)", text)) - _GREEK - _MARKS or text in (r"\pi", "i"):
        return False
    words = {word.lower() for word in re.findall(r"[A-Za-z]{2,}|(?<=')[a-z]", text)}
    return not words & (NO_NOUNS - _OF_NAMES) and not NO_CHINESE.search(text)


def _has_letters(text: str) -> bool:
    bare = re.sub(r"\\([A-Za-z]+)", lambda c: " x " if c[1] in _GREEK else " ", text)
    bare = re.sub(r'"[^"]*"\Z|(?<=[0-9}\s])[A-Za-z]{2,}(?:[\s.][A-Za-z]{2,})*[\s.]?\Z', "", bare)
    return re.search(r"(?<![A-Za-z])(?![ei](?![A-Za-z]))[A-Za-z]", bare) is not None


def _row(text: str) -> Answer | None:
    if french := re.fullmatch(r"\](.+),(.+)\[", text):
        return Row("()", (_single(french[1]), _single(french[2])))
    transposed = re.fullmatch(r"[\[(]([^()\[\]]*)[\])]\^\{?(?:T|\\top)\}?", text)
    text = f"({transposed[1]})" if transposed else text
    text = re.sub(
        r"\A[\[(]\s*\\begin\{array\}\{[^{}]*\}(.*)\\end\{array\}\s*[\])]\Z",
        r"\\begin{matrix}\1\\end{matrix}",
        text,
    )
    if matrix := re.fullmatch(r"\\begin\{([pbB]?)matrix\}(.*)\\end\{\1matrix\}", text):
        rows = [r.strip() for r in re.split(r"\\\\", matrix[2]) if r.strip()]
        cells = [tuple(_single(cell) for cell in row.split("&")) for row in rows]
        if len(cells) == 1 or all(len(row) == 1 for row in cells):
            return Row("()", tuple(cell for row in cells for cell in row))
        return Row("matrix", tuple(Row("()", row) for row in cells))
    if cases := re.fullmatch(r"\\begin\{cases\}(.*)\\end\{cases\}", text):
        return _answer(cases[1].replace(r"\\", ",").replace("&", " "))
    if re.match(r"[A-Z]'?\s*\(", text) and len(split(text[text.index("(") + 1 : -1], ",")[0]) > 1:
        point = _row(text[text.index("(") :])
        return Named(text[: text.index("(")].strip(), point) if point else None
    enclosed = _enclosed(text)
    if enclosed is None or enclosed[0] == "{":
        return None
    opening, content, closing = enclosed
    if opening == r"\{":
        if closing != r"\}":
            raise UnreadableError
        if not content:
            return Value(r"\emptyset")
        items = tuple(_single(item) for item in split(content, "[,;]")[0])
        if len(items) == 1 and (isinstance(items[0], Several) or items[0] == Value(r"\emptyset")):
            raise UnreadableError
        return Several("set", items) if len(items) > 1 else items[0]
    parts, marks = split(content, "[,;]")
    if len(set(marks)) > 1:
        raise UnreadableError
    if len(parts) == 1:
        return _answer(content) if (opening, closing) == ("(", ")") else None
    brackets = "()" if opening == r"\langle" else opening + closing
    return Row(brackets, tuple(_single(part) for part in parts))


def interval(answer: Answer) -> Reals:
    """Returns the interval that a row with two ends may be."""
    if isinstance(answer, Reals):
        return answer
    if (isinstance(answer, Several) and answer.joint == "set") or isinstance(answer, Value):
        raise UnreadableError
    if not (isinstance(answer, Row) and len(answer.items) == 2 and answer.brackets != "matrix"):
        raise UnreadableError
    low, high = answer.items
    if not (isinstance(low, Value) and isinstance(high, Value)):
        raise UnreadableError
    opening, closing = answer.brackets[0], answer.brackets[1]
    return Reals(((bare(low), opening == "[", bare(high), closing == "]"),), bracketed=True)


def _joined(rays: list[Reals], joint: str) -> Reals:
    """Returns the union, or where `and` or a comma joins two rays that meet, the interval."""
    if len({ray.name for ray in rays}) > 1:
        raise UnreadableError
    if joint != "or" and len(rays) == 2 and all(len(ray.parts) == 1 for ray in rays):
        (one,), (other,) = rays[0].parts, rays[1].parts
        low = one if one[2] == r"\infty" else other
        high = other if low is one else one
        if low[2] == r"\infty" and high[0] == r"-\infty" and low[0] != r"-\infty":
            try:
                if float(Fraction(low[0])) <= float(Fraction(high[2])):
                    return Reals(((low[0], low[1], high[2], high[3]),), name=rays[0].name)
            except (ValueError, ZeroDivisionError):
                raise UnreadableError from None
    if joint == "and":
        raise UnreadableError
    return Reals(tuple(part for ray in rays for part in ray.parts), name=rays[0].name)


_TOKEN = re.compile(
    rf"""
    (?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+) | "(?P<quoted>[^"]*)" | (?P<command>\\[A-Za-z]+|\\[|])
    | (?P<letters>[A-Za-z]+) | (?P<chinese>[{CHINESE}]+) | (?P<beside>[%＄€£¥¢₹]|\^\\circ)
    | (?P<space>\s+) | (?P<sign>.)
    """,
    re.VERBOSE,
)
_REMARK = re.compile(
    rf"(?<=\s)\(\s*(?:\"[^\"]*\"|[A-Za-z]{{4}}[A-Za-z\s]*)\s*\)|\([{CHINESE}]+\)"
)  # (minutes)
_PER = re.compile(r"/\s*\"?[A-Za-z]{3,}")  # $42/month
_COMMANDS = words_of("""
    frac sqrt pi cdot times div pm mp infty theta alpha beta gamma delta epsilon varepsilon zeta eta
    iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Pi
    Sigma Phi Psi Omega sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
    binom dbinom tbinom choose gcd lcm max min det deg dim arg int iint iiint oint sum prod lim to
    lfloor rfloor lceil rceil lvert rvert vert mid bmod pmod mod overline vec hat bar circ
    emptyset mathbb cap setminus angle triangle partial over operatorname perp parallel
    sim cong mathcal Re Im
    """)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_SCIENTIFIC = re.compile(
    r"([-+]?[0-9.]+)(?:e(-?[0-9]{1,4}|\+[0-9]{2,4})|(?:\\times|\\cdot|x)10\^(?:([0-9])|\{([-+]?[0-9]{1,4})\}))"
)
_MIXED = re.compile(r"([-+]?[0-9]+)\s*(?:\s([0-9]+)/([0-9]+)|\\frac\{?([0-9]+)\}?\{?([0-9]+)\}?)")
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e(?:-?[0-9]{1,4}|\+[0-9]{2,4}))?")
BASE = re.compile(r"([0-9A-F]+)_\{?([0-9]+)\}?")


def _value(text: str) -> Value:
    """Reads an amount, with the currency before it and the unit or count noun after it."""
    text, currency = _without_currency(text.strip())
    end = _end_of_formula(text, currency)
    formula, suffix = text[:end].strip(), text[end:].strip()
    is_product = re.match(r"[A-Za-z]|\^", suffix)
    if (
        formula[:1] in ("{", "/", "^", "_")
        or re.search(r"\^\{?T\b", formula)
        or (is_product and _has_letters(formula))
    ):
        raise UnreadableError  # x^2 abc
    unit, power, percent = beside(suffix)
    is_one = re.fullmatch(r"-?1|.*[./\\].*", formula)
    if unit and not (
        is_one or unit in UNIT_NAMES or re.search(r"[/^]", unit) or COUNTED.search(suffix)
    ):
        unit = f"~{unit}"  # 7 invalid, 7 egg: equal to the same only
    if currency and unit.startswith("/"):
        unit = currency + unit
    if currency and unit and not unit.startswith(currency):
        raise UnreadableError
    return Value(_plain_formula(formula), unit or currency, power, percent)


def _without_currency(text: str) -> tuple[str, str]:
    text = re.sub(r"\A(?:\\approx|约|大约)\s*", "", text)
    if price := re.match(
        r"([-+]?)\s*(?:(?:US|HK|[AC])?([＄€£¥￥₹])|\"?(USD|US|EUR|GBP|RMB|CNY|Rs)\b\.?\"?)\s*(?=[-0-9.\\])",
        text,
    ):
        unit = CURRENCIES[price[2]] if price[2] else CODES[price[3].lower()]
        if prefix := re.match(r"[-+]?\s*(HK|[AC])", price[0]):
            unit = f"{prefix[1]}{unit}"
        return price[1] + text[price.end() :], unit
    return text, ""


def _end_of_formula(text: str, currency: str) -> int:
    """Returns where the unit or noun after a formula begins."""
    depth, complete, spaced, previous = 0, False, False, ""
    for token in _TOKEN.finditer(text):
        kind, part = token.lastgroup, token[0]
        if kind == "space":
            spaced = True
            continue
        word = token["quoted"] if kind == "quoted" else part
        if kind == "number":
            if complete and ((spaced and previous[-1:].isdigit()) or previous == "}"):
                raise UnreadableError  # two numbers side by side
            part = "_" if previous == "_" else part
            complete = True
        elif kind == "command":
            if part in (r"\mu", r"\Omega") and complete and depth == 0 and spaced:
                return token.start()
            if part[1:] not in _COMMANDS and part != r"\|":
                raise UnreadableError
            complete = part[1:] in ("pi", "infty", "emptyset") or part[1:] in _GREEK
        elif kind in ("quoted", "letters", "chinese", "beside"):
            is_letter = kind == "letters" and _is_product(word, text, token, spaced, complete)
            is_letter |= kind == "quoted" and (not complete or previous == "_") and len(word) == 1
            is_letter |= kind == "quoted" and previous in ("_", "_{")
            is_letter |= (
                kind == "beside"
                and part[0] == "^"
                and (depth > 0 or bool(_FUNCTION.search(text[: token.start()])))
            )
            if not is_letter:
                if complete and depth == 0 and (kind != "letters" or spaced or GLUED.match(word)):
                    return token.start()
                raise UnreadableError
            complete = True
        elif part == "{" and complete and previous.isdigit():
            raise UnreadableError
        elif part in "([{":
            if depth == 0 and complete and _REMARK.fullmatch(text, token.start()):
                return token.start()
            depth += 1
            complete = False
            if depth > MAX_DEPTH:
                raise UnreadableError
        elif part in ")]}":
            depth -= 1
            complete = True
        elif part in "!|":
            complete = True
        elif part == "/" and currency and depth == 0 and _PER.match(text, token.start()):
            return token.start()
        elif part == "_" and previous[-1:].isdigit() and not BASE.fullmatch(text):
            raise UnreadableError
        elif part in "+-/^_" or (part in ",&\\=<>:" and depth > 0):
            complete = False
        else:
            raise UnreadableError
        if depth < 0:
            raise UnreadableError
        spaced, previous = False, part
    if depth or not complete:
        raise UnreadableError
    return len(text)


_GREEK = words_of(
    "theta alpha beta gamma delta epsilon varepsilon zeta eta iota kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega"
)


def _is_product(word: str, text: str, token: re.Match[str], spaced: bool, complete: bool) -> bool:
    """Returns whether letters are variables, not a unit or a noun."""
    if len(word) == 1:
        ends = re.match(r"\s*(?:\Z|[/^]|per\b)", text[token.end() :])
        is_unit = spaced and complete and word in UNIT_LETTERS and ends and "\\" not in text
        return not (is_unit and text[: token.start()].strip()[-1].isdigit())
    if complete and (GLUED.match(word) or word in ("st", "nd", "rd", "th")):
        return False
    is_noun = (
        spaced and len(word) == 3 and re.search("[aeiou]", word) and word not in ascii_lowercase
    )
    return word.islower() and len(word) <= 3 and not is_noun and word not in NO_NOUNS


def _plain_formula(formula: str) -> str:
    if mixed := _MIXED.fullmatch(formula):
        whole, *parts = (part for part in mixed.groups() if part is not None)
        if len(parts[0]) <= len(parts[1]):
            return rf"{whole}\frac{{{parts[0]}}}{{{parts[1]}}}"
    formula = re.sub(r"\s*\\cdot\s*", r"\\cdot ", formula)
    formula = re.sub(r"(?<![A-Za-z])\s+|\s+(?![A-Za-z0-9])", "", formula).replace('"', "")
    while (inner := _enclosed(formula)) and inner[0] in "({":
        formula = inner[1]
    compact = formula.replace(" ", "").lstrip("+")
    if exponential := _SCIENTIFIC.fullmatch(compact):
        power = exponential[2] or exponential[3] or exponential[4]
        return f"{exponential[1]}e{int(power)}"
    if small := re.fullmatch(r"(-?)10\^\{(-[0-9]+)\}", compact):
        return f"{small[1]}1e{small[2]}"
    if NUMBER.fullmatch(compact):
        return (
            compact.rstrip("0").rstrip(".") or "0"
            if "." in compact and "e" not in compact
            else compact
        )
    return formula.lstrip("+")


def number(value: Value) -> Decimal | None:
    """Returns a plain number's value, with its power of ten."""
    if not NUMBER.fullmatch(value.text):
        return None
    digits, _, exponent = value.text.partition("e")
    return Decimal(f"{digits}e{int(exponent or 0) + value.power}")
