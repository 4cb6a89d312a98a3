"""The command line: every mistake is one message with exit code 2, before torch's models load."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from grpo_cli import cli
from grpo_cli.config.command_line import recipe_files
from grpo_cli.config.knob import value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.training import prepare
from tests import programs
from tests.conftest import Grpo
from tests.data.test_files import write
from tests.programs import PATIENCE
from tests.tables import rows_of

ENVIRONMENT = programs.environment()


def test_threads_sleep_soon_where_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "RUNNING", tmp_path / "loadavg")
    assert cli.spin_count() == cli.SPINS_SHARED, "no such file"
    for running, expected in (("1/345", cli.SPINS_ALONE), ("2/345", cli.SPINS_SHARED)):
        (tmp_path / "loadavg").write_text(f"0.10 0.20 0.30 {running} 678")
        assert cli.spin_count() == expected
    (tmp_path / "loadavg").write_text("")
    assert cli.spin_count() == cli.SPINS_SHARED


# The default recipe, small enough to run within a test.
TINY = [
    "recipe=arithmetic_tiny",
    "model.build.hidden_size=32",
    "model.build.warmup_steps=5",
    "prompts_per_step=4",
    "eval.every=0",
    "eval.at_start=false",
    "dataset.eval_limit=8",
]

ROWS: list[dict[str, Any]] = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", *ROWS)


HEAD = "defaults: [arithmetic_tiny, _self_]\n"


@pytest.mark.parametrize("row", rows_of("cli_mistakes.jsonl"), ids=lambda row: row["name"])
def test_a_mistake_is_one_message(row: dict[str, Any], grpo: Grpo, tmp_path: Path) -> None:
    """A text in place of the words of `grpo train` is a command of its own."""
    write(tmp_path / "plain.jsonl", {"question": "1+1="})
    write(tmp_path / "null.jsonl", ROWS[0], {**ROWS[1], "question": None})
    (tmp_path / "twice.yaml").write_text(f"{HEAD}steps: 3\nsteps: 4\n")
    (tmp_path / "number.yaml").write_text(f"{HEAD}optimizer: 3\n")
    (tmp_path / "choice.yaml").write_text("defaults: [schema, _self_]\nreward: [math, length]\n")
    (tmp_path / "hub.yaml").write_text(f"{HEAD}model: me/my-model\n")
    (tmp_path / "bare.yaml").write_text("steps: 3\n")
    (tmp_path / "misspelt.yaml").write_text(f"{HEAD}stepz: 3\n")
    (tmp_path / "class.yaml").write_text(HEAD + "hydra: {sweeper: {_target_: subprocess.Popen}}")
    (tmp_path / "gsm8k_tiny.yaml").write_text("defaults: [gsm8k_tiny, _self_]\n")
    (tmp_path / "a.yaml").write_text("defaults: [b, _self_]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a, _self_]\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("defaults: [schema, _self_]\n")
    arguments, expected = row["words"], row["said"]
    if isinstance(arguments, str):
        argv = arguments.split()
    else:
        own = [a for a in arguments if a.startswith(("dataset.train=", "dataset.eval="))]
        data = own or ["dataset.train=rows.jsonl"]
        argv = ["train", "dataset.eval=rows.jsonl", *data]
        argv += [a for a in arguments if a not in own]
    code, _, err = grpo(*argv)
    assert code == 2, err
    for part in expected:
        assert part in err
    assert err.startswith("grpo: ")
    assert err.count("\n") == 1, "one mistake, one line"
    assert "_defaults" not in err
    assert not (tmp_path / "outputs").exists(), "a refused run leaves nothing behind"


def test_a_sweep_names_its_jobs_and_leaves_no_file_of_hydra(grpo: Grpo, tmp_path: Path) -> None:
    none = "~/größe=1.jsonl"  # text that Hydra's grammar lacks
    code, out, _ = grpo("train", "-m", "seed=4,5", "steps=3", "--dataset.train", none)
    assert code == 2
    assert re.fullmatch(r"\njob 0: .* seed=4 .*\n", out), out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_eval_reads_knobs_of_a_loaded_model(
    grpo: Grpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe builds its model; what is evaluated is loaded, and may need these."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("")
    seen: list[Recipe] = []

    def stop(recipe: Recipe) -> None:
        seen.append(recipe)
        raise UserError("seen")

    monkeypatch.setattr(prepare, "for_evaluation", stop)
    words = ["model.trust_remote_code=true", "model.dropout=null", "dataset.chat=false"]
    assert grpo("eval", "m", "recipe=arithmetic_tiny", *words)[2] == "grpo: seen\n"
    model = seen[0].model
    assert (model.path, model.build) == (str((tmp_path / "m").resolve()), None)
    assert (model.trust_remote_code, model.dropout) == (True, None)


@pytest.mark.smoke
def test_a_mistake_ends_in_under_five_seconds_without_transformers(tmp_path: Path) -> None:
    """In a process of its own: the models' code is not even imported. (No timing: see bench.)"""
    program = (
        "import sys; from grpo_cli import cli; cli.run_command(['train', 'stpes=3']); "
        "print('torch' in sys.modules or 'transformers' in sys.modules); "
        "code = cli.run_command(['train', 'recipe=arithmetic_tiny', 'dataset.train=none.jsonl']); "
        "heavy = ('transformers.models', 'grpo_cli.models.loading'); "
        "print(code, *(m in sys.modules for m in heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.stdout.split() == ["False", "2", "False", "False"], done.stdout + done.stderr


def test_cfg_prints_the_composed_recipe_and_runs_nothing(grpo: Grpo, tmp_path: Path) -> None:
    code, out, _ = grpo("train", "recipe=math_qwen", "--cfg", "job", "steps=7")
    assert code == 0
    assert "recipe: math_qwen" in out
    assert "steps: 7" in out
    assert "path: Qwen/Qwen2.5-Math-1.5B" in out
    _, out, _ = grpo("train", "--cfg", "job", "-p", "loss", "loss=gspo")
    assert "policy: clipped\n" in out
    assert "epsilon: 0.0003\n" in out
    assert not (tmp_path / "outputs").exists()


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (recipe_files()[0].parent / group).glob("*.yaml"))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["help", "train"], "Override anything"),
        (["train", "--info", "defaults"], "loss/dapo"),
        (["train", "--hydra-help"], "--multirun"),
        (["--help"], "grpo train"),
        *((["help", "train"], f"\n{g}: {', '.join(choices(g))}\n") for g in ("loss", "advantage")),
    ],
)
def test_help_and_info(argv: list[str], expected: str, grpo: Grpo) -> None:
    code, out, err = grpo(*argv)
    assert code == 0, err
    assert expected in out


@pytest.mark.smoke
@pytest.mark.parametrize("command", [c for c in cli.COMMANDS if c != "export"])
def test_help_fits_a_screen(command: str, grpo: Grpo) -> None:
    code, out, _ = grpo(command, "--help")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert [line for line in lines if len(line) > 80] == []


def test_the_help_of_train_says_what_its_default_recipe_has(grpo: Grpo) -> None:
    _, out, _ = grpo("train", "recipe=chat", "--cfg", "job")
    composed, text = yaml.safe_load(out), cli.HELP["train"]
    for key, value in re.findall(r"^  ([a-z_.]+)=([0-9e-]+) ", text, re.MULTILINE):
        assert value_at(composed, key) == float(value)
    assert "loss=dapo" in text
    assert "generation.num_generations=8" in text


def test_recipes_and_rewards_are_listed(grpo: Grpo) -> None:
    _, recipes, _ = grpo("recipes")
    assert recipes.count("\n") == len(recipe_files())
    _, rewards, _ = grpo("rewards")
    for name in ("exact_match", "math", "boxed_format", "length"):
        assert name in rewards


def test_a_group_that_a_recipe_does_not_name_can_be_chosen(grpo: Grpo, tmp_path: Path) -> None:
    own = "model: {path: some/model}\nloss: {beta: 0.01}\nreward: {mine: {weight: 2}}\n"
    (tmp_path / "plain.yaml").write_text(f"defaults: [schema, _self_]\n{own}")
    words = ["loss=gspo", "adapter=lora", "reward=[math]", "tracking=tensorboard"]
    code, out, err = grpo("train", "plain.yaml", *words, "--cfg", "job")
    assert code == 0, err
    composed = yaml.safe_load(out)
    assert (composed["loss"]["ratio_level"], composed["loss"]["beta"]) == ("sequence", 0.01)
    assert (composed["adapter"]["method"], composed["model"]["path"]) == ("lora", "some/model")
    assert composed["tracking"]["backend"] == ["tensorboard"]
    assert composed["recipe"] == "plain"


def test_rows_of_ones_own_replace_those_of_the_recipe(grpo: Grpo, tmp_path: Path) -> None:
    words = ("recipe=gsm8k_qwen", "dataset.train=rows.jsonl", "dataset.eval_limit=5")
    code, out, err = grpo("train", *words, "--cfg", "job")
    assert code == 0, err
    dataset = yaml.safe_load(out)["dataset"]
    assert [dataset[key] for key in ("eval", "subset", "system", "eval_limit")] == [None] * 3 + [5]
    assert "leaves out dataset.eval, dataset.subset, dataset.system\n" in err
    renamed = ("recipe=math_qwen", "dataset.train=rows.jsonl", "--cfg", "job", "-p", "dataset")
    assert "columns: {}" in grpo("train", *renamed)[1]
    assert "answer: gold" in grpo("train", *renamed, "dataset.columns.answer=gold")[1]
    assert "answer: solution" in grpo("train", *renamed[:1], *renamed[2:], "dataset.train=null")[1]
    _, out, err = grpo("train", *words, "dataset.system=Hi.", "dataset=math", "--cfg", "job")
    assert (yaml.safe_load(out)["dataset"]["system"], err) == ("Hi.", "")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "own.yaml").write_text("train: old.jsonl\nsystem: Hi.\n")
    (tmp_path / "mine.yaml").write_text("defaults: [schema, dataset: own, _self_]\n")
    _, out, err = grpo("train", "mine.yaml", words[1], "--cfg", "job")
    assert (yaml.safe_load(out)["dataset"]["system"], err[-17:]) == (None, "t dataset.system\n")


def test_rewards_and_columns_take_values_without_a_plus(grpo: Grpo) -> None:
    _, out, err = grpo(
        "train", "reward.exact_match.weight=0.5", "dataset.columns.answer=gold", "--cfg", "job"
    )
    assert "weight: 0.5" in out, err
    assert "answer: gold" in out
    _, out, err = grpo("train", "reward=[exact_match,length]", "--cfg", "job", "-p", "reward")
    assert out.count("function:") == 2, err
    _, out, err = grpo("train", "dataset.columns={answer: gold}", "--cfg", "job")
    assert "answer: gold" in out, err


@pytest.mark.runs
def test_a_folder_without_a_step_is_free_and_overwrite_spares_other_files(
    grpo: Grpo, tmp_path: Path
) -> None:
    raising = ["+reward.bad.function=tests.training.test_train:raises_at_three", "output_dir=run"]
    (tmp_path / "run" / "eval").mkdir(parents=True)
    (tmp_path / "run" / "eval" / "mine.txt").write_text("keep")
    data = ["dataset.train=rows.jsonl", "dataset.eval=rows.jsonl"]
    assert grpo("train", *TINY, *data, *raising)[0] == 1
    assert grpo("train", *TINY, *data, "output_dir=run", "steps=1")[0] == 0
    assert grpo("train", *TINY, *data, "output_dir=run", "steps=1")[0] == 2
    assert grpo("train", *TINY, *data, "output_dir=run", "steps=1", "overwrite=true")[0] == 0
    assert (tmp_path / "run" / "eval" / "mine.txt").read_text() == "keep"


@pytest.mark.runs
def test_a_damaged_checkpoint_is_skipped(grpo: Grpo, tmp_path: Path) -> None:
    command = ["train", *TINY, "output_dir=run", "steps=3", "checkpoint.every=1"]
    assert grpo(*command, "steps=2")[0] == 0
    saved = tmp_path / "run" / "checkpoints"
    tear(saved / "step-2")
    code, _, err = grpo(*command, "resume=run/checkpoints/step-2")
    assert code == 2, "it is what was asked for"
    assert "resume: none of run/checkpoints/step-2 is complete" in err
    assert err.startswith("grpo: ")
    assert err.count("\n") == 1

    code, out, err = grpo(*command, "resume=auto")
    assert code == 0, err
    said = " ".join(out.split())
    assert "checkpoints/step-2 is damaged (" in said
    assert "model.safetensors" in said
    assert "resuming from run/checkpoints/step-1, step 1" in said
    names = {p.name for p in saved.iterdir()}
    assert names == {"step-2", "step-2.old", "step-3"}, "the last two, and what was set aside"

    for step in (2, 3):
        tear(saved / f"step-{step}")
    code, _, err = grpo(*command, "steps=4", "resume=auto")
    assert code == 2
    listed = ", ".join(f"run/checkpoints/step-{step}" for step in (2, 3))
    assert f"resume: none of {listed} is complete" in err
    assert "start over with overwrite=true" in err


@pytest.mark.runs
def test_a_finished_run_is_not_rewritten(grpo: Grpo, tmp_path: Path) -> None:
    command = ["train", *TINY, "output_dir=run", "checkpoint.every=1"]
    assert grpo(*command, "steps=2", "seed=1")[0] == 0

    def record() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}

    before = record()
    for steps in (1, 2):
        code, out, _ = grpo(*command, f"steps={steps}", "seed=1", "resume=auto")
        assert code == 0
        assert "the run is finished after 2 steps" in " ".join(out.split())
        assert record() == before
    code, _, err = grpo(*command, "steps=2", "seed=2", "resume=auto")
    assert code == 2
    assert "holds a finished run with other settings (seed: 1 -> 2)" in err
    assert record() == before
    code, out, err = grpo(*command, "steps=3", "seed=1", "resume=auto")
    assert code == 0, err
    assert "resuming from run/checkpoints/step-2" in " ".join(out.split())


def tear(checkpoint: Path) -> None:
    """Cuts a checkpoint's weights off, as a full disk may."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def test_a_recipe_of_ones_own_extends_a_shipped_one(grpo: Grpo, tmp_path: Path) -> None:
    own = "defaults: [gsm8k_qwen, override loss: grpo, _self_]\nsteps: 3\n"
    (tmp_path / "mine.yaml").write_text(own)
    for argv in (["recipe=./mine.yaml"], ["--config-dir", str(tmp_path), "recipe=mine"]):
        code, out, err = grpo("train", *argv, "--cfg", "job")
        assert code == 0, err
        assert "recipe: mine" in out
        assert "steps: 3" in out
        assert "normalize: completions" in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("grpo tr", "train"),
        ("grpo train recipe=math", "recipe=math_qwen"),
        ("grpo train loss=", "loss=dapo"),
        ("grpo train loss.kl_e", "loss.kl_estimator="),
        ("grpo train generation.num_g", "generation.num_generations="),
    ],
)
def test_completion(line: str, expected: str, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    _, out, err = grpo("-sc", "query=bash")
    assert expected in out.split(), err
    assert "_defaults" not in out


def interrupted(
    folder: Path, number: int, begun: str, *words: str, **environment: str
) -> tuple[int, str]:
    """Sends a signal to `grpo train` once a file is there; returns exit code and output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_cli", "train", "output_dir=run", *TINY, *words],
        cwd=folder,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (folder / begun).exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(number)
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out


@pytest.mark.programs
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_leaves_and_resume_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    words = ["steps=1000", "checkpoint.every=0"]
    ended, out = interrupted(tmp_path, number, "run/metrics.jsonl", *words)
    assert ended == code, out
    metrics = tmp_path / "run" / "metrics.jsonl"
    done = len(metrics.read_text().splitlines())
    assert f"stopped after step {done}; saved in run/checkpoints/step-{done}" in out
    words = [*TINY, *words, "output_dir=run", f"steps={done + 2}", "resume=auto"]
    resumed = subprocess.run(
        [sys.executable, "-m", "grpo_cli", "train", *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"changed since: steps: 1000 -> {done + 2}" in resumed.stdout
    lines = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert lines == list(range(1, done + 3))


HANGS = """
import time

def hangs(completions, **_):
    if len(completions) > 1:  # not the try-out
        open("begun", "w").close()
        {wait}
    return [float(len(c)) for c in completions]
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("wait", "message"),
    [
        ("time.sleep(3600)", "grpo: stopped before the first step; there is nothing new to save"),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); time.sleep(3600)",
            "a reward function, or the source of streamed rows, does not return; ended without "
            "saving this step.",
        ),
    ],
)
def test_a_sigterm_ends_a_run_whose_reward_hangs(wait: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGS.format(wait=f"import signal; {wait}"))
    words = ["reward=[]", "+reward.hangs.function=mine:hangs", "checkpoint.grace=2"]
    path = f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"
    code, out = interrupted(tmp_path, signal.SIGTERM, "begun", *words, PYTHONPATH=path)
    assert code == 143, out
    assert message in out


@pytest.mark.runs
def test_train_then_eval(tmp_path: Path, grpo: Grpo) -> None:
    code, out, err = grpo("train", "output_dir=run", "steps=2", *TINY, "eval.at_start=true")
    assert code == 0, err
    assert "last checkpoint: run/checkpoints/step-2" in out
    assert (tmp_path / "run" / "completions" / "step-1.parquet").exists()
    for argv in (["run"], ["checkpoint=run/checkpoints/step-2"], ["run", "eval.num_samples=3"]):
        extra = ["eval.temperature=1"] if len(argv) > 1 else []
        code, out, err = grpo("eval", *argv, *extra)
        assert code == 0, err
        assert ("/run/eval/step-2_" in out) == bool(extra)
    code, out, err = grpo(
        "eval", "run", "eval.num_samples=3", "eval.temperature=2", "overwrite=true"
    )
    assert (code, "/run/eval/step-2_" in out) == (0, False), err
    assert {p.name for p in (tmp_path / "run" / "eval").iterdir()} == {"step-2", "step-2_1"}
    report = json.loads((tmp_path / "run" / "eval" / "step-2" / "eval.json").read_text())
    result = report["benchmarks"]["arithmetic_test"]
    assert result["n"] == 8
    low, high = result["interval_95"]
    assert low <= result["accuracy"] <= high
    stored = pyarrow.parquet.read_table(
        tmp_path / "run" / "eval" / "step-2" / "completions.parquet"
    )
    assert len(stored) == 3 * 8
    assert {"prompt", "completion", "reward", "sampling_logprobs"} <= {*stored.column_names}


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [("train", 1, "everything after the last checkpoint is lost"), ("show", 0, "")],
)
def test_a_reader_that_leaves(
    command: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`grpo show | head` has read enough; a run that cannot print has failed."""

    def print_to_nobody(words: list[str]) -> None:
        raise BrokenPipeError

    monkeypatch.setitem(cli.COMMANDS, command, print_to_nobody)
    monkeypatch.setattr(os, "dup2", lambda *ends: None)
    assert cli.run_command([command]) == code
    assert said in capfd.readouterr().err
