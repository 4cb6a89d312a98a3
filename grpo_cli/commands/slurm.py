"""`grpo slurm`: writes a batch script that trains a recipe on many nodes and requeues itself.

The script is plain sbatch, srun and torchrun, written from templates/job.sh.j2: variables at the
top, the job below them. The script and the training processes communicate by:

    output_dir=RUN_DIR resume=auto     the same folder each time that the job starts
    USR1                               sent to the run: save and exit, the job is about to end
    GRPO_END_TIME, GRPO_GRACE          when SLURM ends the job (Unix seconds); seconds from USR1 on
    GRPO_REQUEUE_FILE                  created by a run that exited early and can be resumed
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from omegaconf import DictConfig

from grpo_cli.config.command_line import split_options
from grpo_cli.config.compose import compose_and_call, given_keys
from grpo_cli.config.knob import knob
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.words import check_recipe_words, described, parse, split
from grpo_cli.errors import TrainingError, UserError, counted
from grpo_cli.files import read_text

LEAST_GRACE = 30  # seconds; a shorter time is not enough to end a step and save


@dataclass
class SlurmOptions:
    """The arguments of `grpo slurm`; all others compose the recipe."""

    nodes: int = knob(1, "Number of nodes that train.", ge=1)
    gpus_per_node: int | None = knob(None, "GPUs of each node; 0: train on CPUs.", ge=0)
    processes_per_node: int | None = knob(
        None, "Training processes of each node when training on CPUs; null: 1.", ge=1
    )
    vllm_nodes: int = knob(
        0, "Number of additional nodes that run `grpo serve` for sampling.", ge=0
    )
    time: str | None = knob(
        None, "Time limit of the job each time that it starts, as SLURM writes it: 12:00:00."
    )
    partition: str | None = knob(None, "Partition to submit to.")
    account: str | None = knob(None, "Account to charge.")
    qos: str | None = knob(None, "Quality of service (QOS) of the job.")
    cpus_per_task: int | None = knob(
        None, "CPUs to request on each node; null: complete nodes (--exclusive).", ge=1
    )
    mem: str | None = knob(
        None,
        "Memory to request on each node, such as 200G; null: all memory of a complete node, else "
        "the cluster's default.",
    )
    job_name: str | None = knob(None, "Name of the job; null: grpo-RECIPE.")
    grace: int = knob(
        300, "Seconds before the time limit at which the run is asked to save and exit.",
        ge=LEAST_GRACE, le=65535,
    )  # fmt: skip
    max_requeues: int = knob(50, "How often the job may be requeued.", ge=0)
    python: str | None = knob(
        None, "Python to run on the nodes; null: this Python, or `python` if setup=FILE is given."
    )
    setup: str | None = knob(
        None, "File of shell lines that run on each node first, such as source .venv/bin/activate."
    )
    file: str | None = knob(
        None, "File to write the script to; null: a file in the run's output folder."
    )
    min_free_gb: float = knob(
        10.0,
        "Least free space in the run's folder, in GB; with less, the job does not start.",
        ge=0,
    )
    preflight_timeout: int = knob(60, "Seconds that the check of the nodes may take.", ge=10)
    check: bool = knob(
        True, "Also load the data and try the rewards here; false: only compose the recipe."
    )
    sbatch: dict[str, str] = knob(
        {}, "Any other option of sbatch, such as sbatch.reservation=NAME."
    )
    srun: dict[str, str] = knob(
        {}, "Any other option of srun for all steps, such as srun.container-image=FILE."
    )
    serve: dict[str, str] = knob(
        {}, "Any word of grpo serve for the nodes that sample, such as serve.tensor_parallel=4."
    )


# Options of sbatch and srun, and arguments of grpo serve, that the script sets itself.
SET_BY_SCRIPT = (
    "signal", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "open-mode", "output", "array",
    "wait", "parsable", "nodelist", "kill-on-bad-exit", "chdir",
)  # fmt: skip


USAGE = """\
grpo slurm recipe=NAME gpus_per_node=8 time=12:00:00 [key=value ...]

Checks the recipe as grpo train does, and writes a batch script that trains it.
The job saves and requeues itself before its time limit. --submit also runs
sbatch.

"""


MAIN = (
    "nodes", "gpus_per_node", "vllm_nodes", "time", "partition", "account", "mem", "setup",
    "sbatch",
)  # fmt: skip
ALL = USAGE + described(SlurmOptions)
HELP = f"{USAGE}{described(SlurmOptions, names=MAIN)}\n`grpo help slurm` lists all words.\n"


def split_words(argv: Sequence[str]) -> tuple[SlurmOptions, list[str]]:
    """Returns (the settings of the job, the words that compose the recipe).

    Raises:
        UserError: a word that does not exist or is given twice, a value of another type or out of
            its range, settings that contradict one another.
    """
    own, rest = split(SlurmOptions, argv)
    check_recipe_words(SlurmOptions, rest)
    settings = parse(SlurmOptions, own)
    for where in ("sbatch", "srun"):
        entries = {name.replace("_", "-"): v for name, v in getattr(settings, where).items()}
        setattr(settings, where, entries)
    _check_together(settings)
    return settings, rest


def _check_together(s: SlurmOptions) -> None:
    if s.gpus_per_node is None:
        raise UserError("gpus_per_node: say how many GPUs a node has; 0: train on CPUs.")
    if s.gpus_per_node and s.processes_per_node is not None:
        raise UserError(
            f"processes_per_node = {s.processes_per_node}: is only read on CPUs; with "
            f"gpus_per_node = {s.gpus_per_node} each GPU has a process."
        )
    if s.time is None:
        raise UserError("time: set the time limit of the job, such as time=12:00:00.")
    if s.time.isdigit():
        raise UserError(
            f"time = {s.time}: SLURM reads minutes; write time={s.time}:00:00 for hours, "
            f"time=0:{s.time}:00 for minutes."
        )
    for where in ("sbatch", "srun"):
        for name in getattr(s, where):
            word = name.replace("-", "_")
            if word in vars(s):
                raise UserError(f"{where}.{name}: cannot be set: write {word}=VALUE.")
            if name in SET_BY_SCRIPT:
                raise UserError(f"{where}.{name}: cannot be set: the script sets it.")
    if s.serve and not s.vllm_nodes:
        raise UserError(f"serve.{next(iter(s.serve))}: is only read with vllm_nodes.")
    for name in s.serve:
        if name in ("model", "host", "port", "log"):
            raise UserError(f"serve.{name}: cannot be set: the script sets it.")
    if s.setup is not None and not Path(s.setup).expanduser().is_file():
        raise UserError(f"setup = {s.setup}: there is no such file.")


@dataclass(frozen=True)
class Place:
    """Folders and programs of a job, quoted for bash; $SLURM_JOB_ID may occur in them."""

    work_dir: str
    run_dir: str
    log: str  # with SLURM's %j in it
    python: str
    setup: str = ""  # lines


def words_to_compose(settings: SlurmOptions, words: Sequence[str]) -> list[str]:
    """Returns the recipe's words and those that the script adds, to compose and check them.

    Raises:
        UserError: a word that the script sets itself.
    """
    if not any(w.startswith("recipe=") for w in words):
        raise UserError("grpo slurm: say what to train: recipe=NAME or recipe=./my.yaml.")
    added = ["resume=auto"]
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "resume" and value != "auto":
            raise UserError(f"{word}: the script sets resume=auto, so that a requeued job resumes.")
        if key == "overwrite" and value != "false":
            raise UserError(f"{word}: a requeued job would discard what it has done.")
    if settings.vllm_nodes:
        added += [*serving_words(words), "generation.vllm.servers=[http://node:8000]"]
    return [*(w for w in words if w.lstrip("+") != "resume=auto"), *added]


def serving_words(words: Sequence[str]) -> list[str]:
    """Returns the words that make a recipe sample from servers, except their addresses.

    Raises:
        UserError: the given words contradict them.
    """
    added = [w for w in ["generation=vllm_server"] if w not in words]
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "generation" and value != "vllm_server":
            raise UserError(f"{word}: with vllm_nodes the recipe samples with vllm_server.")
        if key == "generation.vllm.servers":
            raise UserError(f"{key}: with vllm_nodes the servers are the job's own.")
    return added


def check(settings: SlurmOptions, recipe: Recipe) -> None:
    """Runs the checks of `grpo train`, and checks that recipe and nodes fit together."""
    from grpo_cli.commands import serve
    from grpo_cli.training import prepare

    if settings.gpus_per_node == 0 and recipe.device == "cuda":
        raise UserError("device = cuda: gpus_per_node is 0; set one of the two.")
    if settings.gpus_per_node and recipe.device == "cpu":
        raise UserError(
            f"device = cpu: gpus_per_node is {settings.gpus_per_node}; write device=auto, or "
            "gpus_per_node=0 and processes_per_node=N."
        )
    serve.parse_words([f"{name}={value}" for name, value in settings.serve.items()])
    if settings.check:
        prepare.for_training(recipe).close()


def script(settings: SlurmOptions, words: Sequence[str], place: Place, command: str) -> str:
    """Returns the batch script.

    Args:
        words: the words that compose the recipe. command: the command line that writes the script.
    """
    s = settings
    gpus = s.gpus_per_node or 0
    processes = gpus or s.processes_per_node or 1
    kinds = [f"{counted(s.nodes, 'node')} train"]
    if s.vllm_nodes:
        kinds.append(f"{counted(s.vllm_nodes, 'node')} sample")
    recipe = next((Path(w.partition("=")[2]).stem for w in words if w.startswith("recipe=")), "run")
    name = s.job_name or "grpo-" + re.sub(r"[^\w.-]+", "-", recipe)
    whole = s.cpus_per_task is None
    options: dict[str, Any] = {
        "job-name": name, "nodes": s.nodes + s.vllm_nodes, "ntasks-per-node": 1,
        "gpus-per-node": gpus or None, "cpus-per-task": s.cpus_per_task,
        "exclusive": whole or None, "mem": s.mem or ("0" if whole else None), "time": s.time,
        "signal": f"B:USR1@{s.grace}", "requeue": True, "open-mode": "append",
        "output": place.log, "partition": s.partition, "account": s.account, "qos": s.qos,
        **s.sbatch,
    }  # fmt: skip
    words_of_recipe = [w for w in words if not w.lstrip("+").startswith(("output_dir=", "resume="))]
    arrays = {"WORDS": words_of_recipe}
    if s.vllm_nodes:
        arrays["SAMPLE_WORDS"] = serving_words(words)
        # One copy of the model on every `tensor_parallel` GPUs.
        copies = (gpus or 1) // max(1, int(s.serve.get("tensor_parallel", 1)))
        served = ({"data_parallel": str(copies)} if copies > 1 else {}) | s.serve
        arrays["SERVE_WORDS"] = [f"{k}={v}" for k, v in served.items()]
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("grpo_cli.commands"),
        undefined=jinja2.StrictUndefined,
        comment_start_string="<#--",  # `${#` is a length in bash
        comment_end_string="--#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("job.sh.j2")
    return template.render(
        s=s,
        place=place,
        kinds=" and ".join(kinds),
        gpus=gpus,
        processes=processes,
        command=" ".join(command.split()),
        sbatch=[_quoted(option) for option in _options(options)],
        srun=shlex.join(_options(s.srun)),
        arrays={name: [shlex.quote(v) for v in values] for name, values in arrays.items()},
        setup=textwrap.indent(place.setup or ":", "  "),
    )


def _options(values: Mapping[str, Any]) -> list[str]:
    """Returns options as `--name=value` or `-nvalue`; None is left out, True is a flag."""
    out = []
    for name, value in values.items():
        dashes = "--" if len(name) > 1 else "-"
        if value is True or value == "true":
            out.append(dashes + name)
        elif value is not None:
            out.append(f"{dashes}{name}{'=' if len(name) > 1 else ''}{value}")
    return out


def _quoted(option: str) -> str:
    """Returns an option quoted for a line of a batch script; sbatch reads quotes as a shell."""
    name, equals, value = option.partition("=")
    return name + equals + shlex.quote(value) if re.search(r"[\s'\"#\\]", value) else option


def main(argv: list[str]) -> None:
    """Composes the recipe, checks it, writes the script and may submit it."""
    options, words = split_options(argv, "grpo slurm: writes one job")
    submits = "--submit" in options
    options = [o for o in options if o != "--submit"]
    settings, rest = split_words(words)
    for_check = words_to_compose(settings, rest)

    def task(cfg: DictConfig) -> None:
        from grpo_cli.training import prepare

        recipe = prepare.parse(cfg, given_keys(cfg))
        check(settings, recipe)
        file = write(settings, recipe, rest, shlex.join(["grpo", "slurm", *argv]))
        if submits:
            submit(file)

    compose_and_call([*for_check, *options], task)


def write(settings: SlurmOptions, recipe: Recipe, words: Sequence[str], command: str) -> Path:
    """Writes the script, and prints where it is and how to submit it."""
    kind = "train_and_serve" if settings.vllm_nodes else "train"
    folder = Path(recipe.output_dir).expanduser()
    file = Path(settings.file or folder / f"{kind}.sbatch").expanduser().resolve()
    run, setup = shlex.quote(str(folder.resolve())), ""
    if not any(w.lstrip("+").startswith("output_dir=") for w in words):
        run += "/job-$SLURM_JOB_ID"
    if settings.setup is not None:
        setup = read_text(Path(settings.setup).expanduser()).strip("\n")
    python = settings.python or ("python" if settings.setup else shlex.quote(sys.executable))
    log = str(file.parent / "%x-%j.out")
    place = Place(shlex.quote(str(Path.cwd())), run, log, python, setup)
    file.parent.mkdir(parents=True, exist_ok=True)  # the job's log is written there too
    file.write_text(script(settings, words, place, command), encoding="utf-8")
    print(f"written: {file}")
    print(f"submit it with: sbatch {shlex.quote(str(file))}")
    print(f"the run: {place.run_dir}; the job's log: {place.log}")
    return file


def submit(file: Path) -> None:
    """Runs sbatch and prints the number of the job.

    Raises:
        UserError: there is no sbatch. TrainingError: sbatch refuses the script.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("--submit: there is no sbatch here; submit from a login node.") from error
    if done.returncode:
        raise TrainingError(f"--submit: sbatch refused: {done.stderr.strip()}")
    print(f"submitted: job {done.stdout.strip().partition(';')[0]}")
