"""Programs in completions: which are run, what is shown of them, and what a completion is then.

The models are scripts: each says what comes next in a transcript, or draws fragments from a seed.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli import sandbox
from grpo_cli.environments import loop, programs
from grpo_cli.environments.program_calls import Answer, closed_program, describe, execute
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Tools
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion
from tests.conftest import as_prompts
from tests.tables import rows_of, table

END = "<|im_end|>"
QUICK = Tools(seconds=20.0)


class Out(str):
    """A part of a transcript that the tool writes."""


def out(text: str, before: str = "") -> Out:
    return Out(f"{before}```output\n{text}\n```\n")


def program(source: str) -> str:
    return f"```python\n{source}\n```\n"


class Scripted(Generator):
    """A generator that goes on with the transcript which the text so far begins."""

    computes_here = True

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, says: Callable[[str, str, int], str]
    ) -> None:
        """says: (prompt, completion so far, seed) to what follows if nothing stops it."""
        self.tokenizer, self.says = tokenizer, says
        self.rounds: list[tuple[list[str], Sampling, list[int]]] = []
        self.step: int | None = 3  # whose weights it samples with

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        texts = [self.tokenizer.decode(p.ids) for p in request.prompts]
        self.rounds.append((texts, request.sampling, list(request.seeds)))
        for number, (text, seed) in enumerate(zip(texts, request.seeds, strict=True)):
            prompt, _, begun = text.partition("|")
            own = [derive_seed(seed, j) for j in range(request.num_generations)]
            says = [self.says(prompt, begun, s) for s in own]
            yield number, [self._one(text, request.sampling) for text in says]

    def _one(self, text: str, sampling: Sampling) -> Completion:
        ids: list[int] = []
        stop = StopStrings(self.tokenizer, sampling.stop)
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids.append(token)
            if token == self.tokenizer.eos_token_id or (
                len(ids) >= sampling.min_tokens and stop.ends(ids)
            ):
                return Completion(ids, [-0.5] * len(ids), "stop", sampled_at=self.step)
            if len(ids) == sampling.max_tokens:
                return Completion(ids, [-0.5] * len(ids), "length", sampled_at=self.step)
        raise AssertionError(f"the script ends without an end: {text!r}")


def scripted(tokenizer: PreTrainedTokenizerFast, *transcripts: str) -> Scripted:
    """Begins with the first; goes on with the first that fits the text so far."""

    def says(prompt: str, begun: str, seed: int) -> str:
        for transcript in transcripts:
            if transcript.startswith(begun) and len(transcript) > len(begun):
                return transcript[len(begun) :]
        raise AssertionError(f"no transcript begins with {begun!r}")

    return Scripted(tokenizer, says)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def sample(
    generator: Generator,
    tokenizer: PreTrainedTokenizerFast,
    settings: Tools,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    threads: int | None = None,
) -> list[list[Completion]]:
    """Completions of each prompt. The seconds that programs took are left out of their turns."""
    episodes = programs.program_loop(tokenizer, settings, order="eager", threads=threads)
    request = Request(as_prompts(prompts), num_generations, sampling, seeds)
    with episodes.sample(generator, request) as sampled:
        groups = {
            number: [replace(c, turns=tuple(replace(t, seconds=0.0) for t in c.turns)) for c in cs]
            for number, _, cs in sampled
        }
    return [groups[number] for number in range(len(prompts))]


def complete(
    inner: Scripted, settings: Tools = QUICK, sampling: Sampling | None = None
) -> Completion:
    prompt = encode(inner.tokenizer, "q|")
    how = (settings, [prompt], 1, sampling or Sampling(2000), [1])
    ((c,),) = sample(inner, inner.tokenizer, *how)
    assert len(c.ids) == len(c.sampling_logprobs)
    assert c.is_sampled is None or len(c.is_sampled) == len(c.ids)
    mask = c.is_sampled or [True] * len(c.ids)
    assert c.sampling_logprobs == [-0.5 if m else 0.0 for m in mask]
    assert c.sampled_at == 3
    return c


def parts_of(c: Completion, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """A completion's text, cut where sampled tokens and those of the tool meet."""
    parts: list[list[int]] = []
    mask = c.is_sampled or [True] * len(c.ids)
    for i, (token, sampled) in enumerate(zip(c.ids, mask, strict=True)):
        if i == 0 or mask[i - 1] != sampled:
            parts.append([])
        parts[-1].append(token)
    texts = [tokenizer.decode(p) for p in parts]
    begins_sampled = not mask or mask[0]
    return [Out(t) if (i % 2 == 0) != begins_sampled else t for i, t in enumerate(texts)]


PROGRAMS = rows_of("environments/programs.jsonl")


@table("row", [row for row in PROGRAMS if "program" in row])
def test_closed_program(row: dict[str, Any]) -> None:
    assert closed_program(row["text"], row["at_end"]) == row["program"]
    assert closed_program("```" * 50_000 + "\n", row["at_end"]) is None


@pytest.mark.parametrize("row", [row for row in PROGRAMS if "blocks" in row])
def test_what_is_shown_of_a_call(row: dict[str, Any]) -> None:
    expected = Answer(row["text"], row.get("status", "ok"), row.get("keeps", True))
    assert execute(row["blocks"], QUICK) == expected


def test_an_endless_output_is_stopped_and_its_middle_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_cli.environments.program_calls.OUTPUT_CHARACTERS", 40)
    answer = execute(["while True: print('ab')"], QUICK)
    assert (answer.status, answer.keeps) == ("output", False)
    assert answer.text == (
        "ab\nab\nab\nab\nab\nab\nab\n[... 1048536 characters left out ...]\n"
        "\nab\nab\nab\nab\nab\nab\na\nRuntimeError: printed more than 1024 KiB"
    )


def test_blocks_that_are_run_again_draw_the_same_numbers() -> None:
    draw = "import random\na = random.random(), random.Random().random()"
    first = execute([f"{draw}\na"], QUICK).text
    assert execute([f"{draw}\na", "a"], QUICK).text == first
    assert execute([f"{draw}\na", "random.random()"], QUICK).text not in first
    numpy = (
        "import numpy as np\na = float(np.random.rand()), float(np.random.default_rng().random())"
    )
    assert execute([numpy, "a"], QUICK).text == execute([f"{numpy}\na"], QUICK).text


def test_a_program_cannot_speak_for_its_runner() -> None:
    # All that it could read its token from, short of looking into the interpreter's memory.
    source = "import os, sys\nos.lseek(0, 0, 0)\nprint([os.read(0, 9), sys.stdin.read()])"
    assert execute([source], QUICK).text == "[b'', '']"
    assert execute([source.replace("lseek", "fstat").replace("0, 0, 0", "0")], QUICK).text
    assert execute(["print('0' * 32 + 'ok')"], QUICK).text == "0" * 32 + "ok"


def test_a_program_is_run_and_its_output_appended(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = ["So:\n" + program("print(6 * 7)"), out("42"), "It is 42." + END]
    inner = scripted(tokenizer, "".join(parts))
    c = complete(inner)
    assert parts_of(c, tokenizer) == parts
    assert (c.finish_reason, c.tool_calls, c.tool_errors, c.tool_timeouts) == ("stop", 1, 0, 0)
    assert (c.stop_reason, c.calls_by_tool) == ("answered", {"python": [1, 0, 0]})
    ends = [len(encode(tokenizer, "".join(parts[:n]))) for n in range(4)]
    assert [(t.start, t.end) for t in c.turns] == [*itertools.pairwise(ends)]
    assert [t.by for t in c.turns] == ["model", "environment", "model"]
    assert c.messages == (), "rewards read one text"
    (first, _, _), (second, _, _) = inner.rounds
    assert first == ["q|"]
    assert second == ["q|" + "".join(parts[:2])]


@pytest.mark.parametrize(
    ("parts", "calls", "errors"),
    [
        # state, and a last expression
        (["a\n" + program("x = 3"), out(""), program("x * 2"), out("6"), "6" + END], 2, 0),
        # an exception that the model reacts to; what came before it stays
        (
            [
                program("y = 4\nz"),
                out("NameError: name 'z' is not defined"),
                "Oh.\n" + program("y"),
                out("4"),
                "4" + END,
            ],
            2,
            1,
        ),
        # no program
        (["The answer is 4." + END], 0, 0),
        (["```output\n5\n```\n" + program("5"), out("5"), "5" + END], 1, 0),
        # a closing line with spaces, a block in a list
        (["1. so\n   ```python\n   5\n   ```\n", out("5"), "5" + END], 1, 0),
        # output with fences of its own is not run
        (
            [program("print('```python\\nprint(9)\\n```')"),
             out("```python\nprint(9)\n```"), "5\n```\n" + END],
            1,
            0,
        ),
    ],
)  # fmt: skip
def test_completions(
    tokenizer: PreTrainedTokenizerFast, parts: list[str], calls: int, errors: int
) -> None:
    c = complete(scripted(tokenizer, "".join(parts)))
    assert parts_of(c, tokenizer) == parts
    assert (c.finish_reason, c.tool_calls, c.tool_errors) == ("stop", calls, errors)
    assert (c.is_sampled is None) == (calls == 0)


@pytest.mark.programs
def test_an_endless_program_is_left_out_of_later_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [
        program("x = 1"),
        out(""),
        program("x = 2\nwhile True: pass"),
        out("TimeoutError: ran longer than 1 s"),
        program("x"),
        out("1"),
        END,
    ]
    c = complete(scripted(tokenizer, "".join(parts)), Tools(seconds=1.0))
    assert parts_of(c, tokenizer) == parts
    assert (c.tool_calls, c.tool_errors, c.tool_timeouts) == (3, 1, 1)


def test_after_the_last_call_a_completion_goes_on_to_its_end(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    parts = [program("1"), out("1"), program("2") + "```output\n3\n```\nso 3" + END]
    inner = scripted(tokenizer, "".join(parts))
    c = complete(inner, Tools(max_calls=1, seconds=20.0))
    assert parts_of(c, tokenizer) == parts
    assert c.tool_calls == 1
    assert len(inner.rounds) == 2, "nothing stops at what is not run"
    c = complete(scripted(tokenizer, program("2") + END), Tools(max_calls=0))
    assert (c.is_sampled, c.tool_calls) == (None, 0)


def test_an_eos_right_behind_a_program_is_taken_off(tokenizer: PreTrainedTokenizerFast) -> None:
    begun = "```python\n7\n```"
    parts = [begun, out("7", before="\n"), "7" + END]
    c = complete(scripted(tokenizer, begun + END, "".join(parts)))
    assert parts_of(c, tokenizer) == parts


def test_what_a_program_prints_is_no_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [program(f"print('{END}')"), out(END), "so" + END]
    c = complete(
        scripted(tokenizer, parts[0].replace(END, "<|im_' + 'end|>") + parts[1] + parts[2])
    )
    assert c.ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(c.ids).count(END) == 2


@pytest.mark.parametrize("left", [0, 1, 4, 17, 29])
def test_the_tools_tokens_are_part_of_the_budget(
    tokenizer: PreTrainedTokenizerFast, left: int
) -> None:
    parts = [program("print('ab')"), out("ab"), "so" + END]
    whole = encode(tokenizer, "".join(parts))
    begun, with_output = (len(encode(tokenizer, "".join(parts[:n]))) for n in (1, 2))
    inner = scripted(tokenizer, "".join(parts))
    c = complete(inner, sampling=Sampling(begun + left))
    assert c.ids == whole[: begun + left]
    if left < len(whole) - begun:
        assert c.finish_reason == "length"
        assert len(c.ids) == begun + left
    else:
        assert c.finish_reason == "stop"
    mask = [begun > i or i >= with_output for i in range(len(c.ids))]
    assert (c.is_sampled or [True] * len(c.ids)) == mask
    assert c.tool_calls == (left > 0), "no room, no call"
    assert c.stop_reason == {"length": "max_tokens", "stop": "answered"}[c.finish_reason]


@pytest.mark.parametrize(
    ("stop", "says", "expected"),
    [
        ("Question:", "so 4.\n\nQuestion: 5" + END, ["so 4.\n\nQuestion:"]),
        ("```output", "```output\n" + program("1") + END, ["```output"]),
        # in what was sampled, not in what the tool wrote, nor across both
        ("1\n", program("x = 1") + out("") + "so 1\n2" + END, ["```python\nx = 1\n"]),
        ("Q", program("'Q' 'Q'")[:-4] + "```\n" + END, ["```python\n'Q"]),
        (
            "7\n```\nso",
            program("3 + 4") + out("7") + "so 7\n```\nso" + END,
            [program("3 + 4"), out("7"), "so 7\n```\nso"],
        ),
    ],
)
def test_stop_strings_of_the_user_end_a_completion(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    says: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(programs, "PIECE", 4)
    c = complete(scripted(tokenizer, says), sampling=Sampling(500, stop=(stop,)))
    assert parts_of(c, tokenizer) == expected
    assert c.finish_reason == "stop"


def test_what_comes_first_counts_a_program_or_a_stop_string(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    # No stop string of the generator's own ends this closing line: it goes on, to the user's.
    begun = "```python\n5\n``` \n"
    parts = [begun, out("5"), "so Q"]
    inner = scripted(tokenizer, begun + "it is 6. Q" + END, "".join(parts) + END)
    c = complete(inner, sampling=Sampling(500, stop=("Q",)))
    assert parts_of(c, tokenizer) == parts
    c = complete(scripted(tokenizer, program("5") + END), sampling=Sampling(500, stop=("```\n",)))
    assert parts_of(c, tokenizer) == [program("5")]
    assert (c.tool_calls, c.finish_reason) == (0, "stop")


def test_pieces_and_prompts_are_never_longer_than_the_whole(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM refuses prompts that with `max_tokens` are longer than the longest sequence.
    monkeypatch.setattr(programs, "PIECE", 32)
    inner = scripted(tokenizer, program("x = 5\nx") + out("5") + "a" * 500)
    c = complete(inner, sampling=Sampling(117, min_tokens=90))
    assert (len(c.ids), c.finish_reason) == (117, "length")
    for texts, sampling, _ in inner.rounds:
        longest = max(len(encode(tokenizer, t)) for t in texts)
        assert longest + sampling.max_tokens <= 2 + 117
        assert sampling.min_tokens <= sampling.max_tokens
    assert [s.min_tokens for _, s, _ in inner.rounds[-2:]] == [0, 0]
    assert inner.rounds[0][1].min_tokens == 32


FRAGMENTS = ["so ", "x", "\n", "```python\n", "```python\n", "1\n", "```\n", "```\n", "```", END]


def babble(
    tokenizer: PreTrainedTokenizerFast,
    order: Sequence[int] = range(6),
    threads: int = 3,
) -> dict[int, list[Completion]]:
    """Completions that say what their seeds draw, programs among it."""

    def says(prompt: str, begun: str, seed: int) -> str:
        return "".join(random.Random(seed).choices(FRAGMENTS, k=2000)) + END

    found = sample(
        Scripted(tokenizer, says),
        tokenizer,
        Tools(max_calls=3),
        [encode(tokenizer, f"{n}|") for n in order],
        3,
        Sampling(200),
        [derive_seed(5, n) for n in order],
        threads=threads,
    )
    return dict(zip(order, found, strict=True))


@pytest.mark.programs
@pytest.mark.parametrize("variant", ["jumbled", "reversed", "one thread", "few"])
def test_neither_the_batch_nor_time_has_a_say(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(programs, "PIECE", 32)
    clock = random.Random(variant)

    def quick(blocks: Sequence[str], settings: Tools) -> Answer:
        return Answer(f"{len(blocks)} {blocks[-1]!r}")

    def late(blocks: Sequence[str], settings: Tools) -> Answer:
        time.sleep(clock.choice([0.0, 0.001, 0.02]))
        return quick(blocks, settings)

    monkeypatch.setattr(programs, "execute", quick)
    expected = babble(tokenizer)
    assert sum(c.tool_calls for g in expected.values() for c in g) > 8
    assert {c.finish_reason for g in expected.values() for c in g} == {"stop", "length"}
    assert len({tuple(c.ids) for g in expected.values() for c in g}) > 12
    if variant == "jumbled":
        monkeypatch.setattr(programs, "execute", late)
        monkeypatch.setattr(loop, "PATIENCE", 0.0)
    order = {"reversed": range(5, -1, -1), "few": [4, 1]}.get(variant, range(6))
    found = babble(tokenizer, list(order), threads=1 if variant == "one thread" else 3)
    assert found == {n: expected[n] for n in order}


def test_seeds_of_rounds(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "execute", lambda blocks, settings: Answer("1"))
    whole = program("1") + out("1") + program("2") + out("1") + END
    inner = scripted(tokenizer, whole)
    prompts = [encode(tokenizer, "a|"), encode(tokenizer, "b|")]
    sample(inner, tokenizer, QUICK, prompts, 2, Sampling(500), [11, 12])
    assert inner.rounds[0][2] == [11, 12]
    assert inner.rounds[0][1].max_tokens == 256
    drawn = [seed for _, _, seeds in inner.rounds[1:] for seed in seeds]
    expected = [derive_seed(s, j, piece) for s in (11, 12) for j in (0, 1) for piece in (1, 2)]
    assert sorted(drawn) == sorted(expected)


def test_a_sandbox_that_fails_ends_the_run(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> sandbox.ProgramResult:
        raise sandbox.SandboxError("it has no temporary folder")

    monkeypatch.setattr(sandbox, "run", fails)
    with pytest.raises(TrainingError, match="could not be run: it has no temporary folder") as e:
        complete(scripted(tokenizer, program("1") + END))
    assert e.value.alone


def test_describe_tries_the_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert "level limits" in describe(Tools(guards="limits"))
    assert execute(["1"], Tools(guards="limits")) == Answer("1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bubblewrap is not on PATH"):
        describe(Tools())
