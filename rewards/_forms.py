r"""Distinguishes a computed answer from one whose evaluation is the exercise.

`\gcd(12,18)` equals 6, and leaves the work to the reader. The texts are the `text` of a `Value`.
"""

import re

from grpo_cli.rewards._answer import NUMBER

# Operators by family. A family that the gold answer lacks is one to be worked out.
_FAMILIES = {
    name: re.compile(pattern)
    for name, pattern in {
        "divisors": r"\\?(?<![A-Za-z])(?:gcd|lcm|hcf)(?![A-Za-z])",
        "counting": r"\\(?:[dt]?binom|choose)(?![A-Za-z])|!",
        "calculus": r"\\(?:i{1,3}nt|oint|sum|prod|lim)(?![A-Za-z])|\\frac\{d[^{}]*\}\{d[a-z]",
        "functions": r"\\(?:max|min|sup|det|deg|dim|arg|operatorname)(?![A-Za-z])",
        "trigonometry": r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])",
        "logarithms": r"(?<![A-Za-z])(?:log|ln|lg|exp)(?![A-Za-z])",
        "rounding": r"\\[lr](?:floor|ceil)(?![A-Za-z])|[⌊⌈]",
        "absolute": r"\||\\[lr]?vert(?![A-Za-z])",
        "modulus": r"\\b?mod(?![A-Za-z])",
        "root": r"\\sqrt",
        "power": r"\^|\*\*",
        "division": r"/|[0-9]\s*:\s*[0-9]|\\frac|\\div(?![A-Za-z])|\\over(?![A-Za-z])",
        "product": r"\\cdot|\\times|\*|[0-9)]\s*(?:\\left)?\(|\)\s*[0-9]",
        "sum": r"(?<=[0-9A-Za-z)}])\s*[-+]",
    }.items()
}
# An operation on two whole numbers, which is left to be done where the gold answer has none.
_WHOLE_NUMBERS = {
    "product": re.compile(
        r"(?<![0-9.^_{])[0-9]+\s*(?:\\cdot|\\times|\*)\s*[0-9]+(?![0-9.^])|[0-9]\)\s*\(?[0-9]"
    ),
    "sum": re.compile(r"(?<![0-9A-Za-z.^_}])[0-9]+\s*[-+]\s*[0-9]+(?![0-9.^A-Za-z\\!(])"),
}
_UNSEEN = re.compile(r"\^\s*\{?\s*(?:\\circ|\\prime)\s*\}?|_\{?[0-9]+\}?")
_NUMBERS = re.compile(r"[0-9]+(?:[.,][0-9]+)*(?:e[+-]?[0-9]+)?|\.[0-9]+")
_SCIENTIFIC = re.compile(r"([0-9])(?:\\times|\\cdot)\s*10\^(?:\{([+-]?[0-9]+)\}|([+-]?[0-9]))")
_LETTER = re.compile(
    r"\\(?:pi|theta|phi|alpha|beta|gamma|lambda|omega|varphi)|(?<![A-Za-z\\])[A-Za-z]"
)


def is_worked_out(gold: str, stated: str) -> bool:
    """Returns whether a stated value leaves no operation to be done that the gold value lacks."""
    wanted, given = (
        _SCIENTIFIC.sub(lambda n: f"{n[1]}e{n[2] or n[3]}", _UNSEEN.sub("", text)).strip()
        for text in (gold, stated)
    )
    needed = _families(wanted)
    if NUMBER.fullmatch(wanted):
        allowed = {"division"} if "." in wanted or "e-" in wanted else set()
    elif needed - {"division"} or _LETTER.search(wanted):
        allowed = needed | {"root", "power", "division", "product", "sum"}
    else:
        allowed = needed | ({"division"} if re.search(r"\.[0-9]", wanted) else set())
    if _families(given) - allowed:
        return False
    if any(name not in needed and at.search(given) for name, at in _WHOLE_NUMBERS.items()):
        return False
    if not NUMBER.fullmatch(wanted):
        return True
    # One number: a single one, or a fraction or mixed number in place of a decimal.
    most = 3 if "division" in _families(given) else 1
    return len(_NUMBERS.findall(given)) <= most and given.count("-") <= 1


def _families(text: str) -> set[str]:
    if NUMBER.fullmatch(text):
        return set()
    return {name for name, pattern in _FAMILIES.items() if pattern.search(text)}
