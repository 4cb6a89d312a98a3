"""`grpo plan` from the command line: listed GPUs and this machine."""

import json
from pathlib import Path

from tests.conftest import Grpo
from tests.planning.test_plan import SEVEN_B


def test_a_listed_gpu(grpo: Grpo) -> None:
    code, out, err = grpo("plan", "gpu=h100-80gb")
    assert (code, err) == (0, "")
    assert out.startswith("arithmetic_tiny: 1.02 M parameters on h100-80gb")
    assert "prompts of 6 tokens x 4 completions of up to" in out, "tokens of the shipped rows"


def test_a_folder_with_a_config_only(grpo: Grpo, tmp_path: Path) -> None:
    folder = tmp_path / "seven"
    SEVEN_B.save_pretrained(folder)
    words = (f"model.path={folder}", "recipe=math_qwen", "gpu=l4", "prompt_tokens=100", "--json")
    code, out, err = grpo("plan", *words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert not found["fits"]
    assert found["parameters"] == 7615616512
    assert found["prompt_tokens"] == 100
    first = found["changes"][0]
    assert first["fits"]
    assert "adapter=" in first["set"]
    assert first["peak"] < found["peak"]


def test_epochs_count_the_rows_of_each_part_of_a_mixture(grpo: Grpo) -> None:
    words = ["plan", "--json", "epochs=1", "prompts_per_step=1400", "checkpoint.every=1"]
    rows = "pkg://grpo_cli/samples/arithmetic_train.jsonl"
    words += ["dataset.train=null", *(f"dataset.mixture.{part}.data={rows}" for part in "ab")]
    one, both = (json.loads(grpo(*some)[1]) for some in (words[:-1], words))
    assert both["checkpoint_bytes"] == 2 * one["checkpoint_bytes"]
