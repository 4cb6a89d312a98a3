"""Tests how rows choose their environments, and kinds of rollouts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import prompt_text
from grpo_cli.data.rows import Rows, load_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.environments.factory import first_rows, kind_of, open_sessions, tools_of
from grpo_cli.environments.rollouter import Rollouter, Sampled
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.errors import UserError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Generation, Vllm
from grpo_cli.records import Completion, Prompt
from tests.data.test_files import write


def test_a_row_of_a_stream_that_names_no_environment_is_a_mistake_in_the_data() -> None:
    """Only the first rows of a stream are known before the run; the others come in blocks."""
    sessions: Any = SimpleNamespace(
        spec=SimpleNamespace(names=["maze", "words"]), schemas=lambda name: [{"of": name}]
    )
    tools = tools_of(sessions)
    assert tools is not None
    assert list(tools({"environment": "words"})) == [{"of": "words"}]
    with pytest.raises(UserError, match=r"'environment' names no environment: 'word'; .*words"):
        tools({"environment": "word"})


def test_only_the_first_row_of_each_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ({"question": str(n), "environment": "ab"[n % 2]} for n in range(9))
    path = write(tmp_path / "rows.jsonl", *lines)
    config = Dataset(train=str(path), prompt="{question}?")
    rows, read = load_rows(config, "train"), list[int]()
    target, whole = "grpo_cli.environments.factory.prompt_text", prompt_text
    monkeypatch.setattr(target, lambda *args: read.append(args[2]) or whole(*args))
    sessions: Any = SimpleNamespace(spec=SimpleNamespace(names=["a", "b"]))
    parts = [
        (rows, config),
        (Rows("more", [], [{"question": "9", "environment": "b"}]), config),
    ]
    firsts = first_rows(sessions, parts)
    assert {name: row["prompt"] for name, row in firsts.items()} == {"a": "0?", "b": "1?"}
    assert read == [0, 1]
    with pytest.raises(UserError, match=r"more, row 0: the column .* names no environment: None"):
        first_rows(sessions, [(rows, config), (Rows("more", [], [{"question": "9"}]), config)])
    sessions.spec.names = [""]
    assert first_rows(sessions, parts)[""]["prompt"] == "0?"


def two_lists(prompts: Any, trainer: Any) -> Any: ...


class Longest(Rollouter):
    """Samples a completion more than the group has, and drops the shortest."""

    @contextmanager
    def sample(self, generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
        wanted = request.num_generations
        with super().sample(generator, replace(request, num_generations=wanted + 1)) as sampled:
            yield (
                (n, seen[:wanted], sorted(found, key=lambda c: -len(c.ids))[:wanted])
                for n, seen, found in sampled
            )


class Lengths(Generator):
    """Completion j of a group has j + 1 tokens."""

    def sample(self, request: Request) -> Any:
        for number in range(len(request.prompts)):
            ids = [[7] * (j + 1) for j in range(request.num_generations)]
            yield number, [Completion(i, [-1.0] * len(i), "stop") for i in ids]


def test_a_kind_of_rollout_of_ones_own() -> None:
    assert kind_of(Recipe(rollout=f"{__name__}:Longest")) is Longest
    request = Request([Prompt.from_ids([5])] * 2, 2, Sampling(4), [1, 2])
    with Longest().sample(Lengths(), request) as sampled:
        found = [([len(c.ids) for c in cs], len(seen)) for _, seen, cs in sampled]
    assert found == [([3, 2], 2)] * 2


@pytest.mark.parametrize("kind", ["two_lists", "Longest"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"episode": EpisodeSettings(max_turns=3)}, r"^episode\.max_turns = 3: is only read with"),
        ({"environment": EnvironmentSettings(workers=1)}, r"environment\.workers=null takes it"),
        ({"tools": {"add": "m:add"}}, "together with tools"),
    ],
)
def test_what_rollouts_without_environments_leave_unread_is_refused(
    kind: str, changes: dict[str, Any], problem: str
) -> None:
    assert open_sessions(Recipe(rollout=f"{__name__}:{kind}"), []) is None
    with pytest.raises(UserError, match=problem):
        open_sessions(Recipe(rollout=f"{__name__}:{kind}", **changes), [])


def test_what_a_rollout_function_in_trls_form_does_not_take() -> None:
    path = f"{__name__}:two_lists"
    assert kind_of(Recipe(rollout=path)) is TrlRollouts
    ahead = Generation(vllm=Vllm(prefetch_steps=1))
    with pytest.raises(UserError, match=r"weights .* are not known"):
        TrlRollouts.check(Recipe(rollout=path, generation=ahead))
    with pytest.raises(UserError, match="rollout = pathlib:Path: is a class"):
        TrlRollouts.check(Recipe(rollout="pathlib:Path"))
