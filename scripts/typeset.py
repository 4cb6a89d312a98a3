"""Hook of mkdocs: turns the formulas of a page into MathML, which browsers typeset."""

import re
from html import unescape

from latex2mathml.converter import convert

# As pymdownx.arithmatex writes them.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    modes = {"span": "inline", "div": "block"}
    return FORMULA.sub(lambda m: str(convert(unescape(m[2]), display=modes[m[1]])), content)
