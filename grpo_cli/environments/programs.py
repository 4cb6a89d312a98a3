"""Tool-integrated reasoning: runs the programs that a completion writes while it is generated.

    So the number is                                   sampled
    ```python
    print(6 * 7)
    ```
    ```output                                          written by the tool
    42
    ```
    The answer is 42.                                  sampled

A turn of the model ends at the end of a ```python block, the program runs in the sandbox, what it
prints is appended as an ```output block, and the model has its next turn: ToRA, arXiv 2309.17452,
section 2; DeepSeekMath, arXiv 2402.03300, section 3. Tokens that the tool wrote are marked as not
sampled. `loop.EpisodeLoop` takes the turns; here are the text of a completion and its programs.

State. Later blocks see what earlier ones have defined, as in a notebook. No interpreter is kept
alive for that: each call starts a fresh one that runs the earlier blocks again, their output thrown
away. So a call depends on its blocks alone, nothing is lost with a process or when a run goes on
elsewhere, and a completion that waits for its turn holds no memory. It costs the earlier blocks'
time once more in each call. Random numbers are seeded alike in each, so that a block that is run
again does the same; one that looks at the clock need not.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli import sandbox
from grpo_cli.config.schema import EpisodeSettings, Tools
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.program_calls import closed_program, execute
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.errors import TrainingError
from grpo_cli.generation.stop_strings import StopStrings
from grpo_cli.records import Prompt
from grpo_cli.scoring.calls import own_cores

FENCE = "```\n"  # ends every block whose closing line has nothing behind it
PIECE = 512  # tokens, a power of two: the end of a block that no stop string sees is found soon
MOST_THREADS = 16
NAME = "python"  # of the tool


def program_loop(
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    *,
    order: str = "auto",
    threads: int | None = None,
) -> EpisodeLoop:
    """Returns what makes completions whose programs are run.

    A completion ends as it would without programs: with an eos, a stop string of the sampling
    settings in what was sampled, or with as many tokens as these allow, the tool's included.

    Args:
        order: see `EpisodeSettings`.
        threads: programs run at the same time; None: one for each of this process's cores.
    """
    return EpisodeLoop(
        ProgramSessions(tools, threads),
        {"": ProgramDialogue(tokenizer, tools.max_calls)},
        EpisodeSettings(order=order),
    )


class ProgramDialogue:
    """One text in which programs and their outputs follow each other: `loop.Dialogue`."""

    is_one_text = True
    tools: Sequence[Mapping[str, Any]] = (
        {"type": "function", "function": {"name": NAME, "parameters": {"type": "object"}}},
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_calls: int) -> None:
        self.tokenizer, self.max_calls = tokenizer, max_calls
        self.piece_tokens = PIECE
        self._fence = StopStrings(tokenizer, [FENCE])

    def with_observation(
        self, prompt: Prompt, observation: str | Sequence[Message], limit: int
    ) -> Prompt:
        """Returns the prompt: programs begin with no observation."""
        return prompt

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns the end of a block while calls are left. Nothing stops at what is not run."""
        return (FENCE,) if num_calls < self.max_calls else ()

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns where the first program ends, else where an eos does; see `loop.Dialogue`.

        An eos right behind a program's closing fence does not count. After the last call there is
        no program.
        """
        has_calls = num_calls < self.max_calls
        # What has stopped, and at no text, has stopped at an eos.
        has_eos = has_stopped and not (has_calls and self._fence.ends(ids))
        if has_calls:
            end = len(ids) - has_eos
            source = closed_program(self._text(ids[:end]), at_end=has_eos)
            has_program = source is not None
            # What was drawn behind it, where the generator did not see the end, is dropped.
            while source is not None and end > before + 1:
                source = closed_program(self._text(ids[: end - 1]))
                end -= source is not None
            if has_program:
                return end
        return len(ids) if has_eos else None

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        """Returns a turn as a message, with its program as the call of a tool."""
        text = self._text(ids)
        message: Message = {"role": "assistant", "content": text}
        if at_stop_string or num_calls == self.max_calls:
            return message
        source = closed_program(text, at_end=True)
        if source is not None:
            function = {"name": NAME, "arguments": {"code": source}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens of an output, which `Tools.output_characters` has bounded already."""
        shown = "".join(f"```output\n{m['content']}\n```\n" for m in messages)
        return self._encoded(shown if self._text(turn).endswith("\n") else "\n" + shown)

    def _text(self, ids: Sequence[int]) -> str:
        """Decodes token ids, without special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _encoded(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows a newline; none of them is a special token."""

        def encoded(text: str) -> list[int]:
            found: Any = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            return list(found["input_ids"])

        newline, both = encoded("\n"), encoded("\n" + text)
        if both[: len(newline)] == newline:  # without the space that some put before a text
            return both[len(newline) :]
        return encoded(text)


class ProgramSessions:
    """Opens the programs of completions, which run in threads that wait for the sandbox.

    The threads end once this is no longer referred to and running programs have ended, which they
    do within their limits.
    """

    def __init__(self, tools: Tools, threads: int | None = None) -> None:
        self.tools = tools
        self.pool = ThreadPoolExecutor(threads or min(own_cores(), MOST_THREADS), "program")

    def open(self, name: str, row: Mapping[str, Any], seed: int) -> ProgramSession:
        """Returns the programs of one completion."""
        return ProgramSession(self)


class ProgramSession:
    """The programs of one completion: `episode.EnvironmentSession`."""

    def __init__(self, sessions: ProgramSessions) -> None:
        self._sessions = sessions
        self._blocks: list[str] = []  # that later calls run again
        self._task: Future[None] | None = None
        self._lock = threading.Lock()
        self._is_open = True

    def reset(self) -> Future[Observation]:
        """Begins with nothing: the prompt stays as it is."""
        return _done(Observation())

    def step(self, message: Message) -> Future[Observation]:
        """Runs a turn's program; a turn without one ends the completion.

        Its exception is a TrainingError if the sandbox has failed, whatever the program is worth.
        """
        calls = message.get("tool_calls")
        if not calls:
            return _done(Observation(done=True))
        answer: Future[Observation] = Future()
        source = calls[0]["function"]["arguments"]["code"]
        self._task = self._sessions.pool.submit(self._run, source, answer)
        return answer

    def finish(self) -> Future[Observation]:
        """Ends: programs give no rewards."""
        return _done(Observation())

    def abandon(self) -> None:
        """Does not begin a program that waits, nor answer with one that runs."""
        with self._lock:
            self._is_open = False
        if self._task is not None:
            self._task.cancel()

    def _run(self, source: str, answer: Future[Observation]) -> None:
        observation = Observation()
        failure: BaseException | None = None
        try:
            observation = self._observe(source)
        except sandbox.SandboxError as error:
            failure = TrainingError(
                f"a program in a completion could not be run: {error}", alone=True
            )
            failure.__cause__ = error
        except BaseException as error:  # a fault of ours, which the thread that waits raises
            failure = error
        with self._lock:
            if not self._is_open:
                return
            if failure is None:
                answer.set_result(observation)
            else:
                answer.set_exception(failure)

    def _observe(self, source: str) -> Observation:
        found = execute([*self._blocks, source], self._sessions.tools)
        if found.keeps:
            self._blocks.append(source)
        call = ToolCall(NAME, found.status != "ok", found.status == "timeout")
        return Observation([{"role": "tool", "content": found.text}], calls=[call])


def _done(observation: Observation) -> Future[Observation]:
    future: Future[Observation] = Future()
    future.set_result(observation)
    return future
