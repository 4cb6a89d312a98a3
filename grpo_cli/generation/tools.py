"""Tool-integrated reasoning: runs the programs that a completion writes while it is generated.

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
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from grpo_cli import sandbox
from grpo_cli.config.schema import Tools
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, OnGroup, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.generation.tool_calls import Answer, closed_program, execute
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Prompt
from grpo_cli.scoring.calls import own_cores

FENCE = "```\n"  # ends every block whose closing line has nothing behind it
PIECE = 512  # tokens: a power of two
PATIENCE = 0.5  # seconds that a round waits for programs under way, once it has something to do
BEAT_SECONDS = 1.0
MOST_THREADS = 16


@dataclass
class _Partial:
    """A completion that is still growing."""

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


class ToolGenerator(Generator):
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
        has_round: Callable[[bool], bool] = bool,
    ) -> None:
        """Wraps `inner`, which stays the caller's to update and to close.

        Args:
            threads: programs run at the same time; None: one for each of this process's cores.
            has_round: given whether this process has something to generate in the next round, says
                whether there is such a round. Where all processes have to call `inner.generate`
                together it is whether any has, and those that have not call it without prompts.
        """
        self.inner, self.tokenizer, self.tools = inner, tokenizer, tools
        self.accepts_inputs = inner.accepts_inputs
        self.threads = threads or min(own_cores(), MOST_THREADS)
        self.any_has_round = has_round
        self.fence = StopStrings(tokenizer, [FENCE])

    def sample(self, request: Request, hand_over: OnGroup) -> None:
        """Hands over completions whose programs have been run.

        Raises:
            TrainingError: the sandbox failed.
        """
        prompts, seeds = request.prompts, request.seeds
        pool = ThreadPoolExecutor(self.threads, "tool")
        work = _ToolSession(self, request, pool, hand_over)
        piece = work.next_piece(0, 0)
        try:
            self.inner.generate(prompts, request.num_generations, piece, seeds, work.begun)
            while self.any_has_round(work.settle()):
                piece, partials = work.take_round()
                self.inner.generate(
                    [_continued(prompts[d.number], d.ids) for d in partials],
                    1,
                    piece,
                    [derive_seed(seeds[d.number], d.sample, d.pieces) for d in partials],
                    partial(work.grown, partials),
                )
        finally:  # running programs end within their limits
            pool.shutdown(wait=False, cancel_futures=True)

    def text(self, ids: Sequence[int]) -> str:
        """Decodes token ids, without special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def encoded(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows a newline; none of them is a special token."""
        newline, both = (self._encoded(t) for t in ("\n", "\n" + text))
        if both[: len(newline)] == newline:  # without the space that some put before a text
            return both[len(newline) :]
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        found: Any = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(found["input_ids"])


class _ToolSession:
    """The completions of one `generate`: those ready to grow, and those waiting for a program."""

    def __init__(
        self, tool: ToolGenerator, request: Request, pool: Executor, hand_over: OnGroup
    ) -> None:
        self.tool, self.sampling = tool, request.sampling
        self.pool, self.hand_over = pool, hand_over
        self.stop = StopStrings(tool.tokenizer, self.sampling.stop)
        self.partials = [
            [_Partial(n, j) for j in range(request.num_generations)]
            for n in range(len(request.prompts))
        ]
        self.ready: list[_Partial] = []
        self.waiting: dict[Future[Answer], _Partial] = {}

    # Rounds

    def next_piece(self, tokens: int, calls: int) -> Sampling:
        """Returns how a completion with this many tokens and calls is continued."""
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
        """Takes the results of programs; returns whether there is something to generate.

        Waits while there is nothing and programs are running, then a moment for the others: a round
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
            heartbeat.beat_of_main()  # prefetching runs in threads, which may wait longer
            for future in ended:
                self._answered(self.waiting.pop(future), future)
        return bool(self.ready)

    def take_round(self) -> tuple[Sampling, list[_Partial]]:
        """Returns the most completions that one call can continue; the others stay ready."""
        kinds: dict[Sampling, list[_Partial]] = collections.defaultdict(list)
        for d in self.ready:
            kinds[self.next_piece(len(d.ids), d.calls)].append(d)
        if not kinds:  # other processes have something
            return self.next_piece(0, 0), []
        piece = max(kinds, key=lambda kind: len(kinds[kind]))
        chosen = kinds.pop(piece)
        self.ready = [d for others in kinds.values() for d in others]
        return piece, chosen

    # A completion

    def begun(self, number: int, group: list[Completion]) -> None:
        for d, piece in zip(self.partials[number], group, strict=True):
            self.grow(d, piece)

    def grown(self, partials: Sequence[_Partial], i: int, group: list[Completion]) -> None:
        self.grow(partials[i], group[0])

    def grow(self, d: _Partial, piece: Completion) -> None:
        """Adds a piece, up to the first thing in it that ends the completion or calls a program."""
        before = len(d.ids)
        d.ids += piece.ids
        d.logprobs += piece.sampling_logprobs
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

    def _stop(self, d: _Partial, before: int) -> int | None:
        """Returns where one of the user's stop strings is complete; None if none is.

        The inner generator finds those that lie within a piece. One that begins in the piece before
        is found here.
        """
        if not self.stop.stop:
            return None
        shortest = self.sampling.min_tokens - d.begin
        end = self.stop.first_end(d.ids[d.begin :], before - d.begin, shortest)
        return None if end is None else d.begin + end

    def _program(self, d: _Partial, before: int, eos: bool) -> tuple[int, str | None]:
        """Returns where the first program ends that was not run yet, and its source."""
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

    def _call(self, d: _Partial, source: str) -> None:
        if len(d.ids) == self.sampling.max_tokens:  # no room for what it would print
            self._finish(d, "length")
            return
        d.calls += 1
        d.source = source
        self.waiting[self.pool.submit(execute, [*d.blocks, source], self.tool.tools)] = d

    def _answered(self, d: _Partial, future: Future[Answer]) -> None:
        """Appends the output of a program."""
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

    def _go_on(self, d: _Partial) -> None:
        if len(d.ids) == self.sampling.max_tokens:
            self._finish(d, "length")
        else:
            self.ready.append(d)

    def _finish(self, d: _Partial, reason: Literal["stop", "length"]) -> None:
        d.finish_reason = reason
        group = self.partials[d.number]
        if all(other.finish_reason is not None for other in group):
            self.hand_over(d.number, [other.completion() for other in group])


def _continued(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Returns the prompt with what was completed of it so far as its end."""
    return replace(prompt, ids=[*prompt.ids, *ids])
