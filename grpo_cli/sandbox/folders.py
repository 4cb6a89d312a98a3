"""Measures, opens and removes folders in which programs have written."""

from __future__ import annotations

import os

MAX_FILES = 1000  # in the temporary folder: removing a file takes up to 4 ms on some disks
MAX_PATH = 1000  # characters; checking deeper folders takes too long


def is_over_full(folder: str, limit: int) -> bool:
    size = count = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_FILES or len(entry.path) > MAX_PATH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # gone by now, or not readable by this user
            pass
    return size > limit


def remove_those_of(uid: int, folder: str) -> None:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_uid != uid:
                continue
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)
        except FileNotFoundError:
            pass


def remove(folder: str) -> None:
    """Removes a folder that nothing writes to any more."""
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.isdir(folder):
        empty(folder)
        os.rmdir(folder)


def open_up(folder: str) -> None:
    """Makes a folder writable, but not the target of a link that replaced it."""
    try:
        fd = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
    except NotADirectoryError:
        return
    try:
        os.chmod(f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self") else folder, 0o700)
    except PermissionError:
        pass  # owned by another user, and so already open
    finally:
        os.close(fd)


def empty(folder: str) -> None:
    """Removes all contents of a folder, regardless of depth and permissions.

    Moves nested folders up until none is left, since paths may be too long to name and a recursion
    too deep. Nothing may write there any more.
    """
    open_up(folder)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            open_up(entry.path)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    open_up(inner.path)  # moving a folder requires it to be writable
                os.rename(inner.path, f"{folder}/{os.urandom(16).hex()}")
            os.rmdir(entry.path)
