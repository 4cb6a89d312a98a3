"""Prints a recomputed step: what agrees, a table of completions by share, and single completions.

Takes the plain values that `grpo replay --json` writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_cli.reporting.trajectories import printable

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 18, 34  # of a cell in the table
ROOMY_WIDTH = 100  # of a terminal, from which columns stand three characters apart
STYLES = {"clipped": "reverse", "left out": "dim", "masked": "dim italic"}
SIGNS = {"clipped": "c", "left out": "o", "masked": "m", "trains": ""}


def print_checks(console: Console, data: Mapping[str, Any]) -> None:
    """Prints whether loss and gradient norm are the recorded ones."""
    for check in data["checks"]:
        said = "equals" if check["agrees"] else "DIFFERS from"
        line = f"{check['name']}: {_shown(check['recomputed'], '.9g')} {said} the recorded"
        line += f" {_shown(check['recorded'], '.9g')}"
        if None not in (check["recomputed"], check["recorded"]):
            line += f" (apart by {abs(check['recomputed'] - check['recorded']):.1e})"
        console.print(Text(line, style="" if check["agrees"] else "bold red"), soft_wrap=True)
    if not data["checks"]:
        console.print("nothing in this step had a gradient", markup=False)


def print_table(console: Console, data: Mapping[str, Any], iteration: int) -> None:
    """Prints the completions of each optimizer step of an iteration, by their share."""
    for update in data["updates"]:
        if update["iteration"] != iteration:
            continue
        several = len(data["updates"]) > 1
        console.print(_table(update, several, console.width))
        console.print(Text(_sums(update)), soft_wrap=True)


def _table(update: Mapping[str, Any], several: bool, width: int) -> Table:
    """Returns the table. In a narrow terminal completions are cut, and numbers never are."""
    has_kl = any(c.get("kl") is not None for c in update["completions"])
    title = f"update {update['update']}" if several else None
    padding = (0, 1 if width >= ROOMY_WIDTH else 0)
    table = Table(title=title, pad_edge=False, padding=padding, box=SIMPLE)
    for name in ("share", "row", "sample", "reward", "advantage", "ratio", "clip", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_kl:
        table.add_column("KL", justify="right", no_wrap=True)
    table.add_column("completion", overflow="ellipsis")  # the one that may be made narrower
    for c in sorted(update["completions"], key=lambda c: -_number(c["share"])):
        ratio = "" if "ratio" not in c else f"{c['ratio']['mean']:.3f}"
        clipped = f"{c['clipped']}" if c.get("clipped") else ""
        cells = [
            _percent(c["share"]),
            str(c["row"]),
            str(c["sample"]),
            _shown(c["reward"]),
            f"{c['advantage']:.3g}",
            ratio,
            clipped,
            str(c["loss_tokens"]),
        ]
        cells += [_shown(c.get("kl"), ".2e")] if has_kl else []
        text = _cut(c["completion"], COMPLETION_CHARACTERS)
        table.add_row(*cells, Text(text, no_wrap=True, overflow="ellipsis"))
    return table


def _sums(update: Mapping[str, Any]) -> str:
    if update["difference"] is None:
        return "the gradient of this update is 0"
    others = update["share_of_others"]
    of_others = f"; the completions not listed have {_percent(others)}" if others else ""
    return (
        f"the shares sum to {update['share_sum']:.6f}{of_others}; gradient norm "
        f"{_shown(update['grad_norm'])}, the sum of the parts is {update['difference']:.1e} of it "
        "apart"
    )


def print_completion(
    console: Console, data: Mapping[str, Any], found: Mapping[str, Any], update: Mapping[str, Any]
) -> None:
    """Prints one completion: how its advantage came about, and its tokens."""
    console.print(Rule(f"row {found['row']}, sample {found['sample']}", align="left"))
    console.print(Text("prompt: ", style="bold").append(printable(found["prompt"]), style="dim"))
    if "token_values" in found:
        console.print(_marked(found))
    for line in _lines(data, found, update):
        console.print(Text(printable(line)), soft_wrap=True)
    if "token_values" in found:
        console.print(_tokens(found))


def _marked(found: Mapping[str, Any]) -> Text:
    """Returns the completion with clipped tokens marked, and masked ones dimmed."""
    text = Text("completion: ", style="bold")
    for token in found["token_values"]:
        text.append(printable(token["token"]), style=STYLES.get(token["mark"], "not bold"))
    return text


def _lines(
    data: Mapping[str, Any], found: Mapping[str, Any], update: Mapping[str, Any]
) -> Iterator[str]:
    """Yields reward, advantage, ratio, KL, weight and share in sentences."""
    parts = ", ".join(f"{n} {_shown(value)}" for n, value in found["reward_parts"].items())
    yield f"reward {_shown(found['reward'])} (parts: {parts}); ended: {found['finish_reason']}"
    if found["outcome_reward"] is not None and found["outcome_reward"] != found["reward"]:
        yield f"  the advantage rule is given {found['outcome_reward']:.6g}"
    group = ", ".join(f"{reward:.4g}" for reward in found["group_rewards"])
    if found["baseline"] is None:
        yield f"advantage {found['advantage']:.4g}; rewards of the group: {group}"
    else:
        yield (
            f"advantage {found['advantage']:.4g} = ({_shown(found['outcome_reward'])} - baseline "
            f"{found['baseline']:.4g}) / {found['divisor']:.4g}; rewards of the group: {group}"
        )
    if found["token_advantages"] is not None:
        low, high = min(found["token_advantages"]), max(found["token_advantages"])
        yield f"  of its tokens {low:.4g} to {high:.4g}, since steps or turns were rewarded"
    if "ratio" not in found:
        why = "mask_truncated excludes it" if found["excluded"] else "no reward applies to it"
        yield f"nothing in it trains: {why}"
        return
    ratio = found["ratio"]
    yield (
        f"ratio {ratio['mean']:.6g} in the mean, {ratio['min']:.6g} to {ratio['max']:.6g}; of "
        f"{found['tokens']} tokens {found['clipped']} clipped, {found['left_out']} left out, "
        f"{found['masked']} masked"
    )
    if found["kl"] is not None:
        yield f"KL to the reference {found['kl']:.4g} nats a token"
    yield f"weight of each token in the loss {found['weight']:.4g}"
    yield (
        f"share of the gradient {_percent(found['share'])}; its own norm is "
        f"{_shown(found['norm'])}, that of the gradient {_shown(update['grad_norm'])}"
    )


def _tokens(found: Mapping[str, Any]) -> Table:
    """Returns the tokens of a completion, one a line."""
    has_kl = any(token["kl"] is not None for token in found["token_values"])
    table = Table(pad_edge=False, box=SIMPLE)
    for name in ("#", "token", "logprob", "old", "ratio", "advantage"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    if has_kl:
        table.add_column("KL", justify="right", no_wrap=True)
    table.add_column("pull", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for number, token in enumerate(found["token_values"]):
        cells = [
            Text(str(number)),
            Text(repr(printable(token["token"]))[1:-1]),
            Text(f"{token['logprob']:.4f}"),
            Text(f"{token['old_logprob']:.4f}"),
            Text(f"{token['ratio']:.4f}"),
            Text(f"{token['advantage']:.3g}"),
        ]
        cells += [Text(_shown(token["kl"], ".2e"))] if has_kl else []
        cells += [Text(f"{token['pull']:+.2e}"), Text(SIGNS[token["mark"]])]
        table.add_row(*cells, style=STYLES.get(token["mark"], ""))
    return table


def legend(data: Mapping[str, Any]) -> Sequence[str]:
    """Returns the lines that explain what the tables show."""
    return (
        "share: <g_i, g> / |g|^2 of the completion's gradient g_i in the gradient g of the update; "
        "negative: it pulls against the others",
        "pull: -d loss / d logprob; above 0 the token becomes likelier; c: clipped, o: left out by "
        "loss.top_entropy, m: masked",
    )


def _number(value: float | None) -> float:
    return -math.inf if value is None else value


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _shown(value: float | None, form: str = ".4g") -> str:
    return "none" if value is None else f"{value:{form}}"


def _cut(text: str, most: int) -> str:
    """Returns a text in one line, with its end cut off if it is long."""
    line = " ".join(printable(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
