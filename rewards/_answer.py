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

CHINESE = r"\u3400-\u9fff"
MAX_ANSWER_CHARACTERS = 1000
MAX_DEPTH = 8  # of brackets


@dataclass(frozen=True)
class Value:
    """A number or an expression, without what stands beside it."""

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


class UnreadableError(Exception):
    """The grammar does not cover a text."""


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


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- One spelling -------------------------------------------------------------------------------

_SPELLINGS = {
    **{"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "°": r"^\circ "},
    **{
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "²": "^2",
        "³": "^3",
        "≈": r"\approx ",
    },
    **{
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "–": "-",
    },
    **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "“": '"', "”": '"'},
    **{"⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "μ": r"\mu ", "Ω": r"\Omega ", "θ": r"\theta "},
}
_SPELLING = re.compile("|".join(map(re.escape, _SPELLINGS)))
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal)?|mathrm|mbox|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
# (pattern, replacement), in this order
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (
            r"\\begin\{(?:aligned|align\*?|gathered|split)\}|\\end\{(?:aligned|align\*?|gathered|split)\}|(?<=[^\\])&(?==)",
            "",
        ),
        (
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|large|Large|normalsize|bf|rm|it)(?![A-Za-z])\s?\.?(?<!\.)",
            "",
        ),
        (r"\\(?:color|textcolor)\s*\{[^{}]*\}", ""),
        (
            r"\\(?:underline|mathbf|boldsymbol|bm|mathit|mathsf|ensuremath)\s*(?=\{|\\?[A-Za-z0-9])",
            "",
        ),
        (r"\\(?:d|t|c|nice|s)frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"\\degree(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?", r"^\\circ "),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\lor(?![A-Za-z])|\\vee(?![A-Za-z])|\|\|", " or "),
        (r"\\land(?![A-Za-z])|\\wedge(?![A-Za-z])", " and "),
        (r"(?<=[0-9])(?:,\\!|\{,\}|\\,|\\ |')(?=[0-9]{3}(?![0-9]))", "\x00"),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\xa0", " "),
        (r"\\(?:ldots|dots|cdots)(?![A-Za-z])|…", "..."),
        (r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))", r"\\sqrt{\1\2}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\?(?<![A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}"),
        (r"(?<![\\A-Za-z])(pi|theta|infinity|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
        (r"\\infinity", r"\\infty"),
        (r"\*\*|\^", "^"),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?[0-9]{2,})", r"^{\1}"),
        (r"\*", r"\\cdot "),
        (r"\(\s*([0-9A-F]+)\s*\)_", r"\1_"),
        (
            r"(\\(?:ln|log)(?:_\{?\w+\}?)?\s*\w+)\s*/\s*(\\(?:ln|log)(?:_\{?\w+\}?)?\s*\w+)",
            r"\\frac{\1}{\2}",
        ),
        (r"\+\s*-", "-"),
        (r"\\not\s*=", r"\\ne "),
        (r"\\frac\s*(\\[a-z]+|[0-9A-Za-z])\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\\[a-z]+|[0-9A-Za-z])\s*(\\[a-z]+(?!\s*\{)|[0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\frac(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
        (
            r"\\h?phantom\s*\{[^{}]*\}|\\(?:tag|hspace)\s*\{[^{}]*\}|\\(?:small|checkmark)(?![A-Za-z])",
            " ",
        ),
        (r"\\\\\[[0-9.]*[a-z]*\]", r"\\\\"),
        (r"百分之\s*([0-9.]+)", r"\1%"),
        (r"(?<![0-9.,/])([0-9]+) ([0-9]{1,2})/([0-9]{1,4})(?![0-9/])", r"\1\\frac{\2}{\3}"),
        (r"(?i)\b(?:minus|negative)\"?\s*(?=[0-9\\])", "-"),
    ]
]
_FORMULA = re.compile(r"\$\$?|(?<!\\)\\[()\[\]]")
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))"
    r"(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?|([0-9])\7\7[0-9]*\.\.\.)"
)


def normal(text: str) -> str:
    r"""Returns the text in one spelling, with the content of `\text` in quotation marks."""
    text = _SPELLING.sub(lambda sign: _SPELLINGS[sign[0]], text).replace('"', "''")
    text = re.sub(r"\\(?:text)?dollar(?![A-Za-z])", r"\\$", text).replace(r"\%", "%")
    text = _TEXT.sub(_quoted, text).replace(r"\$", "＄")
    if text.count("$") % 2:  # a price, not a formula
        text = re.sub(r"\$(?=\s*-?[0-9.])", "＄", text)
    text = _FORMULA.sub(" ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating, _thousands(text))
    text = " ".join(text.replace("...", r"\ldots ").split())
    return text.lstrip(" ,;:").rstrip(" .,;:。")


def _quoted(found: re.Match[str]) -> str:
    r"""Returns what a `\text` holds: a letter, digits and connectives as such, words in quotes."""
    body = " ".join(found[1].replace("$", " ").replace("~", " ").split())
    if re.fullmatch(r"(?!\d)\W*|[-+]?[0-9.,/:]+|[A-Za-z](?<![mgshLltNJWV])", body):
        return f" {body} " if body else " "
    parts = re.split(rf"(\b(?:and|or)\b|[0-9][0-9.,:/]*|,|[{CHINESE}]+|[()])", body)
    return (
        " "
        + " ".join(
            part if i % 2 else f'"{part.strip()}"' for i, part in enumerate(parts) if part.strip()
        )
        + " "
    )


def _thousands(text: str) -> str:
    """Removes the marks between thousands."""
    grouped = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
    rest = grouped.sub("", text)
    is_list = ", " in text
    if is_list or ("," not in rest and not re.search(r"[(\[]|\\\{", text)):
        text = grouped.sub(lambda number: number[0].replace(",", ""), text)
    text = re.sub(
        r"(?<![0-9.,])[1-9][0-9]{0,2}(?:\x00[0-9]{3})+", lambda n: n[0].replace("\x00", ""), text
    )
    text = text.replace("\x00", " ")
    if spaced := re.fullmatch(r"\s*([-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?)\s*", text):
        text = spaced[1].replace(" ", "")
    return text


def _repeating(found: re.Match[str]) -> str:
    whole, fixed = found[1] or "0", found[2]
    if found[7]:
        fixed, period = fixed, found[7]
    elif found[6]:
        period = (found[3] or found[4]) + (found[5] or "") + found[6]
    else:
        period = found[3] or found[4]
    scale, nines = 10 ** len(fixed), 10 ** len(period) - 1
    value = Fraction(int(whole)) + Fraction(int(fixed or 0) * nines + int(period), scale * nines)
    if value.denominator == 1:
        return str(value.numerator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def as_words(plain: str) -> str:
    """Returns a text without what is only there for looks."""
    text = re.sub(r'[{}"]|\\(?=[A-Za-z])', " ", plain).casefold()
    text = re.sub(r"\A\s*\(\s*(\w)\s*\)\s*\Z", r"\1", text)
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(text.split()))


# --- Units and count nouns ----------------------------------------------------------------------

_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWERS |= {"万亿": 12, "百万": 6, "千万": 7, "百": 2, "千": 3, "万": 4, "亿": 8}
_POWER = re.compile(rf"\s*({'|'.join(_POWERS)})(?![A-Za-z米克瓦])\s*")

# Short name: the other names of a unit, in the singular.
_UNIT_NAMES = {
    "mm": "millimeter millimetre 毫米",
    "cm": "centimeter centimetre 厘米 公分",
    "dm": "decimeter decimetre 分米",
    "m": "meter metre 米",
    "km": "kilometer kilometre 千米 公里",
    "in": "inch",
    "ft": "foot feet",
    "yd": "yard 码",
    "mi": "mile 英里",
    "mg": "milligram 毫克",
    "g": "gram 克",
    "kg": "kilogram kilo 千克 公斤",
    "t": "ton tonne 吨",
    "lb": "pound 磅",
    "oz": "ounce",
    "ml": "milliliter millilitre 毫升",
    "l": "liter litre 升",
    "gal": "gallon",
    "s": "second sec 秒",
    "min": "minute 分钟",
    "h": "hour hr 小时 时",
    "km/h": "kph kmh kmph",
    "mi/h": "mph",
    "day": "天 日",
    "week": "周 星期",
    "month": "月 个月",
    "year": "yr 年 岁",
    "$": "dollar usd 美元",
    "¢": "cent 美分",
    "€": "euro eur 欧元",
    "£": "gbp 英镑",
    "¥": "yuan rmb cny 元 块 元钱 块钱 人民币",
    "₹": "rs rupee",
    "°": "degree deg 度",
    "°c": "摄氏度",
    "am": "a.m 上午",
    "pm": "p.m 下午",
    **{"n": "newton", "j": "joule", "w": "watt", "v": "volt", "pa": "pascal"},
    **{
        "Ω": r"ohm \omega",
        "μm": r"\mum micrometer",
        "ha": "hectare 公顷",
        "acre": "",
        "th": "st nd rd",
    },
    "person": "people 人",
    "child": "children",
    "man": "men",
    "woman": "women",
}
_SHORT_NAMES = {name: short for short, names in _UNIT_NAMES.items() for name in names.split()}
# Units that may stand without `\text`, and with no space before them.
_GLUED = re.compile(
    r"(?i:mm|cm|dm|km|ft|yds?|mi|mg|kg|lbs?|oz|ml|cl|dl|gal|secs?|mins?|hrs?|yrs?|mph|kph|kmh|kmph"
    r"|rs|rmb|usd|am|pm|hz|khz|mhz|ghz|kb|mb|gb|tb|kj|kw|kwh|mol)\Z|in\Z"
)
_UNIT_LETTERS = "mgshLlt"  # where there is no `\\text`
_CURRENCIES = {"＄": "$", "€": "€", "£": "£", "¥": "¥", "￥": "¥", "¢": "¢", "₹": "₹"}
_CODES = {"usd": "$", "us": "$", "eur": "€", "gbp": "£", "rmb": "¥", "cny": "¥", "rs": "₹"}

# What no count noun is: numbers and fractions, multiples, comparisons, denials, guesses,
# connectives, directions, qualifiers of a list.
_NO_NOUNS = words_of("""
    lakh lakhs crore tens zero one two three four five six seven eight nine ten eleven twelve
    thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty
    seventy eighty ninety hundreds thousands millions billions hundred thousand million billion
    trillion half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths
    seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth
    thousandths dozen dozens score scores gross couple pair pairs twice double doubled triple
    tripled times time twofold threefold fold squared cubed square root factorial remainder modulo
    mod base rejected halved quadrupled tenfold invalid excluded extraneous nope untrue unless doubt
    fails works lower upper bound bounds it t quadrillion permille grand bn doz et millionth
    millionths thirteenth twelfth eleventh sixteenth twentieth twelfths elevenths sixteenths
    twentieths more less fewer greater least most lesser than over under above below up down larger
    smaller better worse bigger beyond within between near nearly almost approximately about roughly
    around exactly ish odd even plusminus max maximum min minimum minima maxima not no never none
    nothing neither nor without wrong incorrect false except but fake cannot maybe perhaps possibly
    probably guess guessed likely unlikely unsure estimate estimated or and minus plus of out to is
    was are be if hence so thus then because since as by from for versus vs respectively resp else
    when where while until with at in on into upon off per divided multiplied negative positive
    inverse reciprocal opposite left right north south east west forward backward backwards forwards
    clockwise counterclockwise anticlockwise inside outside ago before after later earlier late
    early away each every all both either any only first second last next other another others also
    too through onto upto wait actually instead rather sorry joking kidding
""") - {"second", "square"}
_ADVERB = re.compile(r"(?<!^fami)(?<!^jel)(?<!^bel)(?<!^supp)(?<!^f)(?<!butterf)ly\Z")
_NO_CHINESE = re.compile(
    r"[一二三四五六七八九十百千加减乘除舍无打点多半约几不没非或和与及至余的吗呢错]|分之|倒数|相反|方根|次方|左右|以[上下内外]|上下|不到|大概|可能|至少|至多|最[多少]"
)
_MEASURES = re.compile(
    r"\A[大小]?[个只本名位张支枝棵株条件辆台双朵头匹盒包袋瓶杯页题首座间栋份根块片段种人道架艘幅堆把串粒颗套班排行列"
    r"层组队箱桶筐车户家所门户面枚滴盘碗壶筒节场次遍倍岁]"
)
# A count noun is in the plural, or Chinese.
_COUNTED = re.compile(
    rf"\A\Z|(?:s|feet|teeth|geese|mice|fish|sheep|deer|dice|data)[\s.\")]*\Z|[{CHINESE}%°C]"
)
_PLURAL = re.compile(r"(?<=[a-z]{2})(?:(?<=x)es|(?<=ch|sh|ss)es|(?<!s)s)\Z")
_SUFFIX = re.compile(
    rf"""
    "(?P<quoted>[^"]*)" | (?P<word>[A-Za-z][A-Za-z'.-]*) | (?P<chinese>[{CHINESE}]+)
    | (?P<circle>\^\\circ) | (?P<power>\^\{{?-?[1-4]\}}?)
    | (?P<sign>[/%＄€£¥¢₹\s]|\\cdot|\\mu|\\Omega)
    | \(\s*(?P<remark>["A-Za-z\s{CHINESE}]+)\)\Z
    """,
    re.VERBOSE,
)


def _beside(suffix: str) -> tuple[str, int, bool]:
    """Returns the unit or count noun, the power of ten and the percent sign after a value."""
    words, at = "", 0
    while at < len(suffix):
        found = _SUFFIX.match(suffix, at)
        if found is None:
            raise UnreadableError
        part = found["quoted"] or found["remark"] or found["word"] or found["chinese"]
        if part is None:
            part = "°" if found["circle"] else found["power"] or found["sign"] or ""
        glue = "" if part in "/°" or part[:1] == "^" or words.endswith(("/", "°", "\\mu")) else " "
        words += glue + part.replace('"', " ").strip() if part.strip() else " "
        at = found.end()
    return unit_of(" ".join(words.split()))


def unit_of(words: str) -> tuple[str, int, bool]:
    """Returns the short name of a unit or the singular of a count noun; power of ten; percent."""
    power, percent = 0, False
    while found := _POWER.match(words):
        power += _POWERS[found[1]]
        words = words[found.end() :]
    if found := re.match(r"\s*(?:%|per ?cent\b)\s*", words):
        percent, words = True, words[found.end() :]
    words = re.sub(
        r"(?i)\b(?:of them|in total|in all|altogether|total|(?:(?<=years )|(?<=year ))old)\Z",
        "",
        words,
    ).strip()
    if not words:
        return "", power, percent
    return _unit_name(words), power, percent


def _unit_name(words: str) -> str:
    words = re.sub(r"(?i)\bp\.\s*m\b\.?", "pm", re.sub(r"(?i)\ba\.\s*m\b\.?", "am", words))
    words = re.sub(r"(?i)\A(?:degrees? |度|°)\s*(?=(?:c|f|celsius|fahrenheit)\Z)", "°", words)
    words = re.sub(r"(?i)°(celsius|fahrenheit)", lambda name: f"°{name[1][0]}", words)
    words = re.sub(r"\s*\^\{?(-?[0-9])\}?", r"^\1", words)
    words = re.sub(r"\s*/\s*|\s+per\s+|\s+an?\s+(?=hour|day|week|month|year)|每", "/", words)
    words = re.sub(r"(?i:\b(?:square|sq)\b\.?\s*|平方)([^\s/]+)", r"\1^2", words)
    words = re.sub(r"(?i:\b(?:cubic|cu)\b\.?\s*|立方)([^\s/]+)", r"\1^3", words)
    words = re.sub(r"(?<=[a-z])(?=[23]\Z)", "^", words)
    if re.search(r"\^-", words):  # m s^-1
        words = re.sub(r"\s*(\S+?)\^-1(?![0-9])", r"/\1", words)
        words = re.sub(r"\s*(\S+?)\^-([2-4])", r"/\1^\2", words)
    parts = [part.split() for part in words.removeprefix("/").split("/")]
    if sum(map(len, parts)) > 4 or not all(parts):
        raise UnreadableError
    names = "/".join(" ".join(map(_short_name, part)) for part in parts)
    return f"/{names}" if words.startswith("/") else names


def _short_name(word: str) -> str:
    name, power, exponent = word.partition("^")
    name = name.strip(".,-")
    lower = name.lower() if len(name) > 2 or name.isupper() else name  # not Mg
    singulars: list[str] = [lower, lower.removesuffix("s"), lower.removesuffix("es")]
    for singular in singulars if lower[2:] else singulars[:1]:
        if singular in _UNIT_NAMES or singular in _SHORT_NAMES:
            return _SHORT_NAMES.get(singular, singular) + power + exponent
    if exponent or (len(name) == 1 and name.isascii()) or name in ("sin", "cos", "tan", "log"):
        raise UnreadableError
    is_chinese = re.match(f"[{CHINESE}]", name)
    if (
        (lower in _NO_NOUNS or (set(re.split(r"[-']", lower)) - {"it"}) & _NO_NOUNS)
        or (is_chinese and not _MEASURES.match(name))
        or _ADVERB.search(lower)
        or _NO_CHINESE.search(name)
        or not name
    ):
        raise UnreadableError
    name = name if len(name) <= 2 else lower  # mW and MW
    return _PLURAL.sub("", _MEASURES.sub("", name)) + power + exponent


# --- The grammar --------------------------------------------------------------------------------

_OPEN, _CLOSE = r"\\\{|\\langle(?![A-Za-z])|[({\[]", r"\\\}|\\rangle(?![A-Za-z])|[)}\]]"
_JOINT = r",|;|(?<![\\A-Za-z\"])(?:and|or)(?![A-Za-z])|[和与或]"
_SIGNS = {
    **{"=": "=", r"\approx": "≈", r"\simeq": "≈", "<": "<", ">": ">", r"\le": "≤", r"\ge": "≥"},
    **{r"\ne": "≠", r"\in": "∈"},
}
_RELATION = r"(?<![<>!\\:])=(?!=)|[<>]|\\(?:approx|simeq|le|ge|ne|in)(?![A-Za-z])"
_LETTERS_ONLY = re.compile(r"[A-Za-z][A-Za-z'’. -]*")
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
    | \(\s*[a-z](?:\s*,\s*[a-z])+\s*\) | \\frac\{d\w?\}\{d\w\}
    | \\(?:sin|cos|tan|cot|max|min)\s*\\?[A-Za-z]*
    | \"[^\"]*\"(?:\s*[A-Za-z]\w*)? | [A-Za-z]{2,} | [\u3400-\u9fff]{1,8}
    """,
    re.VERBOSE,
)
_MARKS = words_of(
    "angle triangle overline vec hat bar overrightarrow frac sin cos tan cot max min cap cup mid"
)
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
    if quoted := re.fullmatch(r'"([^"]*)"', text):
        return _text_answer(quoted[1])
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
    return Named(name.strip('" '), answer) if name else answer


def _is_name(text: str) -> bool:
    if not _NAME.fullmatch(text):
        return False
    if set(re.findall(r"\\([A-Za-z]+)", text)) - _GREEK - _MARKS or text in (r"\pi", "i"):
        return False
    words = re.findall(r"[A-Za-z]{2,}", text)
    return not {word.lower() for word in words} & (
        _NO_NOUNS
        - {
            "of",
            "total",
            "per",
            "time",
            "max",
            "min",
            "maximum",
            "minimum",
            "square",
            "base",
            "times",
        }
    ) and not _NO_CHINESE.search(text)


def _has_letters(text: str) -> bool:
    bare = re.sub(r"\\([A-Za-z]+)", lambda c: " x " if c[1] in _GREEK else " ", text)
    bare = re.sub(r'"[^"]*"\Z|(?<=[0-9}\s])(?:[A-Za-z]{2,}[\s.]?)+\Z', "", bare)
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
        if items == (Value(r"\emptyset"),):
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
            except ValueError:
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


_BASE = re.compile(r"[0-9A-F]+_\{?[0-9]+\}?")


def _value(text: str) -> Value:
    """Reads an amount, with the currency before it and the unit or count noun after it."""
    text, currency = _without_currency(text.strip())
    end = _end_of_formula(text, currency)
    formula, suffix = text[:end].strip(), text[end:].strip()
    is_product = re.match(r"[A-Za-z]|\^", suffix) and not _GLUED.match(suffix)
    if (
        formula[:1] == "{"
        or re.search(r"\^\{?T\b", formula)
        or (is_product and _has_letters(formula))
    ):
        raise UnreadableError  # x^2 abc
    unit, power, percent = _beside(suffix)
    is_one = re.fullmatch(r"-?1|.*[./\\].*", formula)
    if unit and not (
        is_one or unit in _UNIT_NAMES or re.search(r"[/^]", unit) or _COUNTED.search(suffix)
    ):
        raise UnreadableError  # 7 invalid
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
        unit = _CURRENCIES[price[2]] if price[2] else _CODES[price[3].lower()]
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
                if complete and depth == 0 and (kind != "letters" or spaced or _GLUED.match(word)):
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
        elif part == "_" and previous[-1:].isdigit() and not _BASE.fullmatch(text):
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


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _is_product(word: str, text: str, token: re.Match[str], spaced: bool, complete: bool) -> bool:
    """Returns whether letters are variables, not a unit or a noun."""
    if len(word) == 1:
        ends = re.match(r"\s*(?:\Z|[/^]|per\b)", text[token.end() :])
        is_unit = spaced and complete and word in _UNIT_LETTERS and ends and "\\" not in text
        return not (is_unit and text[: token.start()].strip()[-1].isdigit())
    if complete and (_GLUED.match(word) or word in ("st", "nd", "rd", "th")):
        return False
    is_noun = spaced and len(word) == 3 and re.search("[aeiou]", word) and word not in _ALPHABET
    return word.islower() and len(word) <= 3 and not is_noun and word not in _NO_NOUNS


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
