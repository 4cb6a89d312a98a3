"""Measures the `math` reward on published data, and feeds it text that nobody should write.

python scripts/check_math.py ../shared/data --fuzz 100000 --seed 0

Gold solutions of GSM8K and MATH, and answers in the endings that models write, are held against
their own answer and against that of another row; surprises are printed. Fuzz is random, truncated,
nested and huge text: crashes are printed, and the time that a call takes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_cli.scoring.guards import CallResult  # noqa: E402
from grpo_cli.scoring.pool import Call, Pool  # noqa: E402

MATH = "grpo_cli.rewards.math:math"
DEADLINE_S = 5
WORKERS = 2
CHUNK = 1000
PRINTED = 20  # of each kind of surprise
SETS = {
    "GSM8K": ("gsm8k/train.jsonl.gz", "gsm8k/test.jsonl"),
    "MATH": ("math/train.jsonl.gz", "math/test_without_heldout.jsonl.gz"),
    "CMATH": ("cmath/dev.jsonl", "cmath/test.jsonl", "cmath/distractor.jsonl"),
    "MGSM-zh": ("mgsm_zh/test.jsonl",),
}
ENGLISH = (
    r"\boxed{%s}",
    "<think>\nSome 3 + 4 = 7.\n</think>\n<answer>%s</answer>",
    "<answer>\n$%s$\n</answer>",
    "It is 3 + 4 = 7.\n#### %s",
    "The answer is $%s$.",
    "Step 3: we add 12.\n\n**Final Answer:** $%s$",
    "Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct.",
    "### Answer\n\n\\[\n%s\n\\]\n",
)
CHINESE = (
    "3+4=7，所以答案是%s。",
    "答：%s。",
    "最终答案：%s",
    "第1步，3+4=7。因此，最终答案为 $%s$。",
    "3+4=7（个）\n答：一共有%s个苹果。",
    "答案：%s元，因为3+4=7。",
    "**答案：** %s 千克",
    "所以小明一共走了%s千米。",
    "因此，答案为 $\\boxed{%s}$。",
    "<answer>%s</answer>",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with gsm8k/, math/, cmath/ and mgsm_zh/")
    parser.add_argument("--fuzz", type=int, default=100_000, help="texts to generate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pool = Pool(WORKERS, preload=["grpo_cli.rewards.math", "math_verify"])
    rows = {name: read(args.data, files) for name, files in SETS.items()}
    for name in ("GSM8K", "MATH"):
        solutions, answers = ([row[key] for row in rows[name]] for key in ("solution", "answer"))
        check(f"{name}, gold solutions", solutions, answers, pool)
    for name in SETS:
        answers = [row["answer"] for row in rows[name][:: 5 if name == "MATH" else 1]]
        for ending in ENGLISH if name in ("GSM8K", "MATH") else CHINESE:
            check(f"{name}, {ending!r}", [ending.replace("%s", a) for a in answers], answers, pool)
    fuzz(args.fuzz, args.seed, [row for name in ("GSM8K", "MATH") for row in rows[name]], pool)
    pool.close()


def read(folder: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for file in files:
        opened = gzip.open if file.endswith(".gz") else open
        with opened(folder / file, "rt", encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    return rows


def verdicts(pairs: Sequence[tuple[str, str]], pool: Pool) -> list[CallResult]:
    """The reward as a run calls it, on (completion, gold): in killable workers, by one deadline."""
    columns = ({"completions": [text], "answer": [gold]} for text, gold in pairs)
    return [f.result() for f in [pool.submit(Call(MATH, c, DEADLINE_S)) for c in columns]]


def value_of(done: CallResult) -> float | None:
    assert done.error is None or done.timed_out, done.error
    return None if done.timed_out else float(done.values[0])


def check(title: str, completions: Sequence[str], answers: Sequence[str], pool: Pool) -> None:
    """Holds each completion against the answer of its own row, and against that of the next."""
    began = time.monotonic()
    own = list(zip(completions, answers, strict=True))
    shifted = zip(completions, [*answers[1:], *answers[:1]], answers, strict=True)
    other = [(text, gold) for text, gold, right in shifted if gold.strip() != right.strip()]
    said, surprises = [f"{title}: {len(own) - len(other)} of the same text left out"], []
    for name, wanted, pairs in (("own answer", 1.0, own), ("another row's", 0.0, other)):
        values = [value_of(done) for done in verdicts(pairs, pool)]
        right, share = values.count(1.0), 100 * values.count(1.0) / max(len(pairs), 1)
        said.append(f"{name} {right}/{len(pairs)} right ({share:.3f} %)")
        said.append(f"{values.count(None)} over {DEADLINE_S} s")
        for (text, gold), value in zip(pairs, values, strict=True):
            if value != wanted:
                surprises.append(f"{name} {value} {text[-60:]!r} gold {gold!r}")
    print(", ".join([*said, f"{time.monotonic() - began:.0f} s"]))
    more = [f"and {len(surprises) - PRINTED} more"] if len(surprises) > PRINTED else []
    print(*(f"    {line}" for line in surprises[:PRINTED] + more), sep="\n", flush=True)


GOLDS = ("6", "1,080", r"\frac{3}{4}", "x=5", r"x \in [-2,7]", r"\text{Evelyn}", r"\sqrt{2}", "18%")
PIECES = (
    *"0123456789+-*/^_=<>()[]{}|!,.;:%$\\ &~#'\"", "\n", *"xyzaei", "**", r"\frac", r"\frac{",
    r"\sqrt{", "}{", r"\left(", r"\right)", r"\boxed{", "<answer>", "</answer>", "#### ",
    "The answer is ", "答案是", "答：", "Answer: ", r"\pi", r"\infty", r"\text{", r"\cup", r"\in",
    r"\pm", r"\le", r"\cdot", r"\times", "^{", "_{", r"\{", r"\}", r"\%", r"\$", "$$", r"\[",
    r"\]", r"\(", r"\)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\binom{", r"\log_",
    r"\sin", r"\sum_{", r"\int_", r"\lim_{", "1,000", "0.5", "999999", " cm", " dollars", "元",
    "万", "，", "。", "½", "√", "π", "≤", "∞", "\u200f", "\x00", "and", " or ", "1e9", "i",
)  # fmt: skip
NESTED = (
    "{ }", "( )", r"\frac{1}{ }", r"\sqrt{ }", r"\left( \right)", "x^{ }", "[ ]", r"\{ \}", "| |",
    "9^{ }", r"\text{ }", r"\boxed{ }", "<answer> </answer>", r"\sin( )", "(1, )", "-( )",
)  # fmt: skip
FORMS = (
    "%s", "-%s", "%s.%s", "1e%s", "%s!", "2^%s", "2^{%s}", "%s^{%s}", "x^{%s}", r"\frac{%s}{%s}",
    r"\sqrt{%s}", r"\sqrt[%s]{2}", r"\binom{%s}{7}", "%s,%s", "%s%%", "%s**%s", r"\log_{%s}{%s}",
    "(%s!)!", "%s元", "%s万", r"\sin(%s)", "%s:%s", "0.%s", "1/%s", r"10^{-%s}", "%s_{7}",
)  # fmt: skip


def fuzz(count: int, seed: int, rows: list[dict[str, Any]], pool: Pool) -> None:
    """Scores random texts; prints the verdicts, the seconds and the crashes."""
    rng = random.Random(seed)
    solutions = [row["solution"] for row in rows]
    values, seconds = Counter[str](), []
    for start in range(0, count, CHUNK):
        indices = range(start, min(start + CHUNK, count))
        asked = [(fuzz_text(i, rng, solutions), rng.choice(GOLDS)) for i in indices]
        for (text, gold), done in zip(asked, verdicts(asked, pool), strict=True):
            seconds.append(done.seconds)
            if done.error is not None and not done.timed_out:
                values["crash"] += 1
                print(f"    crash: {text[:200]!r} gold {gold!r}: {done.error}")
            else:
                values[str(value_of(done))] += 1
    seconds.sort()
    quantiles = {q: round(seconds[min(int(q * count), count - 1)], 4) for q in (0.5, 0.99, 1.0)}
    print(f"fuzz, {count} texts, seed {seed}: {dict(values)}; seconds by quantile: {quantiles}")


def fuzz_text(index: int, rng: random.Random, solutions: Sequence[str]) -> str:
    """Returns a text of one of five kinds in turn, often within the marks of an answer."""
    kind = index % 5
    if kind == 0:
        ends = (128, 0x3000, 0x110000)
        text = "".join(chr(rng.randrange(rng.choice(ends))) for _ in range(rng.randrange(200)))
    elif kind == 1:
        text = "".join(rng.choices(PIECES, k=rng.choice((3, 8, 20, 60, 300))))
    elif kind == 2:  # truncated
        solution = rng.choice(solutions)
        start = rng.randrange(len(solution))
        text = solution[start : start + rng.randrange(1, 600)]
    elif kind == 3:  # nested
        opening, _, closing = rng.choice(NESTED).partition(" ")
        depth = rng.choice((3, 6, 9, 12, 50, 500, 5000))
        inner = rng.choice(("1", "x", "", "1,2"))
        text = opening * depth + inner + closing * rng.choice((depth, depth - 1, 0))
    else:  # huge
        number = "".join(rng.choices("0123456789", k=rng.choice((5, 20, 300, 5000, 100_000))))
        text = rng.choice(FORMS).replace("%s", number)
    marks = ("%s", "%s", r"\boxed{%s}", "$%s$", "<answer>%s</answer>", "The answer is %s", "答：%s")
    return rng.choice(marks).replace("%s", text)


if __name__ == "__main__":
    main()
