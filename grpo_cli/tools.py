"""Tool-integrated reasoning: programs that a completion writes are run while it is generated.

    So the number is                                   sampled
    ```python
    print(6 * 7)
    ```
    ```output                                          written by the tool
    42
    ```
    The answer is 42.                                  sampled

Generation stops at the end of a ```python block, the program runs in the sandbox, what it prints is
appended as an ```output block, and generation goes on: ToRA, arXiv 2309.17452, section 2;
DeepSeekMath, arXiv 2402.03300, section 3. Tokens that the tool wrote are marked as not sampled.

State. Later blocks see what earlier ones have defined, as in a notebook. No interpreter is kept
alive for that: each call starts a fresh one that runs the earlier blocks again, their output thrown
away. So a call depends on its blocks alone, nothing is lost with a process or when a run goes on
elsewhere, and a completion that waits for its turn holds no memory. It costs the earlier blocks'
time once more in each call. Random numbers are seeded alike in each, so that a block that is run
again does the same; one that looks at the clock need not.

Pieces. Completions are continued together, in rounds, as prompts of their own, each by a piece of
at most `PIECE` tokens. Where a piece ends and what it is drawn from depend on its completion alone:
which completions share a round, and how long programs take, changes no result. No piece makes
prompt and completion longer than the whole would be, so an engine's longest sequence stays what it
is.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import re
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import heartbeat, sandbox, tool_runner
from grpo_cli.config import Tools
from grpo_cli.drafts import OnGroup, ignore
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation import Generator
from grpo_cli.rollouts import Completion, derive_seed
from grpo_cli.sampling import Sampling
from grpo_cli.stop_strings import StopStrings

FENCE = "```\n"  # ends every block whose closing line has nothing behind it
PIECE = 512  # tokens: a power of two
PATIENCE = 0.5  # seconds that a round waits for programs under way, once it has something to do
BEAT_SECONDS = 1.0
MOST_THREADS = 16

_PYTHON = ("python", "py", "python3")
_FENCE_LINE = re.compile(r"([ \t]*+)(`{3,}+)[ \t]*+([^`\s]*+)[^`]*+")  # possessive: linear time


def limits_of(tools: Tools) -> sandbox.Limits:
    """Of one call."""
    return sandbox.Limits(seconds=tools.seconds, memory_mb=tools.memory_mb)


def describe(tools: Tools) -> str:
    """One line for the log: which guards programs run under. Also tries them once.

    Raises:
        UserError: fewer work here than `tools.guards` asks for.
    """
    sandbox.sweep()  # what runs that were killed have left
    try:
        return sandbox.describe(tools.guards, tools.site_packages)
    except sandbox.SandboxError as error:
        raise UserError(f"tools: {error}") from error


# One call


@dataclass(frozen=True)
class Answer:
    """What came of a call."""

    text: str  # what is shown: the output, and the error behind it
    status: str = "ok"  # or "error", "timeout", "memory", "output", ...: see `sandbox.Finished`
    keeps: bool = True  # whether later calls run the block again: not if it was stopped


def execute(blocks: Sequence[str], tools: Tools) -> Answer:
    """Runs the blocks of a solution; what comes of the last one.

    Raises:
        SandboxError: the sandbox failed, whatever the program is worth.
    """
    token = os.urandom(16).hex()  # so that nothing a program prints is taken for the runner's word
    given = json.dumps({"token": token, "blocks": list(blocks)})
    finished = sandbox.run(
        _runner(),
        given,
        limits=limits_of(tools),
        guards=tools.guards,
        site_packages=tools.site_packages,
    )
    parts = finished.stdout.split(token)
    if len(parts) == 3:
        status, _, error = parts[1].partition("\n")
        keeps = status != "memory"
    else:
        status, error, keeps = _stopped(finished, tools)
    # How far one had come that was stopped for time or memory depends on the machine.
    output = parts[0].rstrip("\n") if status in ("ok", "error", "output") else ""
    shown = [_shortened(part, tools.output_characters) for part in (output, error) if part]
    return Answer("\n".join(shown), status, keeps)


def _stopped(finished: sandbox.Finished, tools: Tools) -> tuple[str, str, bool]:
    """(status, error, keeps) of a call whose runner did not come to its end."""
    limits, status = limits_of(tools), finished.status
    said = {
        "timeout": f"TimeoutError: ran longer than {tools.seconds:g} s",
        "memory": f"MemoryError: used more than {limits.memory_mb} MiB",
        "disk": f"OSError: wrote more than {limits.file_mb} MiB, or too many files",
        "output": f"RuntimeError: printed more than {limits.output_kb} KiB",
    }
    if status in ("ok", "error"):
        code = finished.returncode
        return "error", f"RuntimeError: the program ended Python itself (exit code {code})", False
    return status, said.get(status, f"RuntimeError: {finished.reason}"), False


def _shortened(text: str, most: int) -> str:
    """The text; of a long one its beginning and its end, `most` characters together."""
    if len(text) <= most:
        return text
    head, tail = most - most // 2, most // 2
    mark = f"\n[... {len(text) - most} characters left out ...]\n"
    return text[:head] + mark + text[len(text) - tail :]


@functools.cache
def _runner() -> str:
    return Path(tool_runner.__file__).read_text(encoding="utf-8")


def closed_program(text: str, at_end: bool = False) -> str | None:
    """The source of the first Python block of a text that is closed; None if none is.

    A block is closed by a line of its fence alone. The last line counts once it has its newline,
    for it may be the beginning of another.

    Args:
        at_end: nothing follows: the last line counts as it is.
    """
    indent, fence, mark = "", "", ""
    inside: list[str] = []
    lines = text.split("\n")
    for line in lines if at_end else lines[:-1]:
        found = _FENCE_LINE.fullmatch(line.rstrip())
        if not fence:
            if found:
                indent, fence, mark = found.groups()
                inside = []
        elif found and found[3] == "" and len(found[2]) >= len(fence):
            if mark.lower() in _PYTHON:
                return _source(inside, indent)
            fence = ""
        else:
            inside.append(line)
    return None


def _source(lines: Sequence[str], indent: str) -> str:
    """A block's lines as a program, without what they are all indented by."""
    lines = [line.removeprefix(indent) for line in lines]
    source = "".join(line + "\n" for line in lines)
    first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent(source) if first[:1] in (" ", "\t") else source


# Completions under way


@dataclass
class _Draft:
    """A completion under way."""

    number: int  # of its prompt
    sample: int  # its place in the group
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    begin: int = 0  # of the tokens sampled since the tool last wrote
    pieces: int = 0  # that were generated
    sampled_at: int | None = None
    blocks: list[str] = field(default_factory=list)  # that later calls run again
    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    source: str = ""  # the program under way
    finish_reason: Literal["stop", "length"] | None = None

    def cut(self, length: int) -> None:
        del self.ids[length:], self.logprobs[length:], self.sampled[length:]

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            self.ids,
            self.logprobs,
            self.finish_reason,
            self.sampled_at,
            None if all(self.sampled) else self.sampled,
            self.calls,
            self.errors,
            self.timeouts,
        )


class ToolGenerator:
    """Generates with another generator, and runs the programs that completions write.

    A completion ends as it would without programs: with an eos, a stop string of `sampling` in what
    was sampled, or with `sampling.max_tokens` tokens, those of the tool included. An eos right
    behind a program's closing fence is taken off and the program run. After the last call no
    program is run, and nothing stops at its end: the completion goes on to its own.
    """

    def __init__(
        self,
        inner: Generator,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools,
        *,
        threads: int | None = None,
        go_on: Callable[[bool], bool] = bool,
    ) -> None:
        """Wraps `inner`, which `close` closes too; `stop` leaves it be.

        Args:
            threads: programs run at the same time; None: one for each of this process's cores.
            go_on: given whether this process has something to generate in the next round, says
                whether there is such a round. Where all processes have to call `inner.generate`
                together it is whether any has, and those that have not call it without prompts.
        """
        self.inner, self.tokenizer, self.tools = inner, tokenizer, tools
        self.samples_from_policy = inner.samples_from_policy
        self.computes_here = inner.computes_here
        self.threads = threads or min(_cores(), MOST_THREADS)
        self.go_on = go_on
        self.fence = StopStrings(tokenizer, [FENCE])
        self._executor: ThreadPoolExecutor | None = None

    @property
    def cache_tokens(self) -> int | None:
        return self.inner.cache_tokens

    @cache_tokens.setter
    def cache_tokens(self, tokens: int | None) -> None:
        self.inner.cache_tokens = tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """As the protocol says.

        Raises:
            TrainingError: the sandbox failed.
        """
        work = _Work(self, len(prompts), num_generations, sampling, on_group)
        piece = work.next_piece(0, 0)
        try:
            self.inner.generate(prompts, num_generations, piece, seeds, work.begun)
            while self.go_on(work.settle()):
                piece, drafts = work.take_round()

                def grown(i: int, group: list[Completion], drafts: list[_Draft] = drafts) -> None:
                    work.grow(drafts[i], group[0])

                self.inner.generate(
                    [[*prompts[d.number], *d.ids] for d in drafts],
                    1,
                    piece,
                    [derive_seed(seeds[d.number], d.sample, d.pieces) for d in drafts],
                    grown,
                )
        finally:
            work.abandon()
        return [work.groups[n] for n in range(len(prompts))]

    def submit(self, blocks: Sequence[str]) -> Future[Answer]:
        """Has blocks executed in a thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, "tool")
        return self._executor.submit(execute, blocks, self.tools)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        return self.inner.update_weights(policy, step)

    def rest(self) -> None:
        self.inner.rest()

    def stop(self) -> None:
        """Ends the threads, not the inner generator. More can be generated later."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)  # a call ends within its limits
            self._executor = None

    def close(self) -> None:
        self.stop()
        self.inner.close()

    def text(self, ids: Sequence[int]) -> str:
        """Decoded, without special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encoded(self, text: str) -> list[int]:
        """Tokens of a text that follows a newline; none of them special, whatever it says."""
        newline, both = (self._encoded(t) for t in ("\n", "\n" + text))
        if both[: len(newline)] == newline:  # without the space that some put before a text
            return both[len(newline) :]
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        found: Any = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(found["input_ids"])


class _Work:
    """What one `generate` has to do: completions that are ready to grow, or wait for a program."""

    def __init__(
        self,
        tool: ToolGenerator,
        num_prompts: int,
        num_generations: int,
        sampling: Sampling,
        on_group: OnGroup,
    ) -> None:
        self.tool, self.sampling, self.on_group = tool, sampling, on_group
        self.stop = StopStrings(tool.tokenizer, sampling.stop)
        self.drafts = [[_Draft(n, j) for j in range(num_generations)] for n in range(num_prompts)]
        self.groups: dict[int, list[Completion]] = {}
        self.ready: list[_Draft] = []
        self.waiting: dict[Future[Answer], _Draft] = {}

    # Rounds

    def next_piece(self, tokens: int, calls: int) -> Sampling:
        """How a completion with some tokens and calls goes on."""
        sampling = self.sampling
        room = sampling.max_tokens - tokens
        most = 1 << (min(room, PIECE).bit_length() - 1)
        return replace(
            sampling,
            max_tokens=most,
            min_tokens=min(max(sampling.min_tokens - tokens, 0), most),
            stop=(*sampling.stop, FENCE) if calls < self.tool.tools.max_calls else sampling.stop,
        )

    def settle(self) -> bool:
        """Takes what programs have come to; whether there is something to generate.

        Waits while there is not and some are under way, and then a moment for the others: a round
        takes longer than most programs.
        """
        end = math.inf
        while self.waiting:
            if self.ready:
                end = min(end, time.monotonic() + PATIENCE)
            left = end - time.monotonic()
            if left <= 0:
                break
            ended, _ = wait(self.waiting, min(left, BEAT_SECONDS), FIRST_COMPLETED)
            _beat()
            for future in ended:
                self._answered(self.waiting.pop(future), future)
        return bool(self.ready)

    def take_round(self) -> tuple[Sampling, list[_Draft]]:
        """The most that can be generated in one call; the others stay ready."""
        kinds: dict[Sampling, list[_Draft]] = collections.defaultdict(list)
        for d in self.ready:
            kinds[self.next_piece(len(d.ids), d.calls)].append(d)
        if not kinds:  # other processes have something
            return self.next_piece(0, 0), []
        piece = max(kinds, key=lambda kind: len(kinds[kind]))
        chosen = kinds.pop(piece)
        self.ready = [d for others in kinds.values() for d in others]
        return piece, chosen

    def abandon(self) -> None:
        """Lets go of programs that have not begun. Those that have end within their limits."""
        for future in self.waiting:
            future.cancel()

    # A completion

    def begun(self, number: int, group: list[Completion]) -> None:
        for draft, completion in zip(self.drafts[number], group, strict=True):
            self.grow(draft, completion)

    def grow(self, d: _Draft, piece: Completion) -> None:
        """Adds a piece, up to the first thing in it that ends the completion or calls a program."""
        before = len(d.ids)
        d.ids += piece.ids
        d.logprobs += piece.logprobs
        d.sampled += [True] * len(piece.ids)
        d.pieces += 1
        if piece.sampled_at is not None:
            known = piece.sampled_at if d.sampled_at is None else d.sampled_at
            d.sampled_at = min(known, piece.sampled_at)
        stops_at = self._stop(d, before)
        asked = d.calls < self.tool.tools.max_calls
        at_fence = asked and self.tool.fence.ends(d.ids[d.begin :])
        # What has ended, and by no text, has ended by an eos.
        eos = piece.finish_reason == "stop" and stops_at != len(d.ids) and not at_fence
        program_at, source = self._program(d, before, eos)
        if source is not None and (stops_at is None or program_at < stops_at):
            d.cut(program_at)
            self._call(d, source)
        elif stops_at is not None:
            d.cut(stops_at)
            self._finish(d, "stop")
        elif eos:
            self._finish(d, "stop")
        else:
            self._go_on(d)

    def _stop(self, d: _Draft, before: int) -> int | None:
        """Where one of the user's stop strings is complete.

        The inner generator finds those that lie within a piece. One that begins in the piece before
        is found here.
        """
        if not self.stop.stop:
            return None
        first = max(before + 1, self.sampling.min_tokens)
        across = before + self.stop.enough if before > d.begin else before
        for end in range(first, len(d.ids) + 1):
            if end > across and end < len(d.ids):
                continue
            if self.stop.ends(d.ids[d.begin : end]):
                return end
        return None

    def _program(self, d: _Draft, before: int, eos: bool) -> tuple[int, str | None]:
        """(where the first program ends that was not run yet, its source)."""
        if d.calls == self.tool.tools.max_calls:
            return 0, None
        end = len(d.ids) - eos
        source = closed_program(self.tool.text(d.ids[d.begin : end]), at_end=eos)
        # What the inner generator has drawn behind it, where it did not see the end, is dropped.
        while source is not None and end > before + 1:
            earlier = closed_program(self.tool.text(d.ids[d.begin : end - 1]))
            if earlier is None:
                break
            source, end = earlier, end - 1
        return end, source

    def _call(self, d: _Draft, source: str) -> None:
        if len(d.ids) == self.sampling.max_tokens:  # no room for what it would print
            self._finish(d, "length")
            return
        d.calls += 1
        d.source = source
        self.waiting[self.tool.submit([*d.blocks, source])] = d

    def _answered(self, d: _Draft, future: Future[Answer]) -> None:
        """Appends what a program has come to."""
        try:
            answer = future.result()
        except sandbox.SandboxError as error:
            raise TrainingError(
                f"a program in a completion could not be run: {error}", alone=True
            ) from error
        d.errors += answer.status != "ok"
        d.timeouts += answer.status == "timeout"
        if answer.keeps:
            d.blocks.append(d.source)
        shown = f"```output\n{answer.text}\n```\n"
        if not self.tool.text(d.ids[d.begin :]).endswith("\n"):
            shown = "\n" + shown
        ids = self.tool.encoded(shown)[: self.sampling.max_tokens - len(d.ids)]
        d.ids += ids
        d.logprobs += [0.0] * len(ids)
        d.sampled += [False] * len(ids)
        d.begin = len(d.ids)
        self._go_on(d)

    def _go_on(self, d: _Draft) -> None:
        if len(d.ids) == self.sampling.max_tokens:
            self._finish(d, "length")
        else:
            self.ready.append(d)

    def _finish(self, d: _Draft, reason: Literal["stop", "length"]) -> None:
        d.finish_reason = reason
        group = self.drafts[d.number]
        if all(other.finish_reason is not None for other in group):
            self.groups[d.number] = [other.completion() for other in group]
            self.on_group(d.number, self.groups[d.number])


def _cores() -> int:
    """Of this process's share of the machine."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local)


def _beat() -> None:
    """Completions may be begun ahead, in a thread whose silence is no stall (`ahead.py`)."""
    if threading.current_thread() is threading.main_thread():
        heartbeat.beat()
