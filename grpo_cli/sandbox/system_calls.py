"""Builds the kernel filter that refuses system calls of sandboxed programs.

Users, namespaces and resource limits leave gaps. All processes of a user share keyrings, System V
memory and messages, and may slow or limit one another. In its own user namespace a program has all
rights. A filter (seccomp, mode 2) closes these gaps at every level. Each rule costs two or four
instructions of the kernel's filter machine (BPF).
"""

from __future__ import annotations

import os
import struct

EPERM, ENOSYS = 1, 38
CLONE_NEWUSER = 0x1000_0000
AF_VSOCK = 40  # reaches a virtual machine's host past all namespaces

# Call numbers on (x86_64, aarch64).
NEVER = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "unshare": (272, 97),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
}
ONLY_ITSELF = {  # the first argument is a process, 0 for the caller
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, kernel's name

LOAD, IS, IS_AT_LEAST, HAS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in the filter's input
ALLOW, REFUSE = 0x7FFF_0000, 0x0005_0000  # plus the error that the caller sees


def call_filter(machine: str | None = None) -> bytes | None:
    """Returns the filter for a machine; None if its call numbers are unknown."""
    if (machine or os.uname().machine) not in MACHINES:
        return None
    column, architecture = MACHINES[machine or os.uname().machine]
    rules = [
        _rule(LOAD, ARCHITECTURE),
        _rule(IS, architecture, no=3),  # calls of 32-bit programs have other numbers
        _rule(LOAD, NUMBER),
        _rule(IS_AT_LEAST, 0x4000_0000, yes=1),  # as have those of x32
        _rule(IS, CLONE3[column], no=1),  # its flags are not visible: libraries fall back to clone
        _rule(RETURN, REFUSE + ENOSYS),
    ]
    for numbers in NEVER.values():
        rules += [_rule(IS, numbers[column], no=1), _rule(RETURN, REFUSE + EPERM)]
    for numbers in ONLY_ITSELF.values():
        rules += _unless(numbers[column], _rule(IS, 0, yes=1))
    rules += _unless(CLONE[column], _rule(HAS, CLONE_NEWUSER, no=1))
    rules += _unless(SOCKET[column], _rule(IS, AF_VSOCK, no=1))
    return b"".join([*rules, _rule(RETURN, ALLOW)])


def _unless(number: int, argument_is_fine: bytes) -> list[bytes]:
    return [
        _rule(IS, number, no=4),
        _rule(LOAD, ARGUMENT),
        argument_is_fine,
        _rule(RETURN, REFUSE + EPERM),
        _rule(RETURN, ALLOW),
    ]


def _rule(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Encodes an instruction, with the number to skip if its condition holds and if it does not."""
    return struct.pack("<HBBI", code, yes, no, value)
