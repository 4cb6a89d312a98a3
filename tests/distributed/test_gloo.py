"""Every group of gloo has one thread; as a program, what the tests run on two processes."""

import atexit
import os
import subprocess
import sys
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_cli.distributed.workers import Workers, exit_process
from tests import programs


def launch(mode: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run(programs.torchrun(2, __file__, mode), **environment)


@pytest.mark.programs
@pytest.mark.parametrize("interface", [pytest.param("", marks=pytest.mark.slow), "lo"])
def test_every_group_has_one_thread(interface: str) -> None:
    done = launch("groups", GLOO_SOCKET_IFNAME=interface)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "1 1 1\n" * 2


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named() -> None:
    done = launch("groups", GLOO_SOCKET_IFNAME="nowhere0")
    assert done.returncode != 0
    assert "nowhere0" in done.stdout + done.stderr


@pytest.mark.programs
def test_a_process_that_has_joined_others_skips_the_interpreters_finalization() -> None:
    """A thread of gloo that releases a tensor meanwhile would end it with SIGABRT."""
    done = launch("leave")
    assert done.stdout.count("at exit\n") == 2, "what was registered is done, and written"
    assert "finalized" not in done.stdout
    assert "exitcode  : 3" in done.stderr


class Late:
    def __del__(self) -> None:
        os.write(1, b"finalized\n")


def leave() -> NoReturn:
    globals()["late"] = Late()
    atexit.register(sys.stdout.write, "at exit\n")
    exit_process(3)


def threads_of_groups() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups = (dist.group.WORLD, dist.new_group(backend="gloo"), mesh.get_group())
    found = []
    for group in groups:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.name() == "gloo"
        found.append(str(backend.options._threads))
    return " ".join(found)


if __name__ == "__main__":
    workers = Workers("cpu")
    found = {"groups": threads_of_groups, "leave": leave}[sys.argv[1]]()
    sys.stdout.write(f"{found}\n")  # in one piece: two processes write to the same pipe
    sys.stdout.flush()
    workers.close()
    exit_process(0)
