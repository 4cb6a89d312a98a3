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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.sandbox import Limits, SandboxError, grade, isolation, process, run

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
                env={**os.environ, "SECRET": SECRET, process.TMP_VARIABLE: str(self.boxes)},
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
        marks = (f"{process.MARK}={self.process.pid}", f"{process.MARK}={self.boxes}/")
        return [pid for pid in pids() if environment(pid).startswith(marks)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment(pid: int) -> str:
    """The sandbox's mark in the environment of a process, or ""."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return ""
    return next((v for v in variables if v.startswith(f"{process.MARK}=")), "")


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


# (name, what stops it from printing ESCAPED, how it may end, program)
# What stops it: "" where there is nothing to reach, "limits" for every level, "user" for another
# user or namespaces, "namespaces" for those alone.
ATTEMPTS: list[tuple[str, str, set[str], str]] = [
    ("endless loop", "", {"timeout"}, "while True: pass"),
    ("sleep", "", {"timeout"}, "import time; time.sleep(1000)"),
    ("loop that ignores signals", "", {"timeout"}, """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
"""),
    ("fork bomb", "", {"timeout"}, """
import os
while True:
    try: os.fork()
    except OSError: pass
"""),
    ("fork bomb that ends when it can no more", "", {"error", "timeout", "ok"}, "import os\nwhile True: os.fork()"),
    ("a process that is always another one", "", {"ok"}, """
import os, time
if os.fork() == 0:
    for fd in range(100):
        try: os.close(fd)
        except OSError: pass
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
        os.setsid()
time.sleep(0.3)
"""),
    ("threads", "", {"error", "killed"}, """
import threading, time
while True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
"""),
    ("memory bomb", "", {"error"}, "data = bytearray(10**10)"),
    ("slow memory bomb", "", {"error"}, "data = []\nwhile True: data.append(bytes(10**6))"),
    ("memory bomb of many processes", "", {"memory"}, """
import os, time
for _ in range(3):
    try: os.fork()
    except OSError: pass
data = bytearray(b"x") * (60 * 2**20)
time.sleep(100)
"""),
    ("one large file", "", {"error", "disk"}, "f = open('large', 'wb')\nwhile True: f.write(bytes(10**6)); f.flush()"),
    ("many large files", "", {"error", "disk"}, """
for n in range(10**6):
    with open(str(n), "wb") as f: f.write(bytes(3 * 10**6))
"""),
    ("many empty files", "", {"error", "disk"}, "n = 0\nwhile True: open(str(n), 'w').close(); n += 1"),
    ("deep and closed folders", "", {"ok", "disk"}, """
import os
for _ in range(30):
    os.mkdir("d" * 200); os.chdir("d" * 200)
open("f", "w").close()
os.chmod("f", 0)
os.chdir(os.environ["HOME"])
os.mkdir("closed"); os.mkdir("closed/inner"); open("closed/inner/f", "w").close()
os.chmod("closed/inner", 0); os.chmod("closed", 0)
try: os.chmod(".", 0)
except OSError: pass
"""),
    ("a loop of output", "", {"output"}, "while True: print('x' * 1000)"),
    ("a loop of errors", "", {"output"}, "import sys\nwhile True: print('x' * 1000, file=sys.stderr)"),
    ("stdout closed", "", {"timeout"}, """
import os
for fd in range(100):
    try: os.close(fd)
    except OSError: pass
while True: pass
"""),
    ("deep recursion", "", {"error"}, "def f(): return f()\nf()"),
    ("deep recursion without a limit", "", {"error", "killed"}, """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, name): return getattr(self, name + "x")
A().a
"""),
    ("crash", "", {"killed"}, "import ctypes; ctypes.string_at(0)"),
    ("a daemon", "", {"ok"}, """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(100):
            try: os.close(fd)
            except OSError: pass
        os.chdir("/")
        time.sleep(1000)
    os._exit(0)
"""),
    ("a daemon that holds stdout", "", {"ok"}, """
import subprocess
subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""),
    ("a thread that never ends", "", {"timeout"}, "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"),
    ("raising its limits", "limits", {"ok"}, """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("ESCAPED", kind)
    except (OSError, ValueError): pass
"""),
    ("becoming root", "limits" if not IS_ROOT else "user", {"ok"}, """
import os
for become in (os.setuid, os.setgid, os.seteuid):
    try:
        become(0)
        print("ESCAPED")
    except OSError: pass
"""),
    ("inherited file descriptors", "limits", {"ok"}, """
import os
for fd in range(3, 200):
    try:
        os.lseek(fd, 0, 0)
        if b"hunter2" in os.read(fd, 1000): print("ESCAPED", fd)
    except OSError: pass
"""),
    ("its own environment", "limits", {"ok"}, """
import os
if "hunter2" in str(os.environ): print("ESCAPED")
for name in ("self", str(os.getppid())):
    try:
        if b"hunter2" in open(f"/proc/{name}/environ", "rb").read(): print("ESCAPED")
    except OSError: pass
"""),
    ("the worker's environment", "user", {"ok"}, """
import os
for name in os.listdir("/proc"):
    try:
        if b"hunter2" in open(f"/proc/{name}/environ", "rb").read(): print("ESCAPED")
    except OSError: pass
"""),
    ("a file outside", "user", {"error"}, "print('ESCAPED', open(OUTSIDE + '/secret.txt').read())"),
    ("a file of the system's", "namespaces", {"ok", "error"}, "print('ESCAPED', open('/etc/passwd').read())"),
    ("the memory of its keeper", "limits", {"ok"}, """
import os
for name in ("mem", "maps", "fd/0", "fd/1"):
    try:
        with open(f"/proc/{os.getppid()}/{name}", "rb") as f: f.read(1)
        print("ESCAPED", name)
    except OSError: pass
"""),
    ("writing outside", "user", {"ok"}, """
import os
python = os.path.dirname(os.__file__)
for folder in (OUTSIDE, "/", "/usr", "/usr/lib", "/etc", "/dev", "/proc", python):
    try:
        with open(folder + "/written", "w") as f: f.write("x")
        print("ESCAPED", folder)
        os.unlink(folder + "/written")
    except OSError: pass
"""),
    ("a socket", "namespaces", {"ok"}, """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=1)
    print("ESCAPED")
except OSError: pass
"""),
    ("killing its ancestors", "user", {"ok", "lost"}, """
import os, signal
for _ in range(3):
    for pid in (os.getppid(), WORKER):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            try:
                os.kill(pid, number)
                if pid == WORKER: print("ESCAPED")
            except OSError: pass
"""),
    ("killing everyone", "user", {"ok", "lost", "killed"}, """
import os, signal
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
for pid in range(2, 100_000):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
"""),
    ("ending its keeper by its session", "", {"ok", "killed", "lost"}, "import os, signal\nos.killpg(0, signal.SIGKILL)"),
    (
        "keyrings, which other programs share",
        "limits",
        {"ok"},
        """
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
add, keyctl = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
for ring in (-3, -4, -5):  # of the session, of the user, of the user's session
    if call(add, b"user", b"note", b"x", 1, ring) > 0 or call(keyctl, 0, ring, 1) > 0:
        print("ESCAPED", ring)
""".replace("import ctypes", "import ctypes, os"),
    ),
    ("what other processes of its user may be slowed by", "limits", {"ok"}, """
import os, resource
for change in (
    lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 5),
    lambda: os.setpriority(os.PRIO_USER, 0, 5),
    lambda: os.sched_setaffinity(os.getppid(), {0}),
    lambda: os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)),
    lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)),
):
    try:
        change()
        print("ESCAPED", change.__code__.co_firstlineno)
    except OSError: pass
os.sched_setaffinity(0, os.sched_getaffinity(0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""),
    ("a user namespace of its own, with all rights", "limits", {"ok"}, """
import ctypes, os
libc = ctypes.CDLL(None)
clone = 56 if os.uname().machine == "x86_64" else 220
for call in (
    lambda: libc.unshare(0x10000000),
    lambda: libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0),
    lambda: libc.syscall(435, (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17), 64),
):
    if call() >= 0: print("ESCAPED")
"""),
    ("shared memory that stays, a socket to the host", "limits", {"ok"}, """
import ctypes, socket
libc = ctypes.CDLL(None)
if libc.shmget(0, 1 << 20, 0o1600) >= 0 or libc.msgget(0, 0o1600) >= 0: print("ESCAPED")
try: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); print("ESCAPED")
except OSError: pass
"""),
    ("a link in the place of its folder", "user", {"ok"}, """
import os
home = os.environ["HOME"]
for folder in (home, os.path.dirname(home)):
    try:
        os.rename(folder, folder + "-moved")
        os.symlink(OUTSIDE, folder)
        print("ESCAPED")
    except OSError: pass
"""),
    ("files where all users may write", "", {"ok"}, """
import os
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    try:
        os.makedirs(f"{folder}/{STRAY}/inner")
        open(f"{folder}/{STRAY}/inner/f", "w").close()
        open(f"{folder}/{STRAY}.f", "w").close()
    except OSError: pass
"""),
    ("half a character of output", "", {"ok"}, "import os; os.write(1, b'\\xff\\xfe\\x00')"),
    ("not a program", "", {"error"}, "I cannot help with that."),
    ("null bytes", "", {"error"}, "print(1)\x00"),
    ("half a surrogate pair", "", {"error"}, "print('\ud800')"),
    ("deep nesting", "", {"error", "killed", "output"}, "(" * 100_000),
    ("a number with too many digits", "", {"timeout", "error"}, "print(9 ** 9 ** 9)"),
]  # fmt: skip


# One attempt of each kind, at the level that every machine has, belongs to the default tier.
DEFAULT_ATTEMPTS = {
    "endless loop",
    "fork bomb",
    "memory bomb",
    "one large file",
    "a loop of output",
    "stdout closed",
    "crash",
    "a daemon",
    "raising its limits",
    "inherited file descriptors",
    "the worker's environment",
    "killing its ancestors",
}


def attempts_at_both_levels() -> Iterator[Any]:
    assert {attempt[0] for attempt in ATTEMPTS} >= DEFAULT_ATTEMPTS
    for guards, marks in (("namespaces", [needs_bwrap]), ("limits", [])):
        for name, *attempt in ATTEMPTS:
            is_default = guards == "limits" and name in DEFAULT_ATTEMPTS
            tier = [] if is_default else [pytest.mark.programs]
            yield pytest.param(guards, *attempt, id=f"{name}-{guards}", marks=[*marks, *tier])


@pytest.mark.parametrize(
    ("guards", "stopped_by", "endings", "program"), list(attempts_at_both_levels())
)
def test_an_escape_attempt_ends_and_leaves_nothing(
    shared_worker: Worker, port: int, guards: str, stopped_by: str, endings: set[str], program: str
) -> None:
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


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for 30 s"
        time.sleep(0.01)


@both_levels
def test_a_sandbox_dies_with_the_worker(worker: Worker, guards: str) -> None:
    worker.ask(f"{WITH_A_DAEMON}\nopen('file', 'w')\ntime.sleep(1000)", guards, 1000.0)
    wait_until(lambda: len(worker.left_running()) >= SEEN)
    assert len(list(worker.boxes.iterdir())) == (guards == "limits")
    assert process.sweep(str(worker.boxes)) == 0  # it is in use
    worker.close()
    wait_until(lambda: not worker.left_running() and not list(worker.boxes.iterdir()))


@pytest.mark.programs
def test_sweep_removes_what_a_killed_sandbox_left(worker: Worker) -> None:
    worker.ask(f"{WITH_A_DAEMON}\nopen('file', 'w')\ntime.sleep(1000)", "limits", 1000.0)
    wait_until(lambda: len(worker.left_running()) >= SEEN)
    os.kill(worker.process.pid, signal.SIGSTOP)
    (keeper,) = (pid for pid in pids() if parent(pid) == worker.process.pid)
    os.kill(keeper, signal.SIGKILL)
    worker.close()
    wait_until(lambda: keeper not in pids())
    assert worker.left_running()  # the daemon
    (worker.boxes / "another").mkdir()
    (worker.boxes / f"{process.PREFIX}file").touch()
    assert process.sweep(str(worker.boxes)) == 1
    assert worker.left_running() == []
    assert {p.name for p in worker.boxes.iterdir()} == {"another", f"{process.PREFIX}file"}
    assert process.sweep(str(worker.boxes / "nowhere")) == 0


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
    wait_until(left)
    (keeper,) = (pid for pid in pids() if parent(pid) == worker.process.pid)
    os.kill(keeper, signal.SIGKILL)
    assert worker.answer()["status"] == "lost"
    assert left() == []


def test_removing_a_folder_changes_nothing_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "outside").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    process.runner.open_up(str(tmp_path / "link"))
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o755
    (tmp_path / "closed").mkdir(mode=0)
    process.runner.open_up(str(tmp_path / "closed"))
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o700


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture
def same_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As for a trainer that is not root and has no bubblewrap: a program can reach its keeper."""
    monkeypatch.setattr(process, "spare_uid", lambda: None)
    monkeypatch.setenv(process.TMP_VARIABLE, str(tmp_path))
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


@both_levels
@pytest.mark.parametrize(
    ("source", "stdin", "status", "returncode", "stdout", "reason"),
    [
        ("print(input()[::-1])", "äb\n", "ok", 0, "bä\n", "ended with exit code 0"),
        ("", "", "ok", 0, "", "ended with exit code 0"),
        ("import sys; print(sys.stdin.read())", "a\nb", "ok", 0, "a\nb\n", None),
        ("print(open('/dev/stdin').read())", "abc", "ok", 0, "abc\n", None),
        ("input()", "", "error", 1, "", "EOFError: EOF when reading a line"),
        ("1/0", "", "error", 1, "", "ZeroDivisionError: division by zero"),
        ("def f(:", "", "error", 1, "", "SyntaxError: invalid syntax"),
        ("print(1); exit()", "", "ok", 0, "1\n", None),
        ("import sys; sys.exit(3)", "", "error", 3, "", "ended with exit code 3"),
        ("import sys; sys.exit('no')", "", "error", 1, "", "no"),
        ("import sys; sys.exit(-1)", "", "error", 255, "", None),
        ("import os; print(1); os._exit(0)", "", "ok", 0, "", None),
        ("import os; os.kill(os.getpid(), 9)", "", "killed", -9, "", "ended by SIGKILL"),
        ("print(__name__, __file__)", "", "ok", 0, "__main__ main.py\n", None),
        ("import sys; print(sys.argv)", "", "ok", 0, "['main.py']\n", None),
        ("print({'a', 'b', 'c', 'd', 'e'} and hash('a') == HASH)", "", "ok", 0, "True\n", None),
        ("import heapq, json, decimal, ctypes, sqlite3, ssl; print(1)", "", "ok", 0, "1\n", None),
        ("import encodings.idna; print('é'.encode('cp1252'))", "", "ok", 0, "b'\\xe9'\n", None),
        ("print(open('/proc/self/oom_score_adj').read())", "", "ok", 0, "1000\n\n", None),
        ("""
import time
score = "/proc/self/oom_score_adj"
try:
    open(score, "w").write("0")
except OSError:
    pass
end = time.monotonic() + 10
while open(score).read() != "1000\\n" and time.monotonic() < end:
    time.sleep(0.01)
print(open(score).read())
""", "", "ok", 0, "1000\n\n", None),
        ("print([line for line in open('/proc/self/status') if 'NoNewPrivs' in line])", "", "ok", 0, "['NoNewPrivs:\\t1\\n']\n", None),
        ("import numpy", "", "error", 1, "", "ModuleNotFoundError: No module named 'numpy'"),
        ("import os; print(len(os.listdir()), os.getcwd() == os.environ['HOME'])", "", "ok", 0, "1 True\n", None),
        ("import atexit; atexit.register(print, 'bye'); print('hi')", "", "ok", 0, "hi\nbye\n", None),
        ("import threading as t; t.Timer(0.1, print, ['late']).start()", "", "ok", 0, "late\n", None),
        ("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, 2]))", "", "ok", 0, "[1, 2]\n", None),
        ("import subprocess; print(subprocess.run('echo hi', shell=True).returncode)", "", "ok", 0, "hi\n0\n", None),
        ("from __future__ import annotations\ndef f(x: y): pass\nprint(f.__annotations__)", "", "ok", 0, "{'x': 'y'}\n", None),
        ("def f(x: int): pass\nprint(f.__annotations__)", "", "ok", 0, "{'x': <class 'int'>}\n", None),
        ("import inspect\ndef f(): return 7\nprint(inspect.getsource(f))", "", "ok", 0, "def f(): return 7\n\n", None),
    ],
)  # fmt: skip
def test_run(
    guards: str,
    source: str,
    stdin: str,
    status: str,
    returncode: int,
    stdout: str,
    reason: str | None,
) -> None:
    source = source.replace("HASH", str(_HASH))
    finished = run(source, stdin, guards=guards, limits=Limits(seconds=30))
    found = (finished.status, finished.returncode, finished.stdout)
    assert found == (status, returncode, stdout), finished
    assert reason in (None, finished.reason)
    assert "sandbox_runner" not in finished.stderr


_HASH = int(
    subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        check=True,
    ).stdout
)


@both_levels
def test_site_packages_are_an_option(guards: str) -> None:
    source = "import numpy; print(numpy.arange(6).reshape(2, 3) @ numpy.ones(3))"
    finished = run(source, guards=guards, limits=Limits(seconds=60), site_packages=True)
    assert finished.stdout == "[ 3. 12.]\n", finished


@pytest.mark.programs
@pytest.mark.parametrize(
    ("limits", "source", "status", "reason"),
    [
        ({"seconds": 0.2}, "while True: pass", "timeout", "ran for over 0.2 s"),
        ({"seconds": 30, "cpu_seconds": 1}, "while True: pass", "timeout", "used over 1 s of CPU time"),
        ({"output_kb": 1}, "print('x' * 1023)", "ok", "ended with exit code 0"),
        ({"output_kb": 1}, "print('x' * 1024)", "output", "printed over 1 KiB"),
        ({"memory_mb": 100}, "x = bytearray(10**8)", "error", "MemoryError"),
        ({"memory_mb": 200}, "x = bytearray(10**8)", "ok", "ended with exit code 0"),
        ({"file_mb": 1}, "open('f', 'wb').write(bytes(10**6))", "ok", "ended with exit code 0"),
        ({"file_mb": 1}, "open('f', 'wb').write(bytes(2 * 10**6))", "error", "OSError: [Errno 27] File too large"),
        ({"open_files": 10}, "f = [open('f', 'w') for _ in range(9)]", "error", "OSError: [Errno 24] Too many open files: 'f'"),
        ({"open_files": 30}, "f = [open('f', 'w') for _ in range(9)]", "ok", None),
    ],
)  # fmt: skip
def test_limits(limits: dict[str, Any], source: str, status: str, reason: str | None) -> None:
    finished = run(source, limits=Limits(**{"seconds": 30, **limits}))
    assert finished.status == status, finished
    assert reason in (None, finished.reason)


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
        ({"seconds": 0}, "seconds is 0; it must be a number above 0."),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": "6"}, "seconds is '6'"),
        ({"memory_mb": 0.5}, "memory_mb is 0.5; it must be a whole number above 0."),
        ({"processes": -1}, "processes is -1"),
        ({"open_files": True}, "open_files is True"),
    ],
)  # fmt: skip
def test_limits_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**arguments)


INCREMENT = "def f(x): return x + 1"


@both_levels
@pytest.mark.parametrize(
    ("code", "tests", "options", "passed", "reason"),
    [
        (INCREMENT, ["assert f(1) == 2", "assert f(2) == 3"], {}, 2, "passed"),
        (INCREMENT, ["assert f(1) == 1", "assert f(2) == 3"], {}, 1, "test 1 of 2: AssertionError"),
        (INCREMENT, "assert f(1) == 2", {}, 1, "passed"),
        (INCREMENT, "assert f(1) == 3, 'no'", {}, 0, "test 1 of 1: AssertionError: no"),
        (INCREMENT, ["assert f(n) == 2"], {"setup": "n = 1"}, 1, "passed"),
        (INCREMENT, "def check(candidate):\n    assert candidate(1) == 2", {"entry_point": "f"}, 1, "passed"),
        (INCREMENT, "def check(candidate):\n    assert candidate(1) == 3", {"entry_point": "f"}, 0, "test 1 of 1: AssertionError"),
        (INCREMENT, "def check(candidate): candidate()", {"entry_point": "g"}, 0, "test 1 of 1: NameError: name 'g' is not defined"),
        # each by itself
        ("n = []\ndef f(): n.append(1); return n", ["assert f() == [1]"] * 2, {}, 2, "passed"),
        ("import os\ndef f(): os.mkdir('f')", ["assert not os.path.exists('f'); f(); assert os.path.exists('f')"] * 2, {}, 2, "passed"),
        ("def f(x):\n    while x: pass", ["assert f(1)", "assert f(0) is None"], {"limits": Limits(seconds=2.0)}, 1, "test 1 of 2: ran for over 2 s"),
        ("def f(x):\n    while x: pass", ["f(0)", "f(1)", "f(0)"], {"limits": Limits(seconds=30), "total_seconds": 0.5}, 1, "test 2 of 3: no time was left for more of it"),
        (INCREMENT, ["assert 0", "f(1)", "f(1)"], {"stop_at_failure": True}, 0, None),
        # what does not count as passing
        ("raise SystemExit(0)", ["f()"], {}, 0, "test 1 of 1: SystemExit: 0"),
        ("import os; os._exit(0)", ["f()"], {}, 0, None),
        ("import sys; f = sys.exit", ["f(0)"], {}, 0, "test 1 of 1: SystemExit: 0"),
        ("exit()", ["f()"], {}, 0, "test 1 of 1: SystemExit: None"),
        ("print('passed', True, 1.0)\n1/0", ["f()"], {}, 0, None),
        ("import os\nfor fd in range(3, 100):\n    try: os.write(fd, b'passed' * 99)\n    except OSError: pass\nos._exit(0)", ["f()"], {}, 0, None),
        ("import os\nos.closerange(0, 100)", ["f()"], {}, 0, None),
        ("import os\nos.write = lambda *_: 0\nos._exit = lambda *_: 0", ["assert f"], {}, 0, None),
        (f"import os\nos.write = os._exit = lambda *_: 0\n{INCREMENT}", ["f(0)"], {}, 1, None),
        ("raise KeyboardInterrupt", ["f()"], {}, 0, "test 1 of 1: KeyboardInterrupt"),
        ("def f(", ["f()"], {}, 0, "test 1 of 1: SyntaxError: '(' was never closed"),
        # like an imported module
        (f"if __name__ == '__main__': 1/0\n{INCREMENT}", ["f(0)"], {}, 1, "passed"),
        ("from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int = 1", ["assert A() == A(1) != A(2) and repr(A()) == 'A(n=1)' and A().n == 1"], {}, 1, "passed"),
        # by what is printed
        ("print(int(input()) + 1)", [{"input": "1", "output": "2\n"}, {"input": "2\n", "output": "3 \n\n"}], {}, 2, "passed"),
        ("print(int(input()) + 1)", [{"input": "1", "output": "3"}, {"input": "x", "output": "1"}], {}, 0, "test 1 of 2: printed '2\\n', not '3'"),
        ("print(2); 1/0", [{"input": "", "output": "2"}], {}, 0, None),
        ("print('a  ')\nprint(' b')", [{"input": "", "output": "a\n b"}], {}, 1, "passed"),
        ("print('a')\nprint('b')", [{"input": "", "output": "a b"}], {}, 0, None),
        ("if __name__ == '__main__': print(2)", [{"input": "", "output": "2"}], {}, 1, "passed"),
    ],
)  # fmt: skip
def test_grade(
    guards: str, code: str, tests: Any, options: dict[str, Any], passed: int, reason: str | None
) -> None:
    options = {"limits": Limits(seconds=30), **options}
    verdict = grade(code, tests, guards=guards, **options)
    total = 1 if isinstance(tests, str) else len(tests)
    assert (verdict.passed, verdict.total) == (passed, total), verdict
    assert verdict.share == passed / total
    assert reason in (None, verdict.reason)


@pytest.mark.parametrize(
    "tests", [[], [3], [{"input": "1"}], [{"input": "1", "output": 2}], [None]]
)
def test_grade_refuses_tests_that_are_none(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"a test is|tests is empty"):
        grade(INCREMENT, tests)


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
    assert 'guards "limits" runs programs without: a program can use the network' in str(
        caught.value
    )
    assert reach in str(caught.value)


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
    level = isolation.find_level("namespaces")
    assert [g.name for g in level.guards if not g.on] == [guard]
    assert f"OFF: {guard}" in isolation.describe()
    assert run("print(1)").stdout == "1\n"
    assert run(program, limits=Limits(file_mb=4, seconds=30)).status == status


@both_levels
def test_the_log_names_every_guard(guards: str) -> None:
    line = isolation.describe(guards)
    assert line.startswith(f"sandbox: level {guards}; on: own session (")
    on, _, off = line.partition("; OFF: ")
    assert ("no network" in on) is (guards == "namespaces")
    assert ("no network" in off) is (guards == "limits")
    assert "\n" not in line
    if guards == "namespaces":
        assert isolation.find_level("auto") == isolation.find_level(guards)


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
    monkeypatch.setenv(process.TMP_VARIABLE, str(tmp_path))
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
    assert eval(found) == [
        "grpo_cli",
        "grpo_cli.sandbox.messages",
        "grpo_cli.sandbox.judge",
        "grpo_cli.sandbox.runner",
        "grpo_cli.sandbox.system_calls",
        "grpo_cli.sandbox.process",
        "grpo_cli.sandbox.isolation",
        "grpo_cli.sandbox.api",
        "grpo_cli.sandbox",
    ], found
