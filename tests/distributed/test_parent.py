"""A process of torchrun does not outlive a torchrun that is killed."""

import os
import subprocess
import sys

import psutil
import pytest

# In place of torchrun: starts a process, and waits for it.
TORCHRUN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).wait()
"""
PROCESS = """
import os, time
from grpo_cli.distributed import stop_signal
stop_signal.die_with_torchrun()
first = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == first:
    time.sleep(0.01)
print("alive", flush=True)
time.sleep(600)
"""


@pytest.mark.programs
@pytest.mark.parametrize("launcher", ["torchrun", "another"])
def test_a_process_dies_with_its_torchrun(launcher: str) -> None:
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "r"}
    if launcher == "another":
        environment.pop("TORCHELASTIC_RUN_ID")
    command = [sys.executable, "-c", TORCHRUN, PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert parent.stdout.readline() == ("" if launcher == "torchrun" else "alive\n")
        if launcher == "another":
            process.kill()
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone
