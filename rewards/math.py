"""Reward: the completion's final answer equals the gold answer mathematically (Math-Verify)."""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb, inf, log10
from typing import Any

from grpo_cli.rewards import reward
from grpo_cli.rewards._answer import (
    BASE,
    MAX_ANSWER_CHARACTERS,
    MAX_DEPTH,
    NUMBER,
    Answer,
    Chain,
    Choice,
    Named,
    Ratio,
    Reals,
    Relation,
    Row,
    Several,
    Value,
    Words,
    interval,
    number,
    read,
)
from grpo_cli.rewards._arguments import one_of
from grpo_cli.rewards._forms import is_worked_out
from grpo_cli.rewards._spelling import CHINESE, as_words
from grpo_cli.rewards._text import (
    Completions,
    announced_answer,
    announces,
    completion_texts,
    denies,
    final_box,
    hashes_answer,
    plain_characters,
    tagged_answer,
    without_remark,
    without_thoughts,
)
from grpo_cli.rewards._units import UnreadableError

CHOICES = {
    "final": ("marked", "anywhere"),
    "forms": ("strict", "lenient"),
    "units": ("agree", "ignore", "require"),
}

MAX_BARS = 8  # Math-Verify's grammar takes up to twice as long with each further one in a row
MAX_RELATIONS = 20
MAX_SLASHES = 10  # one after the other: SymPy's numerical value takes twice as long for each
MAX_WORDS = 8  # of prose in a formula, each of which is a product of letters to it
MAX_TERMS = 2000  # of a sum to some power, multiplied out
MAX_POWER = 100  # of sums
# Python itself reads and writes no whole number of more than 4,300 digits.
MAX_DIGITS = 4000


@dataclass(frozen=True)
class Rules:
    """The arguments of `math` that decide which answers are equal."""

    strict: bool = True
    units: str = "agree"


@reward(timeout=5, preload=("math_verify",), timeout_value=0.0)
def math(
    completions: Completions,
    answer: list[Any],
    log_metric: Callable[[str, float], None] | None = None,
    *,
    final: str = "marked",
    forms: str = "strict",
    units: str = "agree",
    unclosed_think: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""Returns 1.0 where the final answer is mathematically equal to the gold one, else 0.0.

    The final answer is the first of these that the completion has, after the last `</think>` if
    there is one:

    - the content of the last closed `\boxed{...}`;
    - the content of the last closed `<answer>...</answer>`;
    - what follows the last `####` on its line;
    - the rest of the sentence after the last "the answer is", "Answer:" or 答案是;
    - the value on the last line, if that is only a value, or a sentence such as "So there are 7
      apples." or 答：一共7个。 with one value.

    It is read to its last character: what the grammar of answers does not cover is text, which
    equals only the same text. docs/math.md lists the cases, each with its value and the argument
    that changes it. The gold answer is read alike, so a column of whole worked solutions serves
    too; each answer of a list is right, and so are all of them together.

    Two plain numbers are equal when their values are, exactly. Thousands may be set off (`1,234`,
    `1 234`; but `(1,234)` is a pair), and powers of ten written as such (`1.234e3`, `3 million`).
    Other expressions are equal when Math-Verify says so and their values are, decimals to 6
    places. A number may omit its base, not give another: `31` equals `31_4`; `31_5` does not.

    Recipe args:
        final: "marked": the answer has to stand in one of the places above. "anywhere": without
            one, what Math-Verify finds in the last 1,000 characters counts.
        forms: "strict": the answer has to be worked out: `\gcd(12,18)`, `2\cdot 3` and `5+1` are
            not 6, `5=7` is neither 5 nor 7, `(2,5)` is not the list `2,5`. "lenient": whatever
            Math-Verify takes as equal is.
        units: "agree": a unit or count noun may be left out, not be another one: `18` and
            `18 dollars` equal `\$18`, `18 cents` does not; `3 million` is 3000000. "ignore": units
            count for nothing, and `3 million` equals 3 as well. "require": where the gold answer
            has a unit, the final answer needs the same one, in full or short (`18 cm`,
            `18 centimeters`, `18厘米`). None is converted. The percent sign counts for nothing:
            `18\%` equals 18, and not 0.18.
        unclosed_think: whether a completion may have an answer whose last `<think>` never closes.

    Unless its text is that of the gold answer, an answer is wrong without a look that would take
    long: over 1,000 characters, brackets over 8 deep, powers of powers, more than 4,000 digits.

    A row whose gold answer is missing (None or blank) or cannot be read gives None. The metric
    `unreadable_gold` is the share of completions whose gold answer cannot be read.
    """
    for name, value in zip(CHOICES, (final, forms, units), strict=True):
        one_of(f"math: {name}", value, CHOICES[name])
    rules = Rules(forms == "strict", units)
    values: list[float | None] = []
    for text, gold in zip(completion_texts(completions), answer, strict=True):
        wanted = _golds(gold) if _is_present(gold) else ()
        if log_metric is not None:
            log_metric("unreadable_gold", float(not wanted and _is_present(gold)))
        if not wanted:
            values.append(None)
        else:
            text = plain_characters(without_thoughts(text, unclosed_think))
            values.append(float(_is_right(text, wanted, rules, final == "anywhere")))
    return values


def _is_present(gold: Any) -> bool:
    return gold is not None and str(gold).strip() not in ("", "[]")


def _golds(gold: Any) -> tuple[str, ...]:
    """Returns the gold answers; () if one can neither be read as a formula nor as words.

    Each answer of a list is right, and so are all of them together.
    """
    if not isinstance(gold, list | tuple):
        text = _gold(str(gold))
        return () if text is None else (text,)
    texts = [_gold(str(one)) for one in gold]
    found = [text for text in texts if text is not None]
    return (*found, ", ".join(found)) if len(found) == len(texts) else ()


@functools.lru_cache(maxsize=1024)  # every completion of a group is held against the same gold
def _gold(gold: str) -> str | None:
    gold = plain_characters(gold)
    readings = _marked(gold) or [gold, *_last_line(gold)]
    text = next((one for one in readings if not isinstance(read(one), Words)), readings[0])
    is_something = re.search(rf"[0-9A-Za-z{CHINESE}]", re.sub(r"\\[A-Za-z]+", "", text))
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    return text if is_something or not isinstance(read(text), Words) else None


def _is_right(text: str, golds: Sequence[str], rules: Rules, anywhere: bool) -> bool:
    stated = _marked(text)
    is_value = stated is None or any(map(_DIGIT_OR_FORMULA.search, stated))
    if stated is None or (stated and not is_value):  # "The answer is a surprise" states nothing
        stated = [*(stated or []), *([] if anywhere else _last_line(text))]
    if any(_equals(gold, one, rules) for gold in golds for one in stated):
        return True
    if not anywhere:
        return False
    found = _as_read(text[-MAX_ANSWER_CHARACTERS:])  # what Math-Verify finds at the text's end
    return bool(found) and any(_equals(gold, found, rules) for gold in golds)


_DIGIT_OR_FORMULA = re.compile(r"[0-9$\\]")


def _marked(text: str) -> list[str] | None:
    """Returns the readings of the marked answer; None if none is marked."""
    box: str | None = final_box(text)
    if box is not None:
        return [box]
    tagged: str | None = tagged_answer(text)
    if tagged is not None and denies(tagged):
        return []
    inside = text if tagged is None else tagged
    hashes: str | None = hashes_answer(inside)
    if hashes is not None:
        return [hashes.strip("* ")]
    announced: str | None = announced_answer(inside)
    if announced is not None:
        whole = [announced, announced.rstrip("!")]  # a factorial, or the end of a sentence
        if not isinstance(read(announced), Words):
            return whole
        value = without_remark(announced)
        return whole if denies(announced[len(value) :]) else [*whole, value]
    if tagged is None:
        return None
    if isinstance(read(tagged), Words) and _DIGIT_OR_FORMULA.search(tagged):
        return [tagged, *_last_line(tagged)]
    return [tagged]


def _last_line(text: str) -> list[str]:
    """Returns the value that is the last line of a text, or the only one in its last sentence."""
    before, _, line = text.rstrip().rpartition("\n")
    if display := _DISPLAY.search(text[-MAX_ANSWER_CHARACTERS:].rstrip(" \n.")):
        before, line = "", " ".join(part for part in display.groups() if part)
    line = _LABEL.sub("", _LOOKS.sub("", line)).strip()
    if not line or len(line) > MAX_ANSWER_CHARACTERS or r"\boxed" in line:
        return []
    if not isinstance(read(line.rstrip("!")), Words):
        above = _LOOKS.sub("", before.rstrip().rpartition("\n")[2]).strip(" ,;-")
        is_list = NUMBER.fullmatch(above) and above != line
        is_list = is_list or (_UNCERTAIN.search(above) and above[-1:] not in ".!。")
        is_list = is_list or (above[-1:] == ":" and not _RESULT.search(above))
        return [] if is_list else [line, line.rstrip("!")]
    if not re.search(r"[0-9]|\$", line):
        return [line]
    sentence = _CALCULATION.sub("", _SENTENCE.split(line.rstrip(" .!。"))[-1])
    values = list(_VALUE.finditer(sentence))
    if len(values) != 1 or not _LEAD.match(sentence):
        return []
    lead = sentence[: values[0].start()]
    if lead.isascii() and not _VERB.search(lead):
        return []
    if _UNCERTAIN.search(sentence) or _OTHER.search(lead) or announces(sentence):
        return []
    value, rest = values[0][0].strip(), without_remark(sentence[values[0].end() :])
    tail = _TAIL.fullmatch(_BRACKETS.sub(r" \1", rest))
    if tail is None:
        return []
    noun = tail["noun"] or ""
    if noun and "=" in value and not isinstance(read(value), Words):
        value = value.rpartition("=")[2]  # whose unit follows
    return [value + noun]


_RESULT = re.compile(
    r"\b(?:answers?|results?|solutions?|total|is|are|have|get|gives?|obtain|find|thus|therefore|hence|so"
    r"|value|sum|equals?|conclusion)\b[^:]{0,30}:\Z|[案果为是得即答]:\Z",
    re.IGNORECASE,
)
_LOOKS = re.compile(r"\*\*|^[\s*#-]*\s|`")
_LABEL = re.compile(
    r"\A\s*(?:(?:A|Ans|Answer|Result|Conclusion|Total|结果)\s*[:=]|=)\s*", re.IGNORECASE
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。;])")
# The last word before the value.
_VERB = re.compile(
    r"(?:\A|\b(?:is|are|was|were|be|has|have|had|gets?|takes?|took|costs?|makes?|made|needs?|sells?|sold"
    r"|buys?|bought|pays?|paid|earns?|earned|spends?|spent|saves?|saved|eats?|ate|gives?|gave|equals?"
    r"|reads?|works?|walks?|runs?|ran|drives?|drove|receives?|received|contains?|weighs?"
    r"|lasts?|requires?|leaves?|left|that|for|so|thus|therefore|hence|get|about|total|only)\b"
    r"|[=:,]|\b[A-Za-z]\s*=)[\s*]*(?:exactly\s+|a total of\s+)?[$\\(]*\Z",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # of GSM8K's solutions
# How a sentence begins that states a result.
_LEAD = re.compile(
    r"\s*(?:(?:so(?!\s+far)|thus|therefore|hence|it\s+(?:is|costs|takes|equals)|we\s+(?:get|have)"
    r"|the\s+[a-z]+(?:\s+of\s+[\w$]+)?\s+(?:is|are|equals))\b|所以|因此|答:|结果[是为]|一共|总共|共|增长)",
    re.IGNORECASE,
)
# A formula, or a run of numbers and operators.
_VALUE = re.compile(
    r"\$[^$]+\$|\\\(.*?\\\)|\\\[.*?\\\]|(?<![A-Za-z0-9_.])(?:[-+]\s?)?\\?[$€£¥]?(?:[0-9]|\.[0-9])"
    r"(?:[0-9.,/:^%()]|\s*[-+*×/=÷]\s*\\?[$€£¥]?(?=[0-9(]))*(?<![.,:(])"
)
_TAIL_WORD = (
    r"(?!(?:and|or|but|while|when|who|which|that|got|was|were|more|less|fewer|times|than|dozen|fails?|half"
    r"|halves|thirds|quarters|squared|cubed|hours?\s+ago)\b)[A-Za-z/²³°'^-]+[23]?"
)
# The unit or noun after the value, and what follows of the sentence.
_TAIL = re.compile(
    rf"(?P<noun>(?:\s*(?!(?:to|in|on|of|for|from|at|by|with|left|each)\b){_TAIL_WORD}(?:\s+(?!(?:to|in|on|of|for|from|at|by|with|left|each)\b)"
    rf"{_TAIL_WORD}){{0,3}}|(?:\s*[{CHINESE}/]){{1,8}}|\s*[°€£¥%]))?(?:\s+{_TAIL_WORD}){{0,7}}"
)
_BRACKETS = re.compile(r"\s*\(([^()0-9]*)\)\Z")
_DISPLAY = re.compile(r"(?:\$\$([^$]+)\$\$|\\\[((?:(?!\\\]).)+)\\\])\Z", re.DOTALL)
_UNCERTAIN = re.compile(
    r"\b(?:not?|never|nothing|none|neither|nor|cannot|without|if|unless|whether|suppose|assum\w+"
    r"|guess|maybe|perhaps|possibly|might|could|may|or|wrong|incorrect|false|anything|except|than|impossible"
    r"|least|most|between)\b|n't|\?|不(?!同)|没|非|如果|假设|可能|也许|或|的两?倍|相反|倒数|大于|小于|至[多少]|最[多少]|去掉|接近|减|还差|排除|超过|不足|舍|除",
    re.IGNORECASE,
)
# Words before a value that say it is not the result itself.
_OTHER = re.compile(
    r"\b(?:twice|half|double|triple|divid\w+|divisible|multiple|factor|root|square|exceeds?|below"
    r"|above|under|over|nearly|almost|plus|minus|tr(?:y|ied)|step|page|case|less|more|greater)\b"
    r"|[<>≤≥≠]|\\[lgn]eq?(?![A-Za-z])",
    re.IGNORECASE,
)


def _equals(gold: str, stated: str, rules: Rules) -> bool:
    """Returns whether an answer is the gold one's text, or equal by the rules."""
    if len(stated) > MAX_ANSWER_CHARACTERS:
        return False
    if "".join(gold.split()) == "".join(stated.split()):
        return True
    if same(read(gold), read(stated), rules):
        return True
    return not rules.strict and _verify(f"${gold}$", f"${stated}$")


def _as_read(text: str) -> str:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if not _is_within_limits(text):
        return ""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    found: list[Any] = parse(text, kinds, parsing_timeout=None)
    return f"${found[-1]}$" if found and isinstance(found[-1], str) else ""


def same(gold: Answer, stated: Answer, rules: Rules) -> bool:
    """Returns whether two answers are equal."""
    match gold, stated:
        case (Choice(), Choice()):
            return gold.letter == stated.letter and not _denies_choice(stated)
        case (Choice(), _):
            letter = _as_text(stated) == gold.letter.lower()
            return letter or same(gold.answer, stated, rules)
        case (_, Choice()):
            letter = _as_text(gold) == stated.letter.lower() and not _denies_choice(stated)
            return letter or same(gold, stated.answer, rules)
        case (Named(), Named()) if gold.name != stated.name and _folded(gold) != _folded(stated):
            return _same_equation(gold, stated)
        case (Relation(), Relation() | Named()) | (Named(), Relation()):
            return _same_equation(gold, stated)
        case (Named(), Named()):
            return same(gold.answer, stated.answer, rules)
        case (Named(), _):
            return same(gold.answer, stated, rules)
        case (_, Named()):
            return same(gold, stated.answer, rules)
        case (Chain(), _):
            return any(same(one, stated, rules) for one in (gold.members[-1], gold.members[0]))
        case (_, Chain()):
            if rules.strict and not _is_consistent(stated):
                return False
            return any(same(gold, one, rules) for one in (stated.members[-1], stated.members[0]))
        case (Several(), Several()):
            return _same_lists(gold, stated, rules)
        case (Several(), Row()) | (Row(), Several()):
            several, row = (gold, stated) if isinstance(gold, Several) else (stated, gold)
            assert isinstance(several, Several), "one of the two is"
            ordered = _assigned(several)
            return (
                ordered is not None
                and row.brackets == "()"
                and _same_rows(*(ordered, row.items), rules)
            )
        case (Row(), Row()):
            return gold.brackets == stated.brackets and _same_rows(gold.items, stated.items, rules)
        case (Reals() | Row(), Reals() | Row()):
            return _same_intervals(gold, stated, rules)
        case (Ratio(), Ratio()) if _quotient(gold) and _quotient(stated):
            return same(_quotient(gold), _quotient(stated), rules)
        case (Ratio(), Ratio()) if bool(_quotient(gold)) == bool(_quotient(stated)):
            units = _units_agree(gold.unit, stated.unit, rules)
            return units and _same_rows(gold.items, stated.items, rules)
        case (Ratio(), Value()) | (Value(), Ratio()):
            one, other = (_quotient(one) for one in (gold, stated))
            return one is not None and other is not None and same(one, other, rules)
        case (Relation(), Value()) | (Value(), Relation()):
            return False
        case (Value(), Several("and", (Value() as whole, Value() as part))):  # 2 and 1/2
            if whole.text.isdigit() and re.fullmatch(r"\\frac\{\d+\}\{\d+\}|\d+/\d+", part.text):
                return same(gold, read(f"{whole.text} {part.text}"), rules)
            return False
        case (Value(), Several(_, items)) if len({str(item) for item in items}) == len(items):
            return all(same(gold, item, rules) for item in items)  # \boxed{x+1} or \boxed{1+x}
        case (Value(), Value()):
            return _same_values(gold, stated, rules)
        case (Words(), _) | (_, Words()):
            return _as_text(gold) == _as_text(stated) is not None
    return False


def _denies_choice(choice: Choice) -> bool:
    words = _as_text(choice.answer) or ""
    denial = r"(?:is|are|was|no)\b|\W*[a-z]\W*\Z|\W|.*\b(?:not|wrong|incorrect|false)\b"
    return re.match(denial, words) is not None


def _folded(named: Named) -> str:
    name = re.sub(r'[\s{}"]', "", named.name)
    return name.casefold() if name.isalpha() and len(name) > 2 else name


def _as_text(answer: Answer) -> str | None:
    if isinstance(answer, Words):
        return str(answer.text)
    if isinstance(answer, Value) and re.fullmatch("[A-Za-z ]+", answer.text) and not answer.unit:
        return str(as_words(answer.text))
    return None


def _same_lists(gold: Several, stated: Several, rules: Rules) -> bool:
    if {gold.joint, stated.joint} == {"and", "or"} or len(gold.items) != len(stated.items):
        return False
    names = [[x.name for x in side.items if isinstance(x, Named)] for side in (gold, stated)]
    if "or" in (gold.joint, stated.joint) and max(len(set(of_side)) for of_side in names) > 1:
        return _as_text(gold) == _as_text(stated) is not None
    one, other = _assigned(gold), _assigned(stated)
    if one is not None or other is not None:
        if all(names) and set(names[0]) != set(names[1]):
            return False
        return _same_rows(one or gold.items, other or stated.items, rules)
    left = list(stated.items)
    for item in gold.items:
        found = next((i for i, other in enumerate(left) if same(item, other, rules)), None)
        if found is None:
            return False
        del left[found]
    return True


def _assigned(several: Several) -> tuple[Answer, ...] | None:
    """Returns the answers by the order of their names where each has a name of its own."""
    named = [item for item in several.items if isinstance(item, Named)]
    if len({item.name for item in named}) < len(several.items) or several.joint == "or":
        return None
    return tuple(item.answer for item in sorted(named, key=lambda item: item.name))


def _same_rows(gold: Sequence[Answer], stated: Sequence[Answer], rules: Rules) -> bool:
    return len(gold) == len(stated) and all(
        same(one, other, rules) for one, other in zip(gold, stated, strict=True)
    )


def _same_intervals(gold: Answer, stated: Answer, rules: Rules) -> bool:
    # (2,5) may be a point: it does not answer 2<x<5, of which [2,5] or (2,\infty) leave no doubt.
    may_be_point = isinstance(gold, Reals) and isinstance(stated, Row) and stated.brackets == "()"
    if may_be_point and rules.strict and r"\infty" not in str(stated):
        return False
    try:
        one, other = interval(gold), interval(stated)
    except UnreadableError:
        return False
    if one.name and other.name and one.name != other.name:
        return False
    wanted, given = one.parts, list(other.parts)
    for low, has_low, high, has_high in wanted:
        for part in given:
            if (has_low, has_high) == (part[1], part[3]) and all(
                _same_values(Value(one), Value(other), rules)
                for one, other in ((low, part[0]), (high, part[2]))
            ):
                given.remove(part)
                break
        else:
            return False
    return not given


def _quotient(answer: Answer) -> Value | None:
    if isinstance(answer, Value):
        return answer
    if not isinstance(answer, Ratio) or len(answer.items) != 2 or answer.unit:
        return None
    if re.fullmatch("[0-5][0-9]", answer.items[1].text):  # a time of day
        return None
    return Value(rf"\frac{{{answer.items[0].text}}}{{{answer.items[1].text}}}")


def _units_agree(gold: str, stated: str, rules: Rules) -> bool:
    if rules.units == "ignore" or gold.lstrip("~") == stated.lstrip("~"):
        return True
    if "~" in gold + stated:  # a word that may be no count noun
        return False
    return not gold or (not stated and rules.units == "agree")


def _same_values(gold: Value, stated: Value, rules: Rules) -> bool:
    if not _units_agree(gold.unit, stated.unit, rules):
        # `5m` is a product as a formula, and 5 metres where the gold answer is.
        return bool(gold.unit) and not stated.unit and stated.text == f"{gold.text}{gold.unit}"
    if gold.percent != stated.percent and (gold.unit or stated.unit):  # 100% and 100 degrees
        return False
    one, other = number(gold), number(stated)
    if one is not None and other is not None:
        lacks_power = rules.units == "ignore" and 0 in (gold.power, stated.power)
        return one == other or (
            lacks_power and number(replace(gold, power=0)) == number(replace(stated, power=0))
        )
    if gold.text == stated.text and gold.power == stated.power:
        return True
    # To Math-Verify, which drops the subscript, 31_4, 31_5 and 31 are the same.
    bases = [BASE.fullmatch(value.text) for value in (gold, stated)]
    if any(bases) and rules.strict:
        digits, base = _in_base(gold)
        stated_digits, stated_base = _in_base(stated)
        return digits == stated_digits and stated_base in ("", base or "10")
    if rules.strict and not is_worked_out(gold.text, stated.text):
        return False
    return _verify(_formula(gold), _formula(stated))


def _by_value(value: Value) -> Value:
    """Returns 0.18 for 18%."""
    if not value.percent:
        return value
    plain = number(value)
    text = rf"\frac{{{value.text}}}{{100}}" if plain is None else f"{plain.scaleb(-2):f}"
    return Value(text, value.unit)


def _in_base(value: Value) -> tuple[str, str]:
    found = BASE.fullmatch(value.text)
    return (found[1], found[2]) if found else (value.text, "")


def _is_consistent(chain: Chain) -> bool:
    """Returns whether all values are equal that a chain says are."""
    last, *_ = reversed(chain.members)
    rules = Rules(strict=False)
    for i, member in enumerate(chain.members[:-1]):
        if any(chain.approximate[i + 1 :]):
            if not _is_rounded(member, last):
                return False
        else:
            one, other = replace(member, unit=last.unit), last
            if member.percent != last.percent:
                one, other = _by_value(one), _by_value(other)
            if member.unit not in ("", last.unit) or not _same_values(one, other, rules):
                return False
    return True


def _is_rounded(exact: Value, rounded: Value) -> bool:
    """Returns whether a decimal is a value's own, to as many places as it has."""
    stated = number(rounded)
    expression = _expression(_formula(exact)) if _is_within_limits(_formula(exact)) else None
    value = None if expression is None else _computed(lambda: expression.evalf(20, maxn=300))
    if stated is None or value is None or not value.is_Float:
        return _same_values(exact, rounded, Rules(strict=False))
    places = stated.as_tuple().exponent
    assert isinstance(places, int), "a plain number is finite"
    exactly = Decimal(str(value))
    off, unit = abs(exactly - stated), Decimal(10) ** min(places, 0)
    # 0.66 for 2/3 is cut off, not rounded. Of whole numbers, only the nearest.
    return off <= unit / 2 or (places < 0 and off < unit and abs(stated) < abs(exactly))


def _formula(value: Value) -> str:
    """Returns the value as LaTeX for Math-Verify."""
    text = value.text
    if NUMBER.fullmatch(text) and "e" in text:
        digits, _, exponent = text.partition("e")
        text = rf"{digits}\times 10^{{{exponent}}}"
    text = _MIXED.sub(r"(\1+\2)", _DEGREES.sub(r"{(\1\\pi/180)}", text))
    return rf"$({text})\times 10^{{{value.power}}}$" if value.power else f"${text}$"


_MIXED = re.compile(r"(?<![0-9.}])([0-9]+)(\\frac\{[0-9]+\}\{[0-9]+\})")
_DEGREES = re.compile(r"([0-9.]+|\\?[A-Za-z]+)\s*\^\\circ\s*")


def _same_equation(gold: Named | Relation, stated: Named | Relation) -> bool:
    """Returns whether two equations are equal up to a constant factor."""
    one, other = _as_relation(gold), _as_relation(stated)
    if one is None or other is None or one.sign != other.sign:
        return False
    if one.sign != "=":
        return bool(one == other)
    differences = [_difference(one), _difference(other)]
    if None in differences:
        return False
    import sympy

    symbols = sorted(differences[0].free_symbols | differences[1].free_symbols, key=str)
    if not symbols:
        return False
    point = {x: sympy.Rational(37 + 7 * i, 100) for i, x in enumerate(symbols)}

    def is_multiple() -> bool:
        factor = differences[0].subs(point) / differences[1].subs(point)
        return (
            bool(factor.is_finite and factor != 0)
            and not _differ(differences[0], factor * differences[1], exact=True)
            and bool(sympy.expand(differences[0] - factor * differences[1]) == 0)
        )

    return _computed(is_multiple) is True


def _as_relation(answer: Named | Relation) -> Relation | None:
    if isinstance(answer, Relation):
        return answer
    if not re.search(r"[A-Za-z]{2}|[('_]", answer.name) and isinstance(answer.answer, Value):
        return Relation(answer.name, "=", answer.answer.text)
    return None


def _difference(relation: Relation) -> Any:
    """Returns left minus right as an expression of few terms; None if it is none."""
    sides = [f"${side}$" for side in (relation.left, relation.right)]
    if any(
        int(power["exponent"].replace(",", "")) > 10
        for side in sides
        for power in _POWER.finditer(side)
    ):
        return None
    if not all(_is_within_limits(side) and len(side) <= MAX_EQUATION for side in sides):
        return None
    read = [_expression(side) for side in sides]
    return None if None in read else read[0] - read[1]


MAX_EQUATION = 60  # characters of a side


def _verify(gold: str, text: str) -> bool:
    """Returns Math-Verify's judgement of two formulas; False for those that would take it long.

    What SymPy raises on odd text, Math-Verify turns into "not equal". Their values at fixed points
    are compared first, which only refuses: it is quick, and exact where Math-Verify rounds.
    """
    if not (_is_within_limits(gold) and _is_within_limits(text)):
        return False
    one, other = _expression(gold), _expression(text)
    if one is not None and other is not None:
        if _lost_letters(gold, one) or _lost_letters(text, other):
            return False
        if _differ(one, other, exact="." not in gold + text):
            return False
    from math_verify import verify

    # The deadline is the decorator's.
    return bool(verify(_parsed(gold), _parsed(text), timeout_seconds=None))


def _lost_letters(text: str, expression: Any) -> bool:
    """Returns whether Math-Verify dropped a letter, which it takes for a unit: the m of 5m."""
    if re.search(r"\\(?:i?int|sum|prod|lim)(?![A-Za-z])", text):  # whose variables are bound
        return False
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", _small(text))) - {"e", "i", "d"}
    return bool(set("".join(letters)) - set("".join(map(str, expression.free_symbols))) - set("ei"))


def _differ(one: Any, other: Any, exact: bool) -> bool:
    """Returns whether two expressions have different values at a fixed point."""
    import sympy

    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    for start in (37, 191):
        point = {x: sympy.Rational(start + 7 * i, 100) for i, x in enumerate(symbols)}

        def differ_at(point: dict[Any, Any] = point) -> bool:
            a, b = one.subs(point), other.subs(point)
            size = max(abs(a.evalf(20)), abs(b.evalf(20)))
            off = abs((a - b).evalf(20, maxn=300))
            is_off = bool(off > size * (1e-15 if exact else 2e-6))
            return is_off or (exact and (a - b).is_zero is False)

        if _computed(differ_at):
            return True
    return False


def _computed(compute: Callable[[], Any]) -> Any:
    """Evaluates with SymPy; None where it raises, which a formula may do in any way."""
    try:
        return compute()
    except Exception:
        return None


_CAPITAL = re.compile(
    r"(?<![A-Za-z\\])(?<!\\mathbb\{)(?<!\\mathcal\{)([A-Z])(?![A-Za-z])(?:_(?:([0-9a-z])|\{([0-9a-z]+)\}))?"
)


def _small(text: str) -> str:
    """Returns a formula with `z_{cr}` for R, because Math-Verify takes R and r for one symbol."""
    return _CAPITAL.sub(
        lambda found: f"z_{{c{found[1].lower()}{found[2] or found[3] or ''}}}", text
    )


@functools.lru_cache(maxsize=1024)  # every completion of a group is held against the same gold
def _parsed(text: str) -> list[Any]:
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # It warns that there is no time limit, and of answers that it cannot read.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Not its list of units, which are taken off before, and are letters of formulas too.
    reading = NormalizationConfig(malformed_operators=True, nits=True)
    config = LatexExtractionConfig(normalization_config=reading)
    answers: list[Any] = parse(_small(text), [config], parsing_timeout=None)
    if answers and isinstance(answers[0], sympy.Expr):  # it may have two symbols i
        named = {
            x: sympy.I if str(x) == "i" else sympy.Symbol(str(x)) for x in answers[0].free_symbols
        }
        answers[0] = answers[0].subs(named)
    return answers


def _expression(text: str) -> Any:
    import sympy

    read = _parsed(text)
    if not read or not isinstance(read[0], sympy.Expr):
        return None
    return None if read[0].has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit) else read[0]


def final_answer(text: str, final: str = "marked", unclosed_think: bool = False) -> str | None:
    """Returns the final answer that `math` reads in a completion, as text, or None.

    It is looked for in the same places, in the same order. "The answer is a surprise" states
    nothing where a value stands elsewhere; on the last line one word is an answer. Full-width
    characters are given in their plain form.
    """
    text = plain_characters(without_thoughts(text, unclosed_think))
    marked = _marked(text)
    if marked and any(map(_DIGIT_OR_FORMULA.search, marked)):
        return marked[-1].strip() or None
    if marked is not None and not marked:
        return None
    last = [] if final == "anywhere" else _last_line(text)
    if last and (_DIGIT_OR_FORMULA.search(last[0]) or (not marked and " " not in last[0])):
        return last[-1].strip()
    if final == "anywhere" and (found := _as_read(text[-MAX_ANSWER_CHARACTERS:])):
        return found
    return (marked[-1].strip() or None) if marked else None


def same_answer(one: str, other: str, *, forms: str = "strict", units: str = "agree") -> bool:
    """Returns whether two final answers are equal by the rules of `math`, in either order.

    The arguments are those of `math`.
    """
    first, second = plain_characters(one), plain_characters(other)
    rules = Rules(forms == "strict", units)
    return _equals(first, second, rules) or _equals(second, first, rules)


# What would take Math-Verify long, or more memory than there is.

_SEGMENT_END = re.compile(r"\n|\$|(?<!\\)\\[()\[\]]")
_ITEM_END = re.compile(r"[,;=<>&]|(?<![A-Za-z\\])[A-Za-z]{2,}")
_RELATION = re.compile(r"[<>=]|\\(?:leq?|geq?|lt|gt|neq?)(?![A-Za-z])")
# x_a_b_c_d_e_f and \sin(\sin(\sin(\sin x))), whatever the brackets.
_LONG_TOWER = re.compile(
    r"(?:\^\s*\{?\s*\\?[A-Za-z0-9]\s*\}?\s*){4}|(?:[\^_]\s*\{?\s*\\?[A-Za-z0-9]\s*\}?\s*){6}"
)
_NESTED_FUNCTIONS = re.compile(
    r"(?:\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)h?\s*(?:\\left)?[({]*\s*){4}"
)
_LARGE_COUNT = re.compile(
    r"(?:\\[dt]?binom|\\choose|\\Gamma|\\sum|\\prod)(?=.*[0-9]{4})|\\[dt]?binom\s*(?:\{[^{}]*\})?\{[^{}]*\^"
    r"|(?<![0-9])(?!1000)[0-9]{4,}\s*!|[)}!]\s*!"
    r"|\\[dt]?binom\s*\{[^{}]*[A-Za-z]"
)
_POWER = re.compile(
    r"(?P<base>[0-9][0-9,]*(?:\.[0-9]+)?|[A-Za-z]|[)}\]])\s*(?:\^|\*\*)\s*\{?\s*-?(?P<exponent>[0-9][0-9,]*)"
)
_POWER_OF_POWER = re.compile(r"(?:\^|\*\*)[\s{(]*[0-9A-Za-z]+[\s}]*(?:\^|\*\*|!)")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_FUNCTIONS = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|sqrt)(?![A-Za-z])")
MAX_FUNCTIONS = 8
MAX_FACTORS = 12  # sums that are multiplied out


def _is_within_limits(text: str) -> bool:
    if len(text) > MAX_ANSWER_CHARACTERS + len("answer: "):
        return False
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{4,}", text)
    if re.fullmatch(r"\$[^$]*\$", text) and len(words) > MAX_WORDS:
        return False
    return all(map(_is_segment_within_limits, _SEGMENT_END.split(text)))


def _is_segment_within_limits(text: str) -> bool:
    depth = deepest = 0  # of brackets, those included that are never closed
    for bracket in re.findall(r"[(){}\[\]]", text):
        depth = max(depth + (1 if bracket in "({[" else -1), 0)
        deepest = max(deepest, depth)
    return (
        deepest <= MAX_DEPTH
        and text.count("|") <= MAX_BARS
        and len(_RELATION.findall(text)) <= MAX_RELATIONS
        and max(part.count("/") for part in _ITEM_END.split(text)) <= MAX_SLASHES
        and not re.search(r"([-+.]\s*){5}|[A-Za-z]{20}", text)
        and not _LONG_TOWER.search(text)
        and not _NESTED_FUNCTIONS.search(text)
        and len(_FUNCTIONS.findall(text)) <= MAX_FUNCTIONS
        and len(re.findall(r"[A-Za-z][^()]*\)\s*(?:\\cdot\s*)?\(", text)) <= MAX_FACTORS
        and _digits(text) <= MAX_DIGITS
    )


def _digits(text: str) -> float:
    """Returns an upper bound of the digits, or the terms, of what a formula comes to."""
    single = re.findall(r"[0-9][0-9,]*", _POWER.sub(" ", text))
    numbers = [int(number.replace(",", "")) for number in single]
    if _POWER_OF_POWER.search(text) and re.search("[2-9]|1[0-9]", text):
        return inf
    if _LARGE_COUNT.search(text):
        return inf
    size, factor, names = 0.0, 1.0, len(set(_LETTER.findall(text)))
    terms = 0
    for power in _POWER.finditer(text):
        if len(power["exponent"]) > 6:
            return inf
        base, exponent = power["base"], int(power["exponent"].replace(",", ""))
        if base in ")}]":  # what is inside is not looked for: all of the formula is multiplied
            factor *= max(exponent, 1)
            terms += exponent
            if names > 1 and comb(min(exponent, MAX_TERMS) + names, names) > MAX_TERMS:
                return inf
        elif base.isalpha():
            size += exponent / 2  # of its value at a fixed point
        else:
            size += exponent * max(log10(float(base.replace(",", "")) + 1e-9), 0.3)
    if names and terms > MAX_POWER:
        return inf
    return factor * (size + sum(log10(number + 1) for number in numbers))
