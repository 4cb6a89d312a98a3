"""`grpo eval` on benchmarks, from its words to its files; the model answers from a table."""

import json
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.checkpoints import manifest
from grpo_cli.commands import evaluate as evaluate_command
from grpo_cli.commands import evaluation_run
from grpo_cli.errors import UserError
from grpo_cli.evaluation import benchmarks, tables
from grpo_cli.evaluation.estimates import estimate
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.evaluation.tasks import TaskResult
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion
from tests import programs
from tests.data.test_files import write
from tests.evaluation.modes import task_of

SHARDED = "distributed=fsdp2"
QUICK = ("scoring.workers=1", "device=cpu")
OUTPUT = re.compile(r"```output\n.*?```\n", re.DOTALL)


class Answers(Generator):
    """A generator that answers from a table: by question, the text of each of its completions."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, table: dict[str, list[str]]) -> None:
        self.tokenizer, self.table = tokenizer, table

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        num_generations, sampling = request.num_generations, request.sampling
        for number, prompt in enumerate(request.prompts):
            question, _, begun = self.tokenizer.decode(prompt.ids).partition("|")
            said = OUTPUT.sub("", begun)  # without what the tool has said
            texts = self.table[question][:num_generations]
            if said:
                texts = [t for t in self.table[question] if t.startswith(said)][:1]
            yield number, [self._one(t[len(said) :], sampling) for t in texts]

    def _one(self, text: str, sampling: Sampling) -> Completion:
        stops = [text.index(s) + len(s) for s in sampling.stop if s in text]
        ids = self.tokenizer(text[: min(stops, default=len(text))])["input_ids"]
        ids = ids if stops else [*ids, self.tokenizer.eos_token_id]
        cut = ids[: sampling.max_tokens]
        ended = len(cut) == len(ids)
        return Completion(cut, [-0.5] * len(cut), "stop" if ended else "length")


@pytest.fixture
def checkpoint(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def run(
    tmp_path: Path,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> Evaluate:
    """Evaluates a table of (question, gold answer, level) with a model that answers from one."""

    def evaluate(
        problems: list[tuple[str, str, int]], table: dict[str, list[str]], *words: str
    ) -> dict[str, Any]:
        rows = ({"question": q, "answer": a, "level": n} for q, a, n in problems)
        file = write(tmp_path / "own.jsonl", *rows)
        answers = Answers(tokenizer, table)
        monkeypatch.setattr(evaluation_run, "make_generator", lambda *_: answers)
        prompts = [
            "benchmark.own.modes.cot.prompt='{question}|'",
            "benchmark.own.modes.tir.prompt='{question}|'",
        ]
        shown = ["benchmark.own.chat=false", "benchmark.own.breakdown=[level]"]
        shown += [f"output_dir={tmp_path / 'out'}"]
        evaluate_command.main(
            [str(checkpoint), f"benchmark={file}", *prompts, *shown, *QUICK, *words]
        )
        return json.loads((tmp_path / "out" / "eval.json").read_text())  # type: ignore[no-any-return]

    return evaluate


def test_a_damaged_checkpoint_gives_no_number(
    run: Evaluate, checkpoint: Path, tmp_path: Path
) -> None:
    weights = checkpoint / "model.safetensors"
    entry = manifest.write_file(weights, weights.read_bytes())
    manifest.write(checkpoint, {weights.name: entry})
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"is damaged \(model.safetensors: its contents"):
        run([("1+1", "2", 1)], {"1+1": ["2"]})
    assert not (tmp_path / "out" / "eval.json").exists()


def block(program: str) -> str:
    return f"```python\n{program}\n```\n"


@pytest.mark.programs
def test_every_cell_of_the_table(
    run: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [("a", "0.5", 1), ("b", "4", 1), ("c", "5", 1), ("d", "6", 2), ("e", "9", 2)]
    problems.append(("f", "8", 2))
    in_words = {
        "a": ["It is \\boxed{\\frac12}."],
        "b": ["It is \\boxed{3}."],
        "c": ["and so on, " * 30],  # truncated
        "d": ["Nobody knows."],  # no answer
        "e": ["The answer is 9."],
        "f": ["So \\boxed{8}"],
    }
    cot = run(problems, in_words, "eval.max_completion_tokens=200")["benchmarks"]["own"]
    assert cot["mode"] == "cot"
    assert (cot["n"], cot["accuracy"]) == (6, 0.5)
    whole = estimate([1, 0, 0, 0, 1, 1], 6)
    assert cot["interval_95"] == [whole.low, whole.high]
    assert (cot["clipped_ratio"], cot["no_answer"]) == (1 / 6, 2 / 6)
    assert [cot["by"]["level"][n]["accuracy"] for n in "12"] == [1 / 3, 2 / 3]
    assert cot["by"]["level"]["1"]["n"] == 3
    assert "tool_calls" not in cot

    with_programs = {
        **in_words,
        "a": [f"Let us see.\n{block('print(1 / 2)')}It is \\boxed{{0.5}}."],
        "e": [f"{block('print(x)')}Then \\boxed{{7}}."],  # an error of the program, and wrong
        "f": [f"{block('while True: pass')}\\boxed{{8}}"],  # never ends, and right nevertheless
    }
    words = ("mode=cot,tir", "eval.max_completion_tokens=200", "generation.tools.seconds=1")
    found = run(problems, with_programs, *words)["benchmarks"]["own"]
    tir = found["by_mode"]["tir"]
    assert tir["accuracy"] == 2 / 6
    assert (tir["tool_calls"], tir["tool_errors"]) == (3 / 6, 2 / 3)
    assert (tir["clipped_ratio"], tir["no_answer"]) == (1 / 6, 2 / 6)
    assert found["by_mode"]["cot"]["accuracy"] == found["accuracy"] == 2 / 6, "7 is wrong there too"

    stored = pyarrow.parquet.read_table(tmp_path / "out" / "completions.parquet").to_pylist()
    (row,) = (r for r in stored if (r["row"], r["mode"]) == (0, "tir"))
    assert "```output\n0.5\n```\n" in row["completion"]
    assert row["correct"] is True
    assert len(row["sampled"]) == len(row["completion_ids"])
    assert row["sampled"].count(False) == len("```output\n0.5\n```\n"), "a token a byte"
    assert [turn["by"] for turn in json.loads(row["turns"])] == ["model", "environment", "model"]
    assert (row["stop_reason"], row["messages"]) == ("answered", "[]")
    assert tir["turns"] == 9 / 6
    (late,) = (r for r in stored if (r["row"], r["mode"]) == (5, "tir"))
    assert "TimeoutError" in late["completion"]
    out = capsys.readouterr().out
    assert "own cot" in out
    assert "own tir" in out
    assert (tmp_path / "out" / "table.md").read_text().splitlines()[0] == "| Model | own |"
    assert not (tmp_path / "out" / "partial").exists()


@pytest.mark.programs
def test_votes_for_equal_answers_in_different_spellings(run: Evaluate) -> None:
    problems = [("a", "1/2", 1), ("b", "1", 1), ("c", "3", 1)]
    table = {
        "a": ["\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{3}", "\\boxed{4}"],  # 2 : 1 : 1
        "b": ["\\boxed{1}", "\\boxed{2}", "\\boxed{2}", "\\boxed{1}"],  # a tie
        "c": ["\\boxed{\\frac12}", "Nobody knows.", "\\boxed{3}", "\\boxed{0.5}"],  # 2 : 1 wrong
    }
    found = run(problems, table, "num_samples=4")["benchmarks"]["own"]
    assert found["maj@4"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["mean@4"] == found["accuracy"] == pytest.approx(5 / 12)
    assert {"pass@1", "pass@2", "pass@4", "maj@1", "maj@2"} < found.keys()
    assert found["no_answer"] == 1 / 12
    assert found["completions"] == 12
    low, high = found["intervals_95"]["maj@4"]
    assert low < 0.5 < high
    only = run(problems, table, "num_samples=4", "metric=maj", "k=4")["benchmarks"]["own"]
    assert only["maj@4"] == found["maj@4"]
    assert not {"pass@4", "mean@4", "maj@2"} & only.keys()


def shipped(name: str) -> Benchmark:
    """A benchmark with the titles and published figures of its file, if there is one."""
    benchmark, entry = Benchmark(), benchmarks.shipped_entry(name)
    for mode, of_mode in entry.get("modes", {}).items():
        benchmark.modes[mode].published = of_mode.get("published", {})
    return replace(benchmark, title=entry.get("title"), column=entry.get("column"))


def result(name: str, mode: str, accuracy: float) -> TaskResult:
    """Of 10 problems with a completion each."""
    found = {"n": 10.0, "accuracy": accuracy}
    found |= {"accuracy_low": accuracy - 0.02, "accuracy_high": accuracy + 0.04}
    return TaskResult(task_of(name, mode, shipped(name)), found, [])


def test_the_papers_table_with_ours_in_it() -> None:
    results = [
        result("svamp", "cot", 0.5),
        result("math", "cot", 0.25),
        result("gsm8k", "cot", 0.8),
    ]
    results.append(result("math", "tir", 0.3))
    assert tables.markdown("ab/step-9", results).splitlines() == [
        "| Model | GSM8K | MATH | SVAMP |",
        "| --- | --- | --- | --- |",
        "| **Chain-of-Thought Reasoning** |  |  |  |",
        "| DeepSeekMath-Instruct 7B | 82.9% | 46.8% | – |",
        "| DeepSeekMath-RL 7B | 88.2% | 51.7% | – |",
        "| ab/step-9 | 80.0% [78.0, 84.0] | 25.0% [23.0, 29.0] | 50.0% [48.0, 54.0] |",
        "| **Tool-Integrated Reasoning** |  |  |  |",
        "| DeepSeekMath-Instruct 7B | 83.7% | 57.4% | – |",
        "| DeepSeekMath-RL 7B | 86.7% | 58.8% | – |",
        "| ab/step-9 | – | 30.0% [28.0, 34.0] | – |",
    ]


def test_an_evaluation_of_another_model_is_moved_aside_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    told = {"checkpoint_hash": "a", "settings_hash": "b"}
    assert tables.set_aside(Path(), told) is None, "there is none"
    Path("eval.json").write_text(json.dumps(told))
    assert tables.set_aside(Path(), told) is None, "the same"
    assert tables.set_aside(Path(), {**told, "checkpoint_hash": "c"}) == tmp_path / "here_1"
    assert json.loads((tmp_path / "here_1" / "eval.json").read_text()) == told
    assert not Path("eval.json").exists()


SLOW = """
import sys, time
from grpo_cli.evaluation import journal
from grpo_cli.cli import main
def slowly(self, *args, inner=journal.Journal.completed):
    inner(self, *args)
    time.sleep(0.02)
journal.Journal.completed = slowly
sys.argv = ["grpo", *sys.argv[1:]]
main()
"""


def words_of_sums(folder: Path, checkpoint: Path, number: int) -> list[str]:
    """The command line of an evaluation of so many sums in both modes."""
    rows = ({"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(number))
    file = write(folder / "own.jsonl", *rows)
    prompt = "benchmark.own.modes.tir.prompt='{question}'"
    words = ["eval", str(checkpoint), f"benchmark={file}", prompt, "mode=cot,tir"]
    return [*words, "num_samples=2", "eval.max_completion_tokens=20", *QUICK]


def noted(folder: Path) -> int:
    """Problems in the journal of an evaluation under way."""
    return sum(p.read_bytes().count(b'"key"') for p in folder.glob("partial/*.jsonl"))


@pytest.mark.slow
def test_processes_that_share_the_weights_find_what_one_does(
    tmp_path: Path, checkpoint: Path
) -> None:
    grpo = ["-m", "grpo_cli", *words_of_sums(tmp_path, checkpoint, 5)]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for command in (
        programs.alone(*grpo, f"output_dir={alone}"),
        programs.torchrun(2, *grpo, f"output_dir={shared}", SHARDED),
    ):
        done = programs.run(command)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    read = pyarrow.parquet.read_table
    of_one, of_two = (read(f / "completions.parquet").to_pylist() for f in (alone, shared))
    assert [row["completion_ids"] for row in of_one] == [row["completion_ids"] for row in of_two]
    both = [json.loads((f / "eval.json").read_text())["benchmarks"] for f in (alone, shared)]
    assert both[0] == both[1]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_five_times_it_finds_the_same(
    tmp_path: Path, checkpoint: Path, processes: int
) -> None:
    (tmp_path / "slowly.py").write_text(SLOW)
    grpo = [str(tmp_path / "slowly.py"), *words_of_sums(tmp_path, checkpoint, 60)]

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = programs.started(processes, *grpo, f"output_dir={folder}")
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    once, often = tmp_path / "once", tmp_path / "often"
    assert start(once).wait(programs.PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    chance = random.Random(processes)
    for goal in sorted(chance.sample(range(5, 116), 5)):  # of 60 problems in two modes
        job = start(often)
        until = time.monotonic() + programs.PATIENCE
        while noted(often) < goal and job.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        assert job.poll() is None, (tmp_path / "log").read_text()[-3000:]
        # torchrun's workers have sessions of their own.
        subprocess.run(["pkill", "-KILL", "-f", f"output_dir={often}"], check=True)
        job.wait()
        assert noted(often) >= goal - 1, "nothing is lost"
    assert start(often).wait(programs.PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (often / "eval.json").read_bytes() == (once / "eval.json").read_bytes()
    assert "resumes: " in (tmp_path / "log").read_text()
    assert not (often / "partial").exists()
