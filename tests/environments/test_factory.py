"""Tests how rows choose their environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.environments.factory import known_name, tools_of
from grpo_cli.errors import UserError


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


def test_a_row_is_named_where_its_number_is_known() -> None:
    sessions: Any = SimpleNamespace(spec=SimpleNamespace(names=["maze", "words"]))
    with pytest.raises(UserError, match=r"row 3: the column .* names no environment: None"):
        known_name({}, sessions, "row 3: ")
