"""Tool-integrated reasoning: runs the programs in a completion while it is generated.

    So the number is                                   sampled
    ```python
    print(6 * 7)
    ```
    ```output                                          written by the tool
    42
    ```
    The answer is 42.                                  sampled

A turn of the model ends at the end of a ```python block. The program runs in the sandbox, its
output is appended as an ```output block, and the model has its next turn: ToRA, arXiv 2309.17452,
section 2; DeepSeekMath, arXiv 2402.03300, section 3. The tool's tokens are marked as not sampled.
`loop.EpisodeLoop` runs the turns; this file has the text of a completion and its programs.

State. Later blocks see the definitions of earlier ones, as in a notebook: each call starts a fresh
interpreter that runs the earlier blocks again and discards their output. So nothing is lost when a
run resumes, and a waiting completion holds no memory. Random numbers are seeded equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli import sandbox
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.program_calls import closed_program, execute
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.environments.settings import EpisodeSettings
from grpo_cli.errors import TrainingError
from grpo_cli.generation.settings import Tools
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.records import Prompt, decoded
from grpo_cli.scoring.calls import own_cores

FENCE = "```\n"  # stop string; misses blocks with trailing spaces after the closing fence
PIECE = 512  # tokens, a power of two; short, to find block ends that the stop string misses
MOST_THREADS = 16
NAME = "python"  # the tool's name


def program_loop(
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    *,
    order: str = "auto",
    threads: int | None = None,
) -> EpisodeLoop:
    """Returns the `EpisodeLoop` that samples completions and runs their programs.

    A completion ends as it would without programs: at an eos, at a stop string of the sampling
    settings in sampled text, or at their maximum number of tokens, which includes the tool's.

    Args:
        order: see `EpisodeSettings`.
        threads: number of programs that run concurrently; None: one per core of this process.
    """
    return EpisodeLoop(
        ProgramSessions(tools, threads),
        {"": ProgramDialogue(tokenizer, tools.max_calls)},
        EpisodeSettings(order=order),
    )


class ProgramDialogue:
    """A dialogue in which programs and their outputs form one text, as `chat.Chat` has messages.

    `num_calls` is the number of programs in the completion so far.
    """

    # Rewards read the text as a whole, and an output beyond the token budget is cut, not dropped.
    is_one_text = True
    tools: Sequence[Mapping[str, Any]] = (
        {"type": "function", "function": {"name": NAME, "parameters": {"type": "object"}}},
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_calls: int) -> None:
        self.tokenizer, self.max_calls = tokenizer, max_calls
        self.piece_tokens = PIECE
        self._fence = StopStrings(tokenizer, [FENCE])

    def with_observation(
        self, prompt: Prompt, observation: Sequence[Message], limit: int
    ) -> Prompt:
        """Returns the prompt unchanged, since programs have no first observation."""
        return prompt

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns the closing fence as a stop string; () after the last allowed call."""
        return (FENCE,) if num_calls < self.max_calls else ()

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns the end of the first program, else of an eos; None: the turn continues.

        An eos right after a program's closing fence is dropped. After the last allowed call, blocks
        are not programs.

        Args:
            ids: the tokens of the current turn, including the last piece.
            before: number of tokens from earlier pieces.
            has_stopped: whether the piece ended with an eos or one of `stops`.
        """
        has_calls = num_calls < self.max_calls
        # A piece that stopped without the fence has stopped at an eos.
        has_eos = has_stopped and not (has_calls and self._fence.ends(ids))
        if has_calls:
            end = len(ids) - has_eos
            source = closed_program(decoded(self.tokenizer, ids[:end]), at_end=has_eos)
            has_program = source is not None
            # If the generator missed the end, the tokens sampled after it are dropped.
            while source is not None and end > before + 1:
                source = closed_program(decoded(self.tokenizer, ids[: end - 1]))
                end -= source is not None
            if has_program:
                return end
        return len(ids) if has_eos else None

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        """Returns a turn as a message, with its program as a tool call."""
        text = decoded(self.tokenizer, ids)
        message: Message = {"role": "assistant", "content": text}
        if at_stop_string or num_calls == self.max_calls:
            return message
        source = closed_program(text, at_end=True)
        if source is not None:
            function = {"name": NAME, "arguments": {"code": source}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens of an output, which has at most `OUTPUT_CHARACTERS` characters."""
        shown = "".join(f"```output\n{m['content']}\n```\n" for m in messages)
        shown = shown if decoded(self.tokenizer, turn).endswith("\n") else "\n" + shown

        def encoded(text: str) -> list[int]:
            found: Any = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            return list(found["input_ids"])

        newline, both = encoded("\n"), encoded("\n" + shown)
        if both[: len(newline)] == newline:  # avoids the leading space that some tokenizers add
            return both[len(newline) :]
        return encoded(shown)


class ProgramSessions:
    """Opens sessions for programs of completions, which run in threads that wait for the sandbox.

    The threads end once this object is garbage-collected and the running programs have ended, which
    their time limits ensure.
    """

    def __init__(self, tools: Tools, threads: int | None = None) -> None:
        self.tools = tools
        self.pool = ThreadPoolExecutor(threads or min(own_cores(), MOST_THREADS), "program")

    def open(self, name: str, row: Mapping[str, Any], seed: int) -> ProgramSession:
        """Returns the session of one completion."""
        return ProgramSession(self)


class ProgramSession:
    """The programs of one completion, with the methods of `sessions.EnvironmentSession`."""

    def __init__(self, sessions: ProgramSessions) -> None:
        self._sessions = sessions
        self._blocks: list[str] = []  # blocks that later calls run again
        self._task: Future[Observation] | None = None

    def reset(self) -> Future[Observation]:
        """Returns an empty observation, which leaves the prompt unchanged."""
        return _done(Observation())

    def step(self, message: Message) -> Future[Observation]:
        """Runs a turn's program; a turn without one ends the completion.

        The future raises a TrainingError if the sandbox itself has failed, not the program.
        """
        if not (calls := message.get("tool_calls")):
            return _done(Observation(done=True))
        source = calls[0]["function"]["arguments"]["code"]
        self._task = self._sessions.pool.submit(self._run, source)
        return self._task

    def finish(self) -> Future[Observation]:
        """Returns an empty observation, since programs give no rewards."""
        return _done(Observation())

    def abandon(self) -> None:
        """Cancels a waiting program."""
        if self._task is not None:
            self._task.cancel()

    def _run(self, source: str) -> Observation:
        try:
            found = execute([*self._blocks, source], self._sessions.tools)
        except sandbox.SandboxError as error:
            text = f"a program in a completion could not be run: {error}"
            raise TrainingError(text, alone=True) from error
        if found.keeps:
            self._blocks.append(source)
        call = ToolCall(NAME, found.status != "ok", found.status == "timeout")
        return Observation([{"role": "tool", "content": found.text}], calls=[call])


def _done(observation: Observation) -> Future[Observation]:
    future: Future[Observation] = Future()
    future.set_result(observation)
    return future
