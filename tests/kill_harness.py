"""Starts `grpo train` again and again, and ends it at a chosen moment, for test_kill.py.

    python tests/kill_harness.py            a job a line on stdin, an answer a line on stdout
    torchrun ... tests/kill_harness.py JOB  one process of one job: by torchrun's own command

Importing torch takes longer than the runs here, so the first imports it once and forks: one process
a job, in which torchrun's agent runs where there are several workers, which it forks as well.

A moment is the n-th time that something happens in a process: a beat of a stage (a token of all
rows, a micro-batch, a stage's begin), a call of the reward function, an operation on a file of the
run, a half of a tensor written, a checkpoint that has got its name.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.programs import PATIENCE

HANGS = -1000  # in place of the exit code of a job that takes longer than PATIENCE
LARGE = 500  # bytes: torch.save writes much that is smaller
WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")

_happens: Callable[[str], bool] = lambda what: False  # noqa: E731 - of this process, once armed


def noisy(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Few values, so that groups without a signal are common, and Python's and numpy's noise."""
    half = len(completion_ids) // 2
    rewards = []
    for number, ids in enumerate(completion_ids):
        if number in (0, half):
            _is_scoring()
        share = sum(i % 2 == 0 for i in ids) / len(ids)
        noise = 0.5 * (random.random() < 0.02) + 0.25 * (np.random.random() < 0.02)
        rewards.append(float(share > 0.6) + noise)
    return rewards


class Talks:
    """An environment of three turns, whose replies and rewards depend on its seed."""

    def reset(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        self.random, self.turns = random.Random(seed), 0
        return {"messages": [{"role": "user", "content": f" {self.random.randrange(9)}"}]}

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        self.turns += 1
        if self.turns == 3:
            return {"reward": float(len(message["content"]) % 2), "done": True}
        text = f"again {self.random.randrange(100)}"
        return {"messages": [{"role": "user", "content": text}], "reward": 0.1}


def evens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """As `tests.training.test_train.evens`, without that file's imports."""
    _is_scoring()
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def _is_scoring() -> None:
    from grpo_cli.distributed import heartbeat

    if heartbeat._stage == "reward":  # and not in an evaluation
        _happens("reward function")


class Moments:
    """Counts what happens in this process, and acts when the next moment of its list has come.

    A moment: {what, number, rank, start, signal, of}; `of` is "one" process, all "workers", or
    "all", torchrun among them; `start` says which of torchrun's. Or {after: seconds} in place of
    what and number: then it comes wherever the process is. A second one is counted from the first.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = job["folder"]
        self.log = job["log"]
        self.rank = int(os.environ.get("RANK", "0"))
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        mine = (self.rank, start)
        self.left = [m for m in job["moments"] if (m.get("rank", 0), m.get("start", 0)) == mine]
        self.seen: Counter[str] = Counter()
        self.silent = threading.local()
        if self.left and "after" in self.left[0]:
            threading.Thread(target=self.wait, daemon=True).start()

    def happens(self, what: str) -> bool:
        """Counts; acts if it is time to. With several threads the count may be off, which is well.

        Returns:
            Whether the moment is the next: what is to be half done then calls `act` itself.
        """
        if getattr(self.silent, "on", False):
            return False
        self.seen[what] += 1
        if not self.left or self.left[0].get("what") != what:
            return False
        if self.seen[what] != self.left[0]["number"]:
            return False
        if not what.startswith("half"):
            self.act()
        return True

    def wait(self) -> None:
        while not self.seen["generate"]:  # seconds of training, not of getting there
            time.sleep(0.002)
        time.sleep(self.left[0]["after"])
        self.act()

    def act(self) -> None:
        from grpo_cli.distributed import heartbeat

        self.silent.on = True
        moment = self.left.pop(0)
        self.seen.clear()
        said = {**moment, "stage": heartbeat._stage, "step": heartbeat._step}
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(json.dumps(said) + "\n")
        number = moment.get("signal", signal.SIGKILL)
        of = moment.get("of", "one")
        if of != "one" and self.processes > 1:
            agent = psutil.Process(os.getppid())
            for process in (*([agent] if of == "all" else []), *agent.children()):
                if process.pid != os.getpid():
                    process.send_signal(number)
        os.kill(os.getpid(), number)
        if number == signal.SIGKILL:
            time.sleep(PATIENCE)
        self.silent.on = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Of every operation on a file of the run that changes something, before it is done."""
        if event == "open":
            if not (isinstance(args[2], int) and args[2] & WRITES):
                return
        elif event not in CHANGES:
            return
        if not isinstance(args[0], (str, os.PathLike)) or not str(args[0]).startswith(self.folder):
            return
        if "/logs" in str(args[0])[len(self.folder) :]:  # of the watch, that the run has no part in
            return
        if not self.seen["generate"]:  # what comes before the first step is no moment of its own
            return
        self.happens("file")

    def arm(self) -> None:
        """From here on what happens is counted."""
        global _happens
        import torch

        from grpo_cli.checkpoints import checkpointer, manifest
        from grpo_cli.distributed import heartbeat

        _happens = self.happens
        touch, at, step = heartbeat.touch, heartbeat.at, torch.optim.AdamW.step
        write, name = manifest.Hashing.write, checkpointer.give_name

        def touches() -> None:  # of every beat, and around every collective
            touch()
            self.happens(heartbeat._stage)

        def enters(stage: str, number: int | None = None) -> None:
            at(stage, number)
            self.happens(stage)

        def steps(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.happens("optimizer step")
            out = step(optimizer, *args, **kwargs)
            self.happens("optimizer step")
            return out

        def writes(stream: manifest.Hashing, data: Any) -> int:
            view = memoryview(data).cast("B")
            if len(view) > LARGE and self.happens("half a write"):
                stream.file.write(view[: len(view) // 2])
                stream.file.flush()
                self.act()
            return write(stream, data)

        def names(partial: Path, path: Path) -> None:
            name(partial, path)
            self.happens("named")

        heartbeat.touch, heartbeat.at = touches, enters
        torch.optim.AdamW.step = steps  # type: ignore[method-assign]
        manifest.Hashing.write = writes  # type: ignore[method-assign]
        checkpointer.give_name = names
        sys.addaudithook(self.audit)


def train(job: dict[str, Any]) -> None:
    moments = Moments(job)
    moments.arm()
    from grpo_cli import cli

    code = cli.run_command(["train", *job["args"]])
    if moments.rank == 0:
        with open(job["log"], "a", encoding="utf-8") as log:
            log.write(json.dumps({"counts": moments.seen}) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        sys.exit(code)


def launch(job: dict[str, Any]) -> None:
    """A job of one process, or as torchrun --standalone would start it."""
    if job["processes"] == 1:
        train(job)
        return
    from torch.distributed import run

    words = ["--standalone", "--start-method=fork", f"--nproc-per-node={job['processes']}"]
    words += [f"--max-restarts={job.get('restarts', 0)}"]
    arguments = run.parse_args([*words, "no-script"])
    arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"  # as run.run does
    arguments.rdzv_id = f"{os.getpid()}-{time.monotonic_ns()}"
    config, _, _ = run.config_from_args(arguments)
    run.elastic_launch(config=config, entrypoint=train)(job)


def forked(job: dict[str, Any]) -> int:
    """The exit code of a job in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            log = os.open(job["log"] + ".txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            launch(job)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:2000], file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + PATIENCE
    status = None
    while status is None and time.monotonic() < until:
        ended, found = os.waitpid(child, os.WNOHANG)
        status = found if ended else None
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # what a kill of one process may have left
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return HANGS
    return os.waitstatus_to_exitcode(status)


def serve() -> None:
    """Answers jobs until stdin ends."""
    import pyarrow.parquet  # noqa: F401
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.run
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    from grpo_cli.training import resume  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        code = forked(job)
        print(json.dumps({"code": code, "seconds": time.monotonic() - began}), flush=True)


def entries(log: Path) -> Iterator[dict[str, Any]]:
    """What processes have written to a job's log."""
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        yield json.loads(line)


def main(argv: Sequence[str]) -> None:
    if argv:
        train(json.loads(argv[0]))
    else:
        serve()


if __name__ == "__main__":
    from tests import kill_harness  # the module that rewards are imported from, not a second one

    kill_harness.main(sys.argv[1:])
