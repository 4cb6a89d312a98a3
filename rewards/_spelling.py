"""One spelling of an answer: LaTeX with one command for each sign, numbers without marks."""

import re
from fractions import Fraction

CHINESE = r"\u3400-\u9fff"


_SPELLINGS = {
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "°": r"^\circ ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "²": "^2", "³": "^3", "≈": r"\approx ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "–": "-",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "“": '"', "”": '"',
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "μ": r"\mu ", "Ω": r"\Omega ", "θ": r"\theta ",
}  # fmt: skip
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
        (r"\\frac\s*(\\(?!sqrt)[a-z]+|[0-9A-Za-z]|\\sqrt\{[^{}]*\})\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\\sqrt\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (
            r"\\frac\s*(\\(?!sqrt)[a-z]+|[0-9A-Za-z])\s*(\\[a-z]+(?!\s*\{)|[0-9A-Za-z])",
            r"\\frac{\1}{\2}",
        ),
        (r"\\frac(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
        (
            r"\\h?phantom\s*\{[^{}]*\}|\\(?:tag|hspace)\s*\{[^{}]*\}|\\(?:small|checkmark)(?![A-Za-z])",
            " ",
        ),
        (r"\\\\\[[0-9.]*[a-z]*\]", r"\\\\"),
        (r"百分之\s*([0-9.]+)", r"\1%"),
        (r"(?<![0-9.,/])([0-9]+) ([0-9]{1,2})/([0-9]{1,4})(?![0-9/])", r"\1\\frac{\2}{\3}"),
        (r"(?i)\"?\b(?:minus|negative)\"?\s*(?=[0-9\\])", "-"),
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
    r"""Spells out a `\text`: letters, digits and connectives as they are, words in quotes."""
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
