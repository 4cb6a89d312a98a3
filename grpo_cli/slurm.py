"""`grpo slurm`: a batch script that trains a recipe on many nodes, and goes on by itself.

The script is plain sbatch, srun and torchrun: variables at the top, what happens below them. What
it and a training process say to each other:

    output_dir=RUN_DIR resume=auto     the same folder in each sitting of a job
    USR1                               save and leave: the job is about to end
    GRPO_END_TIME, GRPO_GRACE          when SLURM ends the job (unix seconds); seconds from USR1 on
    GRPO_REQUEUE_FILE                  made by a run that left early and can go on
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from grpo_cli import parsing
from grpo_cli.compose import compose_and_call, given_keys, split_options
from grpo_cli.config import Recipe, allowed, knob
from grpo_cli.errors import TrainingError, UserError, listed, nearest

LEAST_GRACE = 30  # seconds: less is not enough to end a step and save


@dataclass
class Settings:
    """The words of `grpo slurm` itself; everything else on its command line is of the recipe."""

    nodes: int = knob(1, "Nodes that train.", ge=1)
    gpus_per_node: int | None = knob(None, "GPUs of a node; 0: training on the CPU.", ge=0)
    processes_per_node: int | None = knob(
        None, "Training processes of a node, on the CPU alone; null: 1. With GPUs one each.", ge=1
    )
    vllm_nodes: int = knob(0, "More nodes, with `grpo serve`, that sample.", ge=0)
    time: str | None = knob(None, "Time limit of one sitting, as SLURM writes it: 12:00:00.")
    partition: str | None = knob(None, "Partition.")
    account: str | None = knob(None, "Account.")
    qos: str | None = knob(None, "Quality of service.")
    cpus_per_task: int | None = knob(
        None, "CPUs of a node; null: whole nodes are asked for (--exclusive).", ge=1
    )
    mem: str | None = knob(
        None,
        "Memory of a node, such as 200G; null: all of a whole node, else the cluster's default.",
    )
    job_name: str | None = knob(None, "Name of the job; null: grpo-RECIPE.")
    grace: int = knob(
        300, "Seconds before the time limit at which the run is told to save and leave.",
        ge=LEAST_GRACE, le=65535,
    )  # fmt: skip
    max_requeues: int = knob(50, "How often the job may be started again.", ge=0)
    python: str | None = knob(
        None, "Python of the nodes; null: this one, with `setup` plain python."
    )
    setup: str | None = knob(
        None, "File whose lines run on each node first: module load, source .venv/bin/activate."
    )
    file: str | None = knob(None, "Where to write the script; null: in the run's output folder.")
    min_free_gb: float = knob(
        10.0, "Least GB free in the run's folder, or it does not begin.", ge=0
    )
    preflight_timeout: int = knob(60, "Seconds for the check of the nodes.", ge=10)
    check: bool = knob(
        True, "Load the data and try the rewards out here too; false: compose the recipe alone."
    )
    sbatch: dict[str, Any] = knob(
        {}, "Any other option of sbatch, such as sbatch.reservation=NAME."
    )
    srun: dict[str, Any] = knob(
        {}, "Any other option of srun for all steps, such as srun.container-image=FILE."
    )
    serve: dict[str, Any] = knob(
        {}, "A word of grpo serve for the nodes that sample, such as serve.tensor_parallel=4."
    )


WORDS = {f.name: f for f in dataclasses.fields(Settings)}
OPEN = ("sbatch", "srun", "serve")  # their entries have names of others
OF_RECIPES = {f.name for f in dataclasses.fields(Recipe)}

# Options of sbatch and srun, and words of grpo serve, that the script sets: what to write instead.
WRITTEN = {
    "nodes": "write nodes=N", "gpus-per-node": "write gpus_per_node=N", "time": "write time=LIMIT",
    "partition": "write partition=NAME", "account": "write account=NAME", "qos": "write qos=NAME",
    "cpus-per-task": "write cpus_per_task=N", "mem": "write mem=SIZE",
    "job-name": "write job_name=NAME", "signal": "write grace=SECONDS",
    "ntasks": "one task starts a node's processes",
    "ntasks-per-node": "one task starts a node's processes",
    "requeue": "it is always set", "no-requeue": "write max_requeues=0",
    "open-mode": "the sittings of a job have one log", "output": "the log lies beside the script",
    "array": "the tasks of an array are jobs of their own; submit once for each",
    "wait": "grpo slurm does not wait", "parsable": "the number is printed anyway",
    "nodelist": "of srun's, it is set for each step; of sbatch's, write sbatch.w=NODES",
    "kill-on-bad-exit": "it is set for each step", "chdir": "the job works where this command ran",
}  # fmt: skip
WRITTEN_FOR_SERVE = {
    "model": "it is the recipe's", "host": "the trainers are on other nodes",
    "port": "it follows from the job's number", "log": "it lies in the run's folder",
}  # fmt: skip


def usage() -> str:
    """What `grpo slurm --help` prints."""
    lines = [
        "grpo slurm recipe=NAME gpus_per_node=8 time=12:00:00 [word=value ...] [key=value ...]",
        "",
        "Checks the recipe as grpo train does, and writes a batch script that trains it. The job",
        "saves and requeues itself before its time is over. --submit: also runs sbatch.",
        "",
    ]
    for name, f in WORDS.items():
        default = "" if name in OPEN else f"={'null' if f.default is None else f.default}"
        head = f"  {name}{'.NAME=VALUE' if name in OPEN else default}"
        lines += textwrap.wrap(
            f"{head:26} {f.metadata['doc']}",
            98,
            subsequent_indent=" " * 27,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def split_words(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """(what is asked of this command, the words that compose the recipe).

    Raises:
        UserError: a word that does not exist or is given twice, a value of another type or out of
            its range, settings that contradict one another.
    """
    own: list[str] = []
    rest: list[str] = []
    seen: set[str] = set()
    for word in argv:
        key, equals, value = word.partition("=")
        first = re.split(r"[.@]", key.lstrip("+~"), maxsplit=1)[0]
        if first in OF_RECIPES:
            rest.append(word)
            continue
        if key not in WORDS.keys() - OPEN and not (first in OPEN and key.startswith(f"{first}.")):
            known = {*WORDS, *OF_RECIPES}
            raise UserError(
                f"{key}: there is no such word; there are {listed(WORDS)} and the keys of the "
                f"recipe.{nearest(key, known)}"
            )
        if not (equals and value):
            raise UserError(f"{key}: lacks a value; write {key}=VALUE.")
        if key in seen:
            raise UserError(f"{key}: is given twice.")
        seen.add(key)
        own.append(word)
    return parse(own), rest


def parse(words: Sequence[str]) -> Settings:
    """`word=value`s as checked settings.

    Raises:
        UserError: as `split_words`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    settings = Settings()
    texts = [name for name, f in WORDS.items() if str(f.type).startswith("str")]
    for word in words:
        key, _, value = word.partition("=")
        first, _, name = key.partition(".")
        if any(ord(c) < 32 for c in word):
            raise UserError(f"{key}: must be a single line.")
        if key in texts:  # 12:00:00 in YAML is a number
            setattr(settings, key, None if value == "null" else value)
        elif first in OPEN:
            getattr(settings, first)[name if first == "serve" else name.replace("_", "-")] = value
        else:
            try:
                typed = OmegaConf.merge(
                    OmegaConf.structured(settings), OmegaConf.from_dotlist([word])
                )
                settings = cast(Settings, OmegaConf.to_object(typed))
            except OmegaConfBaseException as error:
                raise UserError(parsing.explain(error) or str(error)) from error
    for name, f in WORDS.items():
        _check_range(name, getattr(settings, name), f)
    _check_together(settings)
    return settings


def _check_range(name: str, value: Any, f: dataclasses.Field[Any]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    low, high = f.metadata["ge"], f.metadata["le"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise UserError(f"{name} = {value}: must be {allowed(f)}.")


def _check_together(settings: Settings) -> None:
    s = settings
    if s.gpus_per_node is None:
        raise UserError("gpus_per_node: say how many GPUs a node has; 0: train on CPUs.")
    if s.gpus_per_node and s.processes_per_node is not None:
        raise UserError(
            f"processes_per_node = {s.processes_per_node}: is of CPUs; with gpus_per_node = "
            f"{s.gpus_per_node} each GPU has a process."
        )
    if s.time is None:
        raise UserError("time: say how long a sitting may last, such as time=12:00:00.")
    limit = seconds_of(s.time)
    if limit <= 2 * s.grace:
        raise UserError(
            f"time = {s.time}: must be more than twice grace = {s.grace} seconds, or the run is "
            "told to leave before it gets anywhere."
        )
    for where in ("sbatch", "srun"):
        for name in getattr(s, where):
            if why := WRITTEN.get(name):
                raise UserError(f"{where}.{name}: cannot be set: {why}.")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
                raise UserError(f"{where}.{name}: is no name of an option.")
    if s.serve and not s.vllm_nodes:
        raise UserError(f"serve.{next(iter(s.serve))}: is only read with vllm_nodes.")
    for name in s.serve:
        if why := WRITTEN_FOR_SERVE.get(name):
            raise UserError(f"serve.{name}: cannot be set: {why}.")
    if s.setup is not None and not Path(s.setup).expanduser().is_file():
        raise UserError(f"setup = {s.setup}: there is no such file.")


def seconds_of(limit: str) -> int:
    """A time limit of SLURM's: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        UserError: it is none.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise UserError(
            f"time = {limit}: must be as SLURM writes it: 90 (minutes), 12:00:00, 2-00."
        )
    days, *parts = found.groups()
    numbers = [int(p) for p in parts if p is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


@dataclass(frozen=True)
class Place:
    """Where a job works and what it runs: words of bash, in which $SLURM_JOB_ID is known."""

    work_dir: str
    run_dir: str
    log: str  # with SLURM's %j in it
    python: str
    setup: str = ""  # lines


def make_place(settings: Settings, recipe: Recipe, words: Sequence[str], file: Path) -> Place:
    """The place of a job that is submitted from here."""
    given = any(w.lstrip("+").startswith("output_dir=") for w in words)
    folder = shlex.quote(str(Path(recipe.output_dir).expanduser().resolve()))
    python = settings.python
    if python is None:
        python = "python" if settings.setup else shlex.quote(sys.executable)
    setup = ""
    if settings.setup is not None:
        setup = Path(settings.setup).expanduser().read_text(encoding="utf-8").strip("\n")
    return Place(
        work_dir=shlex.quote(str(Path.cwd())),
        run_dir=folder if given else f"{folder}/job-$SLURM_JOB_ID",
        log=str(file.parent / "%x-%j.out"),
        python=python,
        setup=setup,
    )


def words_to_compose(settings: Settings, words: Sequence[str]) -> list[str]:
    """The recipe's words with those that the script adds, for the check.

    Raises:
        UserError: one of them is the script's to set.
    """
    if not any(w.startswith("recipe=") for w in words):
        raise UserError("grpo slurm: say what to train: recipe=NAME or recipe=./my.yaml.")
    added = ["resume=auto"]
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "resume" and value != "auto":
            raise UserError(
                f"{word}: the script sets resume=auto, by which a requeued job goes on."
            )
        if key == "overwrite" and value != "false":
            raise UserError(f"{word}: a requeued job would discard what it has done.")
    if settings.vllm_nodes:
        added += [*serving_words(words), "generation.vllm.servers=[http://node:8000]"]
    return [*(w for w in words if w.lstrip("+") != "resume=auto"), *added]


def serving_words(words: Sequence[str]) -> list[str]:
    """What makes a recipe sample from servers, but for their addresses.

    Raises:
        UserError: the words say something else.
    """
    added = [w for w in ["generation=vllm_server"] if w not in words]
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "generation" and value != "vllm_server":
            raise UserError(f"{word}: with vllm_nodes the recipe samples with vllm_server.")
        if key == "generation.vllm.servers":
            raise UserError(f"{key}: with vllm_nodes the servers are the job's own.")
    if not any(w.lstrip("+").startswith("generation.vllm.start_timeout=") for w in words):
        added.append("generation.vllm.start_timeout=1200")  # a large model loads for long
    return added


def check(settings: Settings, recipe: Recipe) -> None:
    """What `grpo train` would find wrong, and what the nodes are not made for.

    Raises:
        UserError: as it says.
    """
    from grpo_cli import prepare, serve

    if settings.gpus_per_node == 0 and recipe.device == "cuda":
        raise UserError("device = cuda: gpus_per_node is 0; set one of the two.")
    if settings.gpus_per_node and recipe.device == "cpu":
        raise UserError(
            f"device = cpu: gpus_per_node is {settings.gpus_per_node}; write device=auto, or "
            "gpus_per_node=0 and processes_per_node=N."
        )
    serve.parse([f"{name}={value}" for name, value in settings.serve.items()])
    if settings.check:
        prepared = prepare.for_training(recipe)
        for scorer in (prepared.scorer, prepared.eval_scorer):
            scorer.crew.close()


def script(settings: Settings, words: Sequence[str], place: Place, command: str) -> str:
    """The batch script.

    Args:
        words: those of the recipe. command: what wrote it, for its first lines.
    """
    s = settings
    gpus = s.gpus_per_node or 0
    processes = gpus or s.processes_per_node or 1
    kinds = [f"{s.nodes} node{'s' * (s.nodes > 1)} train"]
    if s.vllm_nodes:
        kinds.append(f"{s.vllm_nodes} node{'s' * (s.vllm_nodes > 1)} sample")
    name = s.job_name or "grpo-" + re.sub(r"[^\w.-]+", "-", _recipe_of(words))
    options: dict[str, Any] = {
        "job-name": name,
        "nodes": s.nodes + s.vllm_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": s.cpus_per_task,
        "exclusive": s.cpus_per_task is None or None,
        "mem": s.mem or ("0" if s.cpus_per_task is None else None),
        "time": s.time,
        "signal": f"B:USR1@{s.grace}",
        "requeue": True,
        "open-mode": "append",
        "output": place.log,
        "partition": s.partition,
        "account": s.account,
        "qos": s.qos,
        **s.sbatch,
    }
    lines = [
        "#!/bin/bash",
        f"# {' and '.join(kinds)}, {processes} processes each.",
        "# Written by:",
    ]
    lines += [f"#   {' '.join(command.split())}", "# docs/slurm.md says what it does when.", "#"]
    lines += [f"#SBATCH {o}" for o in _options(options)]
    variables = {
        "GRACE": (s.grace, "seconds from USR1 to the end; the number in --signal"),
        "GPUS": (gpus, "of a node"),
        "PROCESSES": (processes, "that train, of a node"),
        "VLLM_NODES": (s.vllm_nodes, "the last of the nodes"),
        "WORK_DIR": (place.work_dir, "where the words below are read"),
        "RUN_DIR": (f"${{GRPO_RUN_DIR:-{place.run_dir}}}", "the same after a requeue"),
        "PYTHON": (f"({place.python})", "of the nodes, after `setup`"),
        "SRUN": (f"({' '.join(map(shlex.quote, _options(s.srun)))})", "more options of srun"),
        "MAX_REQUEUES": (s.max_requeues, "how often the job may start again"),
        "PREFLIGHT_SECONDS": (s.preflight_timeout, "for the check of the nodes"),
        "MIN_FREE_GB": (f"{s.min_free_gb:g}", "in RUN_DIR"),
        "PREFLIGHT_PORT": ("$((23000 + SLURM_JOB_ID % 8000))", ""),
        "MASTER_PORT": ("$((15000 + SLURM_JOB_ID % 8000))", ""),
    }
    if s.vllm_nodes:
        variables["SERVE_PORT"] = ("$((7000 + SLURM_JOB_ID % 8000))", "")
    lines.append("")
    for key, (value, doc) in variables.items():
        lines.append(f"{key}={value}" + (f"  # {doc}" if doc else ""))
    lines += _array(
        "WORDS", [w for w in words if not w.lstrip("+").startswith(("output_dir=", "resume="))]
    )
    if s.vllm_nodes:
        lines += _array("SAMPLE_WORDS", serving_words(words))
        defaults = {} if "data_parallel" in s.serve else _data_parallel(s)
        lines += _array("SERVE_WORDS", [f"{k}={v}" for k, v in (defaults | s.serve).items()])
    setup = textwrap.indent(place.setup or ":", "  ")
    lines += ["", "# Runs on each node before anything else.", "setup() {", setup, "}", ""]
    parts = [NODE, JOB, PREFLIGHT, TRAIN]
    if s.vllm_nodes:
        parts = [NODE, SERVE_NODE, JOB, SERVE, PREFLIGHT, START_SERVERS, TRAIN]
    return "\n".join(lines) + "".join(parts)


def _recipe_of(words: Sequence[str]) -> str:
    return next((Path(w.partition("=")[2]).stem for w in words if w.startswith("recipe=")), "run")


def _data_parallel(settings: Settings) -> dict[str, Any]:
    """A copy of the model for each GPU, or for each `tensor_parallel` of them."""
    copies = (settings.gpus_per_node or 1) // max(1, int(settings.serve.get("tensor_parallel", 1)))
    return {"data_parallel": copies} if copies > 1 else {}


def _options(values: Mapping[str, Any]) -> list[str]:
    """`--name=value`s; None is left out, True is a flag."""
    out = []
    for name, value in values.items():
        dashes = "--" if len(name) > 1 else "-"
        if value is True or value == "true":
            out.append(dashes + name)
        elif value is not None:
            out.append(f"{dashes}{name}{'=' if len(name) > 1 else ' '}{value}")
    return out


def _array(name: str, values: Sequence[str]) -> list[str]:
    return [f"{name}=(", *(f"  {shlex.quote(v)}" for v in values), ")"]


def main(argv: list[str]) -> None:
    """`grpo slurm`: composes the recipe, checks it, writes the script and may submit it."""
    options, words = split_options(argv)
    if {"-h", "--help"} & {*options}:
        print(usage(), end="")
        return
    if {"-m", "--multirun"} & {*options}:
        raise UserError("grpo slurm: writes one job; run it once for each of a sweep's choices.")
    submits = "--submit" in options
    options = [o for o in options if o != "--submit"]
    settings, rest = split_words(words)
    for_check = words_to_compose(settings, rest)

    def task(cfg: DictConfig) -> None:
        recipe = parsing.parse(cfg, given_keys(cfg))
        check(settings, recipe)
        file = write(settings, recipe, rest, shlex.join(["grpo", "slurm", *argv]))
        if submits:
            submit(file)

    compose_and_call([*for_check, *options], task)


def write(settings: Settings, recipe: Recipe, words: Sequence[str], command: str) -> Path:
    """Writes the script, and says where it is and how to submit it.

    Raises:
        UserError: it cannot be written.
    """
    kind = "train_and_serve" if settings.vllm_nodes else "train"
    folder = Path(recipe.output_dir).expanduser()
    file = (
        Path(settings.file).expanduser() if settings.file else folder / f"{kind}.sbatch"
    ).resolve()
    place = make_place(settings, recipe, words, file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)  # where the job's log goes too
        file.write_text(script(settings, words, place, command), encoding="utf-8")
    except OSError as error:
        raise UserError(f"file = {file}: cannot be written: {error.strerror}.") from error
    print(f"written: {file}")
    print(f"submit it with: sbatch {shlex.quote(str(file))}")
    print(f"the run: {place.run_dir}; the job's log: {place.log}")
    return file


def submit(file: Path) -> None:
    """Runs sbatch, and prints the job's number.

    Raises:
        UserError: there is no sbatch. TrainingError: it refuses.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(file)], capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError as error:
        raise UserError("--submit: there is no sbatch here; submit from a login node.") from error
    except subprocess.TimeoutExpired as error:
        raise TrainingError("--submit: sbatch has not answered for 120 seconds.") from error
    if done.returncode:
        raise TrainingError(f"--submit: sbatch refused: {done.stderr.strip()}")
    print(f"submitted: job {done.stdout.strip().partition(';')[0]}")


# The script below its variables, in four parts, two of which only nodes that sample have.
NODE = r"""
# What a node runs. Bash hands it over as text, for a container may not let functions through.
preflight_node() {
  setup
  exec "${PYTHON[@]}" -m grpo_cli preflight --nodes="$NODE_LIST" --rank="$SLURM_NODEID" \
    --master="$MASTER_ADDR:$PREFLIGHT_PORT" --dir="$RUN_DIR" --gpus="$GPUS" "${PORTS[@]}" \
    --min-free-gb="$MIN_FREE_GB" --timeout="$PREFLIGHT_SECONDS"
}

train_node() {
  trap '' USR1 TERM # of the training processes; torchrun dies of the one and kills at the other
  setup
  export PET_SIGNALS_TO_HANDLE=SIGINT # of torchrun
  exec "${PYTHON[@]}" -m torch.distributed.run --nnodes="$TRAIN_NODES" \
    --node-rank="$SLURM_NODEID" --nproc-per-node="$PROCESSES" --master-addr="$MASTER_ADDR" \
    --master-port="$MASTER_PORT" --max-restarts=0 -m grpo_cli train "$@"
}
"""

SERVE_NODE = r"""
serve_node() {
  local server status over=''
  setup
  (trap '' USR1; exec "${PYTHON[@]}" -m grpo_cli serve "$@" host=0.0.0.0 port="$SERVE_PORT" \
    log="$RUN_DIR/logs/vllm-$SLURMD_NODENAME.log") &
  server=$!
  trap 'over=1; kill "$server"' USR1 TERM # training is over, or the job is
  while wait "$server"; status=$?; kill -0 "$server" 2>/dev/null; do :; done
  [ -n "$over" ] && exit 0
  exit "$status"
}
"""

JOB = r"""
set -uo pipefail
say() { echo "[slurm $(date +%T)] $*"; }

cd "$WORK_DIR" && mkdir -p "$RUN_DIR/logs" || exit 1
RUN_DIR=$(cd "$RUN_DIR" && pwd) || exit 1
WORDS+=("$@") # sbatch FILE key=value: more words of the recipe
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
NODE_LIST=$(IFS=,; echo "${NODES[*]}")
TRAIN_NODES=$((${#NODES[@]} - VLLM_NODES))
MASTER_ADDR=${NODES[0]}
PORTS=("--port=$MASTER_ADDR:$MASTER_PORT")

export SLURM_EXPORT_ENV=ALL # steps have this script's environment, also after sbatch --export=NONE
# Without these a step has one CPU, and under torchrun each process one thread.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
threads=$((SRUN_CPUS_PER_TASK / PROCESSES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

end=${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)}
[ -n "$end" ] && export GRPO_END_TIME=$end GRPO_GRACE=$GRACE # not of a job without a time limit
export GRPO_REQUEUE_FILE=$RUN_DIR/logs/requeue
rm -f "$GRPO_REQUEUE_FILE"

state() { timeout 20 scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
summary() { stat -c '%i %y' "$RUN_DIR/summary.json" 2>/dev/null; }
checkpoints() { # the newest; a sitting that changes nothing here has come to nothing
  cd "$RUN_DIR/checkpoints" 2>/dev/null || return
  printf '%s\n' step-* | grep -E '^step-[0-9]+$' | sort -t- -k2n | tail -n 1
  stat -c '%n %y' -- *.interrupted 2>/dev/null
}
HAD=$(checkpoints) SUMMARY=$(summary)

# Steps. Signals that come while one runs are noted and passed on; what follows is decided after it.
STEP='' TOLD='' ENDING='' TIMERS=()
told() { # SIGNAL
  if [ "$1" = TERM ] && [ "$(state)" != RUNNING ]; then
    ENDING=1 # cancelled, or requeued by SLURM, which tells all steps and decides what follows
  elif [ -z "$TOLD" ]; then
    TOLD=$1
    say "got $1: the run is to save and leave"
    pass_on
  fi
}
trap 'told USR1' USR1
trap 'told TERM' TERM

pass_on() {
  [ -n "$STEP" ] || return
  kill -USR1 "$STEP" 2>/dev/null # srun gives it to the tasks; at TERM it would end them by force
  # A run that stays until just before the end, as one that was not up yet when it was told, is
  # ended: what it saved before is there, and the job can still be requeued.
  local seconds=$((GRACE - GRACE / 8 - 5)) left=$((${GRPO_END_TIME:-9999999999} - $(date +%s) - 10))
  [ "$left" -gt 0 ] && [ "$left" -lt "$seconds" ] && seconds=$left # USR1 may be late
  end_step_in "$seconds"
}

end_step_in() { # SECONDS
  local step=$STEP
  (trap 'kill $!' TERM; sleep "$1" & wait $! && kill -TERM "$step") >/dev/null 2>&1 &
  TIMERS+=($!)
}

on_nodes() { # FUNCTION FIRST COUNT [OPTION...] -- [WORD...]: one task on each of these nodes
  local call=$1 list options
  list=$(IFS=,; echo "${NODES[*]:$2:$3}")
  options=("--nodes=$3" "--ntasks=$3" --ntasks-per-node=1 "--nodelist=$list")
  shift 3
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  exec srun "${options[@]}" ${SRUN[@]+"${SRUN[@]}"} bash -c "$(
    declare -f setup "$call"
    declare -p PYTHON GPUS PROCESSES RUN_DIR NODE_LIST TRAIN_NODES MASTER_ADDR MASTER_PORT PORTS \
      PREFLIGHT_PORT PREFLIGHT_SECONDS MIN_FREE_GB ${SERVE_PORT:+SERVE_PORT}
    echo "$call \"\$@\""
  )" "$call" "$@"
}

attend() { # waits for STEP, though signals end bash's own `wait`; returns its exit status
  local status
  [ -n "$TOLD" ] && pass_on # before STEP was known
  while wait "$STEP"; status=$?; kill -0 "$STEP" 2>/dev/null; do :; done
  # A signal at the very end: the second time `wait` has the step's own status.
  if [ "$status" -gt 128 ]; then wait "$STEP"; status=$?; fi 2>/dev/null
  STEP=''
  kill ${TIMERS[@]+"${TIMERS[@]}"} 2>/dev/null
  TIMERS=()
  return "$status"
}

silent_nodes() { # on which nothing can be started any more
  printf '%s\n' "${NODES[@]}" | xargs -P 32 -I{} sh -c 'timeout 30 srun --overlap --nodes=1 \
    --ntasks=1 --nodelist={} true >/dev/null 2>&1 || echo {}' | sort | tr '\n' ' '
}

finish() { # STATUS
  STEP=${SERVING:-}
  if [ -n "$STEP" ] && [ -z "$ENDING" ]; then
    kill -USR1 "$STEP"
    end_step_in 20
    attend
  fi 2>/dev/null
  exit "$1"
}

go_on() { # WHY: requeues the job, unless that leads nowhere
  local job='' fruitless=0
  say "$1"
  if [ "$(checkpoints)" = "$HAD" ]; then
    read -r job fruitless 2>/dev/null <"$RUN_DIR/logs/fruitless"
    [ "$job" = "$SLURM_JOB_ID" ] || fruitless=0
    fruitless=$((fruitless + 1))
  fi
  echo "$SLURM_JOB_ID $fruitless" >"$RUN_DIR/logs/fruitless"
  if [ "$fruitless" -ge 2 ]; then
    say "not requeued: two sittings in a row have saved nothing new in $RUN_DIR/checkpoints"
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
    say "not requeued: this was start $((MAX_REQUEUES + 1)), and MAX_REQUEUES is $MAX_REQUEUES"
  elif [ "$(state)" = RUNNING ]; then
    say "requeueing the job"
    if scontrol requeue "$SLURM_JOB_ID"; then
      if [ -z "$ENDING" ]; then sleep 300 & wait $!; fi # until SLURM ends this script
      finish 1
    fi
    say "SLURM does not requeue it"
  fi
  say "to go on by hand: GRPO_RUN_DIR=$RUN_DIR sbatch FILE"
  finish 1
}

say "start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $NODE_LIST, in $RUN_DIR"
"""

SERVE = r"""
# The addresses of the nodes that sample.
SERVERS=''
for node in "${NODES[@]:TRAIN_NODES}"; do
  SERVERS+=${SERVERS:+,}http://$node:$SERVE_PORT
  PORTS+=("--port=$node:$SERVE_PORT")
done
WORDS+=("${SAMPLE_WORDS[@]}" "generation.vllm.servers=[$SERVERS]")
"""

PREFLIGHT = r"""
# Do the nodes see one another, and are they alike?
on_nodes preflight_node 0 "${#NODES[@]}" --kill-on-bad-exit=0 -- &
STEP=$!
end_step_in $((PREFLIGHT_SECONDS + 30)) # should a node not even start it
attend
status=$?
[ -n "$ENDING" ] && finish "$status"
[ -n "$TOLD" ] && go_on "told to leave before training began"
if [ "$status" -ne 0 ]; then
  say "the nodes are not fit to train together; nothing was started"
  finish 1
fi
"""

START_SERVERS = r"""
say "what the servers say: $RUN_DIR/logs/serve-*.out"
on_nodes serve_node "$TRAIN_NODES" "$VLLM_NODES" --kill-on-bad-exit=0 \
  --output="$RUN_DIR/logs/serve-%N.out" --open-mode=append -- \
  "${WORDS[@]}" ${SERVE_WORDS[@]+"${SERVE_WORDS[@]}"} &
SERVING=$!
"""

TRAIN = r"""
on_nodes train_node 0 "$TRAIN_NODES" --kill-on-bad-exit=1 -- \
  "${WORDS[@]}" "output_dir=\"$RUN_DIR\"" resume=auto &
STEP=$!
attend
status=$?
say "training ended with $status"
[ -n "$ENDING" ] && finish "$status"
[ -e "$GRPO_REQUEUE_FILE" ] && go_on "the run has left early, and can go on"
[ -n "$TOLD" ] && [ "$(summary)" = "$SUMMARY" ] && go_on "told to leave before the run's end"
if [ "$status" -ne 0 ]; then
  silent=$(silent_nodes)
  [ -n "$silent" ] && go_on "no answer any more from: $silent"
fi
finish "$status"
"""
