"""What people type: options as words, a recipe's file as it is, text as it stands."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo_cli.config.command_line import as_text, as_words


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--steps 5 --optimizer.learning-rate=1e-4", "steps=5 optimizer.learning_rate=1e-4"),
        ("--overwrite --model.path ~/m -m", "overwrite=true model.path=~/m -m"),
        ("--overwrite False --steps 2", "overwrite=False steps=2"),
        ("--overwrite false --trust RUN", "overwrite=false trust=true RUN"),
        ("my.yaml --config other.yml", "recipe=my.yaml recipe=other.yml"),
        ("--cfg job -p loss --json", "--cfg job -p loss --json"),
        ("RUN dataset.eval=a.yaml", "RUN dataset.eval=a.yaml"),
    ],
)
def test_options_and_files_are_words(typed: str, words: str) -> None:
    assert as_words(typed.split()) == words.split()


AS_IT_STANDS = [
    "~/x", "{question}\nDo it.", "x=y", "größer", "[a]", "a,b", "1e-4", "it's", "it\\'s", "C:\\x\\",
    "(x)", "x#y", "\\boxed{}", "",
]  # fmt: skip


@pytest.mark.parametrize("text", AS_IT_STANDS)
def test_text_is_taken_as_it_stands(text: str) -> None:
    for key in ("dataset.prompt", "+reward.mine.function", "dataset.columns.answer"):
        override = OverridesParser.create().parse_override(as_text(f"{key}={text}"))
        assert getattr(override.value(), "text", override.value()) == text


@pytest.mark.parametrize("word", ["steps=3", "dataset.system=null", "dataset.prompt='a'"])
def test_other_values_are_hydras(word: str) -> None:
    assert as_text(word) == word
