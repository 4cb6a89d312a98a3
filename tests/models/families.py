"""The table of model families: how each is computed, and the settings of a tiny model of it.

A line of `families.jsonl` has the fields of `Family` that differ from their defaults.

`test_architectures.py` checks every line with a random model, so that a fast mode that is lost
without a word (with a new transformers, say) shows. `scripts/make_docs.py` prints it as
docs/models.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_cli.models.policy_logprobs import ForwardMode
from tests.tables import rows_of


@dataclass(frozen=True)
class Family:
    """A model type, and what is expected of it."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)  # in its config, beside the shared ones
    without: Sequence[str] = ()  # shared settings that it does not have
    decoder: Literal["engine", "cache", "none"] = "engine"  # engine.py; its cache; refused
    packed: bool = True
    chunked: bool = True
    why: str = ""  # what the note says where it is not the engine and packed rows
    why_no_cache: str = ""
    recurrent: bool = False
    balanced: bool = False  # transformers has a load-balancing loss for its experts
    vllm: bool = True  # in the list of models of vLLM's repository (read, not run)
    name: str = ""  # if the model type alone does not say it

    @property
    def mode(self) -> ForwardMode:
        return ForwardMode(self.packed, self.chunked)

    def __str__(self) -> str:
        return self.name or self.model_type


FAMILIES = [Family(**row) for row in rows_of("models/families.jsonl")]
BY_NAME = {str(family): family for family in FAMILIES}
