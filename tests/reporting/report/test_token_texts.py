"""Token texts come from the run's own tokenizer."""

from pathlib import Path

from grpo_cli.reporting.report.token_texts import candidates, load, texts_of
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import write_run


def test_texts_of_bytes(tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path, stored=()))
    assert texts_of(load(run), [97, 32, 10, 0xE2, -1]) == ["a", " ", "\n", "\ufffd", "\ufffd"]


def test_the_newest_checkpoint_comes_first(tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path, stored=()))
    (tmp_path / "checkpoints" / "step-4").mkdir()
    places = [str(p.relative_to(tmp_path)) for p in candidates(run)[:3]]
    assert places[0] == "checkpoints/step-10/tokenizer.json"
    assert places[1] == "checkpoints/step-10/training/model/tokenizer.json"
    assert places[2] == "checkpoints/step-4/tokenizer.json"
