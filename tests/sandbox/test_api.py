"""The sandbox: what programs print and how they end, and what they try to get away with.

Escape attempts run from a worker process of their own, so that what reaches the one that asked for
the run does not reach the tests; it has to answer after each of them.
"""

# ruff: noqa: E501

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.sandbox import Limits, SandboxError, folders, grade, isolation, process, run
from grpo_cli.sandbox.temporary_folder import MARK, TMP_VARIABLE
from grpo_cli.scoring.processes import descendants
from tests.programs import until
from tests.tables import rows_of, table

IS_ROOT = os.geteuid() == 0
HAS_BWRAP = shutil.which("bwrap") is not None
SECRET = "hunter2-from-the-worker"

# In CI the absence of bubblewrap is a failure, elsewhere a reason to skip.
needs_bwrap = pytest.mark.skipif(
    not HAS_BWRAP and not os.environ.get("CI"), reason="bubblewrap is not installed"
)
both_levels = pytest.mark.parametrize(
    "guards", [pytest.param("namespaces", marks=needs_bwrap), "limits"]
)

WORKER = """
import json, sys
from grpo_cli import sandbox
for line in sys.stdin:
    source, guards, seconds = json.loads(line)
    limits = sandbox.Limits(
        seconds=seconds, memory_mb=200, processes=8, file_mb=4, output_kb=256
    )
    try:
        finished = vars(sandbox.run(source, limits=limits, guards=guards))
    except sandbox.SandboxError as error:
        finished = {"status": "SandboxError", "stdout": "", "stderr": "", "reason": str(error)}
    print(json.dumps(finished), flush=True)
"""


class Worker:
    """Runs programs in a process that has a secret, an open file and something to lose."""

    def __init__(self, folder: Path) -> None:
        self.boxes = folder / "boxes"
        self.boxes.mkdir()
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.secret_file = self.outside / "secret.txt"
        self.secret_file.write_text(SECRET)
        self.outside.chmod(0o700)
        self.process = self.started()

    def started(self) -> subprocess.Popen[str]:
        with self.secret_file.open() as leaked:
            os.set_inheritable(leaked.fileno(), True)
            return subprocess.Popen(
                [sys.executable, "-c", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "SECRET": SECRET, TMP_VARIABLE: str(self.boxes)},
                close_fds=False,
                start_new_session=True,
            )

    def ask(self, source: str, guards: str, seconds: float = 20.0) -> None:
        if self.process.poll() is not None:  # a test before has done away with it
            self.close()
            self.process = self.started()
        assert self.process.stdin
        self.process.stdin.write(json.dumps([source, guards, seconds]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        poll = select.poll()  # select() takes no descriptor above 1,023, and other tests open many
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(60_000):
            self.process.kill()  # the next test has another
            self.process.wait()
            pytest.fail("the worker did not answer")
        line = self.process.stdout.readline()
        assert line, f"the worker died: {self.process.poll()}"
        return json.loads(line)

    def left_running(self) -> list[int]:
        marks = (f"{MARK}={self.process.pid}", f"{MARK}={self.boxes}/")
        return [pid for pid in pids() if environment(pid).startswith(marks)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> str:
    """The sandbox's mark in the environment of a process, or ""."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return ""
    return next((v for v in variables if v.startswith(f"{MARK}=")), "")


@contextmanager
def new_worker() -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="sandbox-test-") as folder:
        os.chmod(folder, 0o711)  # pytest's folders are closed to other users
        worker = Worker(Path(folder))
        try:
            yield worker
        finally:
            worker.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with new_worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def shared_worker() -> Iterator[Worker]:
    with new_worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def attempts() -> Iterator[Any]:
    """Yields the rows of `attempts.jsonl` at each level; quick ones at `limits` are default tests.

    `stopped_by` is what keeps a program from printing ESCAPED: nothing where there is nothing to
    reach, "limits" for every level, "user" for another user or namespaces, "namespaces" for those
    alone, "root" for a user who is not root at every level, else like "user".
    """
    for guards, marks in (("namespaces", [needs_bwrap]), ("limits", [])):
        for row in rows_of("sandbox/attempts.jsonl"):
            tier = [] if guards == "limits" and "quick" in row else [pytest.mark.programs]
            yield pytest.param(guards, row, id=f"{row['name']}-{guards}", marks=[*marks, *tier])


@pytest.mark.parametrize(("guards", "row"), [*attempts()])
def test_an_escape_attempt_ends_and_leaves_nothing(
    shared_worker: Worker, port: int, guards: str, row: dict[str, Any]
) -> None:
    stopped_by, endings, program = row.get("stopped_by", ""), row["endings"], row["program"]
    stopped_by = stopped_by if stopped_by != "root" else "user" if IS_ROOT else "limits"
    levels = {"": True, "limits": True, "user": guards == "namespaces" or IS_ROOT}
    is_stopped = levels.get(stopped_by, guards == "namespaces")
    if stopped_by == "user" and not is_stopped:
        pytest.skip("nothing stops it at this level without root, see docs/sandbox.md")
    stray = f"stray-{os.urandom(8).hex()}"
    names = {
        "OUTSIDE": str(shared_worker.outside),
        "PORT": port,
        "WORKER": shared_worker.process.pid,
        "STRAY": stray,
    }
    header = "; ".join(f"{name} = {value!r}" for name, value in names.items())
    seconds = 0.5 if "timeout" in endings else 20.0
    shared_worker.ask(f"{header}\n{program}", guards, seconds)
    finished = shared_worker.answer()
    assert finished["status"] in endings, finished
    assert ("ESCAPED" in finished["stdout"]) is (not is_stopped)
    assert SECRET not in finished["stdout"] + finished["stderr"]
    assert shared_worker.left_running() == []
    assert list(shared_worker.boxes.iterdir()) == []
    assert shared_worker.secret_file.read_text() == SECRET
    assert [p.name for p in shared_worker.outside.iterdir()] == ["secret.txt"]
    if guards == "namespaces" or IS_ROOT:
        shared = [p for p in map(Path, ("/tmp", "/var/tmp", "/dev/shm")) if p.exists()]
        assert [p for folder in shared for p in folder.iterdir() if p.name.startswith(stray)] == []
    shared_worker.ask("print(6 * 7)", guards)
    assert shared_worker.answer()["stdout"] == "42\n"


WITH_A_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""


# The program, its daemon, and where this process may look into it, their keeper.
SEEN = 3 if IS_ROOT else 2


@both_levels
def test_a_sandbox_dies_with_the_worker(worker: Worker, guards: str) -> None:
    worker.ask(f"{WITH_A_DAEMON}\nopen('file', 'w')\ntime.sleep(1000)", guards, 1000.0)
    until(lambda: len(worker.left_running()) >= SEEN)
    assert len(list(worker.boxes.iterdir())) == (guards == "limits")
    worker.close()
    until(lambda: not worker.left_running() and not list(worker.boxes.iterdir()))


@pytest.mark.programs
@pytest.mark.skipif(not IS_ROOT, reason="without a user of its own nothing tells it apart")
def test_what_has_lost_its_mark_is_found_by_its_user(worker: Worker) -> None:
    name = f"left{os.urandom(4).hex()}"
    hide = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sh", [{name!r}, "-c", "sleep 1000; true"], {{}})
    os._exit(0)
time.sleep(1000)
"""

    def left() -> list[int]:
        return [pid for pid in pids() if name in command_line(pid)]

    worker.ask(hide, "limits", 1000.0)
    until(left)
    keeper, *_ = descendants(worker.process.pid)
    os.kill(keeper, signal.SIGKILL)
    assert worker.answer()["status"] == "lost"
    assert left() == []


def test_removing_a_folder_changes_nothing_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "outside").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    folders.open_up(str(tmp_path / "link"))
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o755
    (tmp_path / "closed").mkdir(mode=0)
    folders.open_up(str(tmp_path / "closed"))
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o700


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def same_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As for a trainer that is not root and has no bubblewrap: a program can reach its keeper."""
    monkeypatch.setattr(process, "spare_uid", lambda: None)
    monkeypatch.setenv(TMP_VARIABLE, str(tmp_path))
    isolation._limits.cache_clear()
    yield tmp_path
    isolation._limits.cache_clear()


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_program_that_ends_its_keeper(
    same_user: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)
    code = f"{WITH_A_DAEMON}\nos.kill(os.getppid(), {number})\ntime.sleep(1000)"
    verdict = grade(code, ["f()", "f()"], guards="limits", limits=Limits(seconds=1))
    lost = "test 1 of 2: the program ended or blocked its sandbox"
    assert (verdict.passed, verdict.total, verdict.reason) == (0, 2, lost)
    assert list(same_user.iterdir()) == []
    assert [pid for pid in pids() if str(same_user) in environment(pid)] == []


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_DATA"])
def test_a_program_that_limits_its_keeper(
    same_user: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(process, "call_filter", lambda: None)  # which would refuse it
    code = f"""
import os, resource
resource.prlimit(os.getppid(), resource.{limit}, (3, 3))
def f(): return 1
"""
    assert run(code, guards="limits").status in ("ok", "lost")
    verdict = grade(code, ["assert f() == 1"] * 2, guards="limits", limits=Limits(seconds=30))
    lost = {f"test {n} of 2: the program ended or blocked its sandbox" for n in (1, 2)}
    assert verdict.reason in (*lost, "passed")
    assert list(same_user.iterdir()) == []


def test_a_program_that_ends_its_session_ends_itself(same_user: Path) -> None:
    finished = run("import os; os.killpg(0, 9)", guards="limits", limits=Limits(seconds=30))
    assert finished.status == "killed"


@pytest.mark.parametrize("folder", ["home", "os.path.dirname(home)"])
def test_what_a_link_in_the_place_of_its_folder_leads_to_stays(
    same_user: Path, folder: str
) -> None:
    (same_user / "victim").mkdir()
    (same_user / "victim" / "file").touch()
    code = f"""
import os
home = os.environ["HOME"]
folder = {folder}
os.rename(folder, folder + "-moved")
os.symlink({str(same_user / "victim")!r}, folder)
"""
    grade(code, ["f()", "f()"], guards="limits")
    assert (same_user / "victim" / "file").exists()
    assert not [path for path in same_user.iterdir() if path.is_symlink()]


def test_a_program_that_spoils_the_next_run(same_user: Path) -> None:
    code = """
import os
folder = os.path.dirname(os.environ["HOME"])
os.rename(folder, folder + "-moved")
open(folder, "w").close()
def f(): pass
"""
    verdict = grade(code, ["f()", "f()"], guards="limits")
    lost = "test 2 of 2: the program ended or blocked its sandbox"
    assert (verdict.passed, verdict.reason) == (1, lost)


def at_levels(name: str) -> Iterator[Any]:
    """Yields the rows of a file for each level; without one in the row, for the default level.

    Rows with levels belong to the default tier at the level that every machine has.
    """
    for row in rows_of(f"sandbox/{name}"):
        shown = row.get("source", row.get("program"))[:40]
        for level in row.get("levels", ["auto"]):
            marks = [] if level == "limits" else [needs_bwrap, pytest.mark.programs]
            yield pytest.param(row, level, id=f"{shown}-{level}", marks=marks)


@pytest.mark.parametrize(("row", "guards"), [*at_levels("runs.jsonl")])
def test_run(row: dict[str, Any], guards: str) -> None:
    source = row["source"].replace("HASH", str(_HASH))
    limits = Limits(**{"seconds": 30, **row.get("limits", {})})
    finished = vars(run(source, row.get("stdin", ""), guards=guards, limits=limits))
    expected = {name: row[name] for name in finished.keys() & row.keys()}
    assert {name: finished[name] for name in expected} == expected
    assert "grpo_cli" not in finished["stderr"], "no frame of ours"


_HASH = int(
    subprocess.check_output(
        [sys.executable, "-c", "print(hash('a'))"], env={**os.environ, "PYTHONHASHSEED": "0"}
    )
)


@both_levels
def test_site_packages_are_an_option(guards: str) -> None:
    source = "import numpy; print(numpy.arange(6).reshape(2, 3) @ numpy.ones(3))"
    finished = run(source, guards=guards, limits=Limits(seconds=60), site_packages=True)
    assert finished.stdout == "[ 3. 12.]\n", finished


@pytest.mark.parametrize(
    ("size", "status", "reason"),
    [
        (10**6, "ok", None),
        (15 * 10**5, "disk", "wrote over 4 MiB, or too many or too deep files"),
    ],
)  # fmt: skip
def test_all_files_on_disk_count_together(size: int, status: str, reason: str | None) -> None:
    write = f"for n in range(4): open(str(n), 'wb').write(bytes({size}))"
    nap = "import time; time.sleep(0.5 if n == 3 else 0)"
    limits = Limits(seconds=30, file_mb=4)
    finished = run(f"{write}\n{nap}", guards="limits", limits=limits)
    assert (finished.status, reason) == (status, reason and finished.reason)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": "6"}, "seconds is '6'"),
        ({"processes": -1}, "processes is -1"),
        ({"open_files": True}, "open_files is True"),
    ],
)  # fmt: skip
def test_limits_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**arguments)


STACK = """
class Empty(Exception):
    def __init__(self, size):
        super().__init__(f"no {size}")
        self.size = size
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, n): return self.items[n]
    def __setitem__(self, n, item): self.items[n] = item
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return self.items < other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __repr__(self): return f"Stack({self.items})"
    def __call__(self, x): return x * 2
    @classmethod
    def of(cls, *items): return cls(items)
    @property
    def top(self): return self.items[-1]
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items: raise Empty(1)
        return self.items.pop()
def empty(stack): return not stack.items
"""


@pytest.mark.parametrize(("row", "guards"), [*at_levels("grades.jsonl")])
def test_grade(row: dict[str, Any], guards: str) -> None:
    """What a test can do with a program that is in another process, and what passes no test."""
    program, tests = row["program"].replace("STACK", STACK), row["tests"]
    options = dict(row.get("options", {}))
    limits = Limits(**{"seconds": 30, **options.pop("limits", {})})
    result = grade(program, tests, guards=guards, limits=limits, **options)
    total = 1 if isinstance(tests, str) else len(tests)
    assert (result.passed, result.total) == (row["passed"], total), result
    assert result.share == row["passed"] / total
    assert row.get("reason") in (None, result.reason)


@table("row", rows_of("sandbox/refused.jsonl"))
def test_tests_that_test_nothing_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=row["refused"]):
        grade(row["program"], row["tests"], **row.get("options", {}))


# What is refused, and what the log says


def fake_bwrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_it_refuses_to_start_with_fewer_guards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    calls: list[Callable[..., Any]] = [partial(run, ""), partial(grade, "", "f()")]
    for call in (*calls, isolation.describe, isolation.find_level):
        for guards in ("auto", "namespaces"):
            with pytest.raises(SandboxError, match=r"bubblewrap is not on PATH .*apt install"):
                call(guards=guards)
    assert isolation.find_level("limits").name == "limits"
    assert run("print(1)", guards="limits").stdout == "1\n"


@pytest.mark.parametrize(
    ("is_root", "reach"),
    [(True, "what any user may read"), (False, "change your files and end your processes")],
)
def test_it_says_what_the_level_limits_cannot_keep_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_root: bool, reach: str
) -> None:
    monkeypatch.setattr(isolation, "_may_change_user", lambda: is_root)
    if is_root == IS_ROOT:
        assert reach in isolation.describe("limits")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as caught:
        isolation.find_level("auto")
    said = str(caught.value)
    assert 'guards "limits" runs programs without: a program can use the network' in said
    assert reach in said


def test_it_says_why_bubblewrap_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_bwrap(tmp_path, monkeypatch, "echo 'bwrap: No permissions' >&2; exit 1")
    with pytest.raises(SandboxError, match="bubblewrap does not work here: bwrap: No permissions"):
        run("")


@needs_bwrap
@pytest.mark.parametrize(
    ("option", "guard", "program", "status"),
    [
        ("--size", "hard limit on files", "for n in range(10**6): open(str(n), 'wb').write(bytes(10**6))", "disk"),
        ("--proc", "limit on the memory of all processes", "print(open('/proc/stat'))", "error"),
    ],
)  # fmt: skip
def test_it_does_without_what_a_bubblewrap_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    guard: str,
    program: str,
    status: str,
) -> None:
    real = shutil.which("bwrap")
    script = f'for word; do [ "$word" = {option} ] && exit 1; done; exec {real} "$@"'
    fake_bwrap(tmp_path, monkeypatch, script)
    assert f"OFF: {guard}" in isolation.describe()
    assert run("print(1)").stdout == "1\n"
    assert run(program, limits=Limits(file_mb=4, seconds=30)).status == status


def test_guards_that_are_none() -> None:
    with pytest.raises(ValueError, match="guards is 'none'; it must be one of auto, namespaces"):
        run("", guards="none")


def test_a_sandbox_that_cannot_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation.find_level("limits")
    monkeypatch.setattr(process, "python", lambda: ("/nowhere/python", "/nowhere"))
    with pytest.raises(SandboxError, match="did not start"):
        grade("", "f()", guards="limits")


@both_levels
def test_limits_that_cannot_be_set_are_no_verdict(
    monkeypatch: pytest.MonkeyPatch, guards: str, tmp_path: Path
) -> None:
    isolation.find_level(guards)
    monkeypatch.setenv(TMP_VARIABLE, str(tmp_path))
    monkeypatch.setattr(process.Sandbox, "_rlimits", lambda _: [("RLIMIT_NOTHING", 1)])
    with pytest.raises(SandboxError, match="RLIMIT_NOTHING"):
        grade("", "f()", guards=guards)
    assert list(tmp_path.iterdir()) == []


@both_levels
def test_a_keeper_that_falls_silent_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, guards: str
) -> None:
    if guards == "limits" and not IS_ROOT:
        pytest.skip("here the program may be the reason")
    isolation.find_level(guards)
    monkeypatch.setattr(process, "GRACE_SECONDS", -0.9)  # it may report for 0.1 s
    with pytest.raises(SandboxError, match="no sign of life"):
        grade("while True: pass", "f()", guards=guards, limits=Limits(seconds=1))


def test_importing_it_is_cheap() -> None:
    script = "import sys, grpo_cli.sandbox; print([m for m in sys.modules if m.startswith('grpo')])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert eval(found)[0] == "grpo_cli"
    assert all(name.startswith("grpo_cli.sandbox") for name in eval(found)[1:]), found
