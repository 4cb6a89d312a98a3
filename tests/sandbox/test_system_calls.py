"""The filter of system calls, run as the kernel runs it."""

import struct

import pytest

from grpo_cli.sandbox import system_calls
from grpo_cli.sandbox.system_calls import call_filter


def answer(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """Returns the error that a call gets; 0: it is allowed."""
    if architecture is None:
        architecture = system_calls.MACHINES[machine][1]
    shown = {0: number, 4: architecture, 16: argument}
    filtered = call_filter(machine)
    assert filtered is not None
    rules = list(struct.iter_unpack("<HBBI", filtered))
    loaded = at = 0
    while True:
        code, yes, no, value = rules[at]
        at += 1
        if code == 0x20:
            loaded = shown[value]
        elif code == 0x06:
            assert value == 0x7FFF_0000 or value & 0xFFFF_0000 == 0x0005_0000
            return 0 if value == 0x7FFF_0000 else value & 0xFFFF
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value != 0}[code]
            at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "number", "argument", "error"),
    [
        ("x86_64", 0, 0, 0),  # read
        ("x86_64", 250, 0, 1),  # keyctl
        ("x86_64", 29, 0, 1),  # shmget
        ("x86_64", 302, 0, 0),  # prlimit64 of itself
        ("x86_64", 302, 77, 1),
        ("x86_64", 203, 0, 0),  # sched_setaffinity
        ("x86_64", 203, 77, 1),
        ("x86_64", 56, 17, 0),  # fork
        ("x86_64", 56, 0x1000_0011, 1),  # with a user namespace
        ("x86_64", 435, 0, 38),  # clone3
        ("x86_64", 41, 2, 0),  # socket
        ("x86_64", 41, 40, 1),  # to the host
        ("x86_64", 0x4000_0000, 0, 38),  # x32
        ("aarch64", 219, 0, 1),
        ("aarch64", 250, 0, 0),
        ("aarch64", 220, 17, 0),
        ("aarch64", 220, 0x1000_0011, 1),
        ("aarch64", 198, 40, 1),
    ],
)
def test_call_filter(machine: str, number: int, argument: int, error: int) -> None:
    assert answer(machine, number, argument) == error


def test_calls_of_another_architecture_are_refused() -> None:
    assert answer("x86_64", 3, architecture=0x4000_0003) == 38  # i386's
    assert call_filter("riscv64") is None


def test_no_number_is_there_twice() -> None:
    tables = (system_calls.NEVER, system_calls.ONLY_ITSELF)
    for column in (0, 1):
        numbers = [pair[column] for table in tables for pair in table.values()]
        assert len(set(numbers)) == len(numbers)
