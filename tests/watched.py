"""A small job under the supervisor: it does as it is told, then misbehaves.

torchrun ... tests/watched.py MODE FOLDER STALL_SECONDS RANK: in "reward" of step 2, process RANK
does what MODE says.
"""

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

from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.supervisor import Supervisor
from grpo_cli.errors import TrainingError

STEPS = 4


def misbehave(mode: str, supervisor: Supervisor) -> None:
    if mode == "raise":
        raise ValueError("no reward for this")
    if mode == "together":  # as Workers.together raises it
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, heartbeat.where())
        error = TrainingError("only here")
        error.where = told[1]  # type: ignore[attr-defined]
        time.sleep(0.5 if supervisor.rank == 1 else 0)  # another than the guilty one tells
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
        if supervisor.rank == 1:
            time.sleep(1)
            raise ValueError("the others are stuck")
        with heartbeat.waiting():
            dist.recv(torch.zeros(1), src=2) if supervisor.rank == 0 else never_returns()
    if mode == "regex":  # holds the GIL for hours
        re.match("(a+)+$", "a" * 60 + "b")
    if mode == "segfault":
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    if mode == "cleanup":  # what runs between the error and the top never ends
        try:
            raise ValueError("and then its cleanup hangs")
        except ValueError as error:
            supervisor.report(error)
            never_returns()


def until_known(supervisor: Supervisor) -> None:
    """Waits until the others know what this process does, and one of them would miss it."""
    store = supervisor._store
    if store is None:  # there are no others
        return
    is_known = False
    until = time.monotonic() + 60
    while not is_known:
        assert time.monotonic() < until, "the supervisor has not published what this process does"
        heartbeat.beat()  # this is no stall
        time.sleep(0.05)
        state = store.survey()[supervisor.rank].state
        has_met = all("pid" in store.who(rank) for rank in range(store.size))
        is_known = has_met and (state.stage, state.step) == ("reward", 2)


def never_returns() -> None:
    time.sleep(600)


def print_stop(supervisor: Supervisor) -> None:
    print(
        f"process {supervisor.rank} was told of {supervisor.stop_signal}",
        file=supervisor.log.screen,
    )


def run(supervisor: Supervisor, mode: str, guilty: int) -> None:
    ready = Path(os.environ["WATCHED_READY"]) if "WATCHED_READY" in os.environ else None
    for step in range(1, STEPS + 1):
        heartbeat.at("generate", step)
        time.sleep(0.2)
        heartbeat.at("reward")
        if step == 2 and (guilty in (supervisor.rank, -1) or mode == "together"):
            print(f"misdeed {time.time()}", flush=True)
            (supervisor.log.folder / "misdeed").write_text(str(time.time()))
            until_known(supervisor)
            misbehave(mode, supervisor)
        if ready is not None and step == 2:
            (supervisor.log.folder / f"ready-{supervisor.rank}").write_text(str(os.getpid()))
            while supervisor.stop_signal is None and not ready.exists():
                heartbeat.beat()
                time.sleep(0.05)
            if supervisor.stop_signal is not None:
                print_stop(supervisor)
        heartbeat.at("optimizer")
        with heartbeat.waiting():
            dist.all_reduce(torch.ones(1))
        if mode == "signal" and step == 2:
            until = time.monotonic() + 5
            while supervisor.stop_signal is None and time.monotonic() < until:
                time.sleep(0.05)
        if supervisor.stop_signal is not None:
            with heartbeat.waiting():
                dist.barrier()
            print_stop(supervisor)
            return


def main() -> int:
    mode, folder, stall, guilty = sys.argv[1:5]
    dist.init_process_group("gloo")
    supervisor = Supervisor(dist.get_rank(), dist.get_world_size(), Path(folder), float(stall) / 60)
    supervisor.log.redirect()

    def stop(number: int, frame: FrameType | None) -> None:
        supervisor.send_stop(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    code: Any = 0
    try:
        run(supervisor, mode, int(guilty))
        if mode == "early" and supervisor.rank != int(guilty):
            time.sleep(4)
        print("done", file=supervisor.log.screen)
    except BaseException as error:
        supervisor.report(error)
        supervisor.ending.leave(1)
    supervisor.close()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # see workers.exit_process
