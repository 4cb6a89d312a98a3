"""Units and count nouns: what may stand beside a value, and what may not."""

import re

from grpo_cli.rewards._spelling import CHINESE


class UnreadableError(Exception):
    """The grammar does not cover a text."""


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWERS |= {"万亿": 12, "百万": 6, "千万": 7, "百": 2, "千": 3, "万": 4, "亿": 8}
_POWER = re.compile(rf"\s*({'|'.join(_POWERS)})(?![A-Za-z米克瓦])\s*")

# Short name: the other names of a unit, in the singular.
UNIT_NAMES = {
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
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "pa": "pascal",
    "Ω": r"ohm \omega",
    "μm": r"\mum micrometer",
    "ha": "hectare 公顷",
    "acre": "",
    "th": "st nd rd",
    "unit": "单位",
    "person": "people 人",
    "child": "children",
    "man": "men",
    "woman": "women",
}
_SHORT_NAMES = {name: short for short, names in UNIT_NAMES.items() for name in names.split()}
# Units that may stand without `\text`, and with no space before them.
GLUED = re.compile(
    r"(?i:mm|cm|dm|km|ft|yds?|mi|mg|kg|lbs?|oz|ml|cl|dl|gal|secs?|mins?|hrs?|yrs?|mph|kph|kmh|kmph"
    r"|rs|rmb|usd|am|pm|hz|khz|mhz|ghz|kb|mb|gb|tb|kj|kw|kwh|mol)\Z|in\Z"
)
UNIT_LETTERS = "mgshLlt"  # where there is no `\\text`
CURRENCIES = {"＄": "$", "€": "€", "£": "£", "¥": "¥", "￥": "¥", "¢": "¢", "₹": "₹"}
CODES = {"usd": "$", "us": "$", "eur": "€", "gbp": "£", "rmb": "¥", "cny": "¥", "rs": "₹"}

# What no count noun is: numbers and fractions, multiples, comparisons, denials, guesses,
# connectives, directions, qualifiers of a list.
NO_NOUNS = words_of("""
    lakh lakhs crore tens zero one two three four five six seven eight nine ten eleven twelve
    thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty
    seventy eighty ninety hundreds thousands millions billions hundred thousand million billion
    trillion half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths
    seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth
    thousandths dozen dozens score scores gross couple pair pairs twice double doubled triple
    tripled times time twofold threefold fold squared cubed square root factorial remainder modulo
    mod base bogus cube error discarded mistake rejected halved quadrupled tenfold invalid excluded
    extraneous nope untrue unless doubt fails works lower upper bound bounds it t quadrillion
    permille grand bn doz et millionth millionths thirteenth twelfth eleventh sixteenth twentieth
    twelfths elevenths sixteenths twentieths more less fewer greater least most lesser than over
    under above below up down larger smaller better worse bigger beyond within between near nearly
    almost approximately about roughly around exactly ish odd even plusminus max maximum min minimum
    minima maxima not no never none nothing neither nor without wrong incorrect false except but
    fake cannot maybe perhaps possibly probably guess guessed likely unlikely unsure estimate
    estimated or and minus plus of out to is was are be if hence so thus then because since as by
    from for versus vs respectively resp else when where while until with at in on into upon off per
    divided multiplied negative positive inverse reciprocal opposite left right north south east
    west forward backward backwards forwards clockwise counterclockwise anticlockwise inside outside
    ago before after later earlier late early away each every all both either any only first second
    last next other another others also too through onto upto wait actually instead rather sorry
    joking kidding
""") - {"second", "square"}
_ADVERB = re.compile(
    r"(?:enty|rty|fty|xty|ghty|nety)[a-z-]+\Z|(?:[^n]ieth|enth|ixth|ghth|lfth)s?\Z"
    r"|(?<!^fami)(?<!^jel)(?<!^bel)(?<!^supp)(?<!^f)(?<!butterf)ly\Z"
)
NO_CHINESE = re.compile(
    r"[一二三四五六七八九十百千加减乘除舍无打点多半约几不没非或和与及至余的吗呢错]|分之|倒数|相反|方根|次方|左右|以[上下内外]|上下|不到|大概|可能|至少|至多|最[多少]"
)
_MEASURES = re.compile(
    r"\A[大小]?[个只本名位张支枝棵株条件辆台双朵头匹盒包袋瓶杯页题首座间栋份根块片段种人道架艘幅堆把串粒颗套班排行列"
    r"层组队箱桶筐车户家所门户面枚滴盘碗壶筒节场次遍下倍岁]"
)
# A count noun is in the plural, or Chinese.
COUNTED = re.compile(
    rf"\A\Z|(?:s|feet|teeth|geese|mice|fish|sheep|deer|dice|data)[\s.\")]*\Z|[{CHINESE}%°]"
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


def beside(suffix: str) -> tuple[str, int, bool]:
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
        if singular in UNIT_NAMES or singular in _SHORT_NAMES:
            return _SHORT_NAMES.get(singular, singular) + power + exponent
    if exponent or (len(name) == 1 and name.isascii()) or name in ("sin", "cos", "tan", "log"):
        raise UnreadableError
    is_chinese = re.match(f"[{CHINESE}]", name)
    if (
        (lower in NO_NOUNS or (set(re.split(r"[-']", lower)) - {"it"}) & NO_NOUNS)
        or (is_chinese and not _MEASURES.match(name))
        or _ADVERB.search(lower)
        or NO_CHINESE.search(name)
        or not name
    ):
        raise UnreadableError
    name = name if len(name) <= 2 else lower  # mW and MW
    return _PLURAL.sub("", _MEASURES.sub("", name)) + power + exponent
