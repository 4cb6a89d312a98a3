"""A small job under `watch.Watch`, for tests/test_watch.py: it does as it is told, then misbehaves.

torchrun ... tests/watched.py MODE FOLDER STALL_SECONDS RANK: in "reward" of step 2, process RANK
does what MODE says.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from grpo_cli import heartbeat
from grpo_cli.blame import Seen
from grpo_cli.errors import TrainingError
from grpo_cli.ring import Ring
from grpo_cli.watch import Watch

STEPS = 4


def misbehave(mode: str, watch: Watch) -> None:
    if mode == "raise":
        raise ValueError("no reward for this")
    if mode == "error":
        raise TrainingError("reward 'evens' raised RuntimeError: only here")
    if mode == "together":  # as Workers.together raises it
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, heartbeat.where())
        error = TrainingError("only here")
        error.where = told[1]  # type: ignore[attr-defined]
        time.sleep(0.5 if watch.rank == 1 else 0)  # another than the guilty one tells
        raise error
    if mode == "exit":
        os._exit(3)
    if mode == "sys_exit":
        sys.exit(3)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # woken up, it is still here when its stack is asked for
    if mode == "sleep":
        never_returns()
    if mode == "stuck_thread":
        ThreadPoolExecutor().submit(never_returns)
        raise ValueError("a thread of mine never ends")
    if mode == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)
    if mode == "recv":  # in C++, of one that never sends
        with heartbeat.waiting():
            dist.recv(torch.zeros(1), src=(dist.get_rank() + 1) % dist.get_world_size(), tag=7)
    if mode == "stuck_others":  # 0 waits in C++ for 2, which sleeps, when 1 raises
        if watch.rank == 1:
            time.sleep(1)
            raise ValueError("the others are stuck")
        with heartbeat.waiting():
            dist.recv(torch.zeros(1), src=2) if watch.rank == 0 else never_returns()
    if mode == "regex":  # holds the GIL for hours
        re.match("(a+)+$", "a" * 60 + "b")
    if mode == "segfault":
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    if mode == "cleanup":  # what runs between the error and the top never ends
        try:
            raise ValueError("and then its cleanup hangs")
        except ValueError as error:
            watch.tell(error)
            never_returns()


def until_known(watch: Watch) -> None:
    """Waits until the others know what this process does, and one of them would miss it."""
    if watch._ring is None:  # there are no others
        return
    is_known = is_tied = False
    until = time.monotonic() + 60
    while not (is_known and is_tied):
        assert time.monotonic() < until, "the watch has not told what this process does"
        heartbeat.beat()  # this is no stall
        time.sleep(0.05)
        told = Seen.of(watch._store.get(f"state/{watch.rank}"), 0.0).state
        is_known = (told.stage, told.step) == ("reward", 2)
        is_tied = bool(watch._ring._before) or Ring.tie is no_route


def never_returns() -> None:
    time.sleep(600)


def no_route(ring: Ring, address: object) -> None:
    ring._tries = 0


def run(watch: Watch, mode: str, guilty: int) -> None:
    ready = Path(os.environ["WATCHED_READY"]) if "WATCHED_READY" in os.environ else None
    for step in range(1, STEPS + 1):
        heartbeat.at("generate", step)
        time.sleep(0.2)
        heartbeat.at("reward")
        if step == 2 and (guilty in (watch.rank, -1) or mode == "together"):
            print(f"misdeed {time.time()}", flush=True)
            (watch.logs / "misdeed").write_text(str(time.time()))
            until_known(watch)
            misbehave(mode, watch)
        if ready is not None and step == 2:
            (watch.logs / f"ready-{watch.rank}").write_text(str(os.getpid()))
            while watch.stop_told is None and not ready.exists():
                heartbeat.beat()
                time.sleep(0.05)
            if watch.stop_told is not None:
                print(f"process {watch.rank} was told of {watch.stop_told}", file=watch.screen)
        heartbeat.at("optimizer")
        with heartbeat.waiting():
            dist.all_reduce(torch.ones(1))
        if mode == "signal" and step == 2:
            until = time.monotonic() + 5
            while watch.stop_told is None and time.monotonic() < until:
                time.sleep(0.05)
        if watch.stop_told is not None:
            with heartbeat.waiting():
                dist.barrier()
            print(f"process {watch.rank} was told of {watch.stop_told}", file=watch.screen)
            return


def main() -> int:
    mode, folder, stall, guilty = sys.argv[1:5]
    dist.init_process_group("gloo")
    if mode == "kill_unlined":
        mode = "kill"
        Ring.tie = no_route  # type: ignore[method-assign]
    watch = Watch(dist.get_rank(), dist.get_world_size(), Path(folder), float(stall) / 60)
    watch.log_to_file()

    def stop(number: int, frame: FrameType | None) -> None:
        watch.tell_stop(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    code: Any = 0
    try:
        run(watch, mode, int(guilty))
        if mode == "early" and watch.rank != int(guilty):
            time.sleep(4)
        print("done", file=watch.screen)
    except BaseException as error:
        watch.tell(error)
        watch.leave(1)
    watch.close()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
