"""The names of other trainers: TRL's all have an answer, and an answer names what exists."""

import re
from pathlib import Path

import pytest

from grpo_cli.config import renamed
from grpo_cli.config.keys import KNOBS, entry_field
from grpo_cli.config.parsing import no_such_key

TRL = (Path(__file__).parent / "trl_names.txt").read_text("utf-8").split("\n")[1:-1]
GROUPS = Path(renamed.__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", [name for name in TRL if name not in KNOBS])
def test_every_name_of_trl_has_an_answer(name: str) -> None:
    assert re.search("It is called .+ here|It has no counterpart here: .+", no_such_key(name))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("vespo_k_neg", "It is called loss.args.vespo_k_neg here."),
        ("loss.cov_low", "It is called loss.args.cov_low here."),
        ("max_prompt_length", "max_prompt_tokens here: longer prompts are dropped, not cut."),
        ("pad_to_multiple_of", "It has no counterpart here: rows are packed, not padded."),
    ],
)
def test_the_answer_is_one_sentence(name: str, answer: str) -> None:
    assert no_such_key(name).removeprefix(f"{name}: ").endswith(answer)


def test_answers_name_knobs_and_choices_that_exist() -> None:
    free = re.compile(r"((loss|advantage|adapter|optimizer)\.args|generation\.vllm\.engine_args)\.")
    for name, row in renamed.other_names().items():
        for words in re.findall("`([^`]+)`", row.here.format(name=name)):
            key, _, value = words.partition("=")
            if words.startswith("grpo ") or free.match(words):
                continue
            assert key in KNOBS or entry_field(key), f"{name}: {words}"
            choice = GROUPS / key / f"{value}.yaml"
            if value and value.islower() and choice.parent.is_dir():
                assert choice.exists(), f"{name}: {words}"
