"""Holds the help of the commands whose knobs fill more than a screen: what to know first.

`grpo help COMMAND` prints what their own `--help` prints: every word and, below it, the recipe.
"""

SCREENS = {
    "train": """\
grpo train [FILE | recipe=NAME] [key=value ...]

Trains a model with GRPO and writes the run to outputs/NAME. Without a recipe it
starts from `chat`, for which a model, rows and a reward have to be given.

  model.path=NAME                       Hub name, folder, or a run
  dataset.train=ROWS                    Hub name, .jsonl, .csv or .parquet file
  dataset.eval=ROWS                     Held-out rows, or dataset.test_split_size=0.1
  reward.NAME.function=MODULE:FUNCTION  Your reward; reward=[math] is one that ships
  steps=100                             Optimizer steps, or epochs=N
  prompts_per_step=16                   Prompts of a step, over all processes
  generation.num_generations=8          Completions of each prompt
  generation.max_completion_tokens=256  Length limit of a completion
  optimizer.learning_rate=1e-05         Peak learning rate
  loss=dapo                             grpo, dr_grpo, gspo, cispo and others
  adapter=none                          lora, qlora, dora or rslora

Examples:
  grpo train recipe=arithmetic_tiny
  grpo train my.yaml loss=gspo --steps 50
  grpo train resume=outputs/my

`grpo explain KEY` describes a knob, `grpo help train` lists all of them.
""",
    "eval": """\
grpo eval CHECKPOINT [key=value ...]
grpo eval completions=FILE benchmark=NAME
grpo eval compare A/eval.json B/eval.json

Evaluates a run's newest checkpoint, a model folder or a hub name: on the
held-out rows of its recipe, or on benchmarks. Numbers have 95 % intervals.

  benchmark=NAME,...       Shipped ones, or files with question and answer
  dataset.eval=ROWS        Other held-out rows
  mode=cot                 Solve in words (cot) or with programs (tir)
  num_samples=1            Completions of each problem
  metric=mean              Also pass, maj
  temperature=null         null: 0 for one completion, 0.7 for several
  limit=null               The first N problems only
  output_dir=DIR           Where eval.json and completions are written
  trust=false              Run the code that somebody else's recipe names

Examples:
  grpo eval outputs/my
  grpo eval Qwen/Qwen2.5-1.5B-Instruct benchmark=math500 num_samples=16

`grpo explain KEY` describes a knob, `grpo help eval` lists all of them.
""",
    "probe": """\
grpo probe [FILE | recipe=NAME] [key=value ...]

Samples the untrained model on some prompts and says whether the run can learn:
how many prompts have both right and wrong completions, how long completions
are, what the rewards do, and what to change.

  prompts=32               Prompts, chosen at random
  samples=null             Completions of each prompt; null: 16 or more

Examples:
  grpo probe my.yaml
  grpo probe recipe=gsm8k_tiny prompts=16 samples=8

The other words are those of `grpo train`; `grpo help probe` lists them.
""",
    "score": """\
grpo score reward=NAME input=FILE
grpo score recipe=NAME row=N completion=TEXT

Prints what reward functions say of stored completions, or of one completion,
without a model.

  reward=NAME,...          Shipped rewards (`grpo rewards`)
  reward.NAME.function=MODULE:FUNCTION   A reward of your own
  input=FILE               Completions, or the folder of a run or an evaluation
  columns.NEW=OLD          Rename a column of the input
  label=COLUMN             Compare with true and false in the input
  threshold=0.5            Least reward that counts as right, with label
  output=FILE              Where the scores are written
  row=N                    A row of the recipe's data instead of an input
  completion=TEXT          Completion to score with row; - reads standard input

Examples:
  grpo score reward=math input=answers.jsonl
  grpo score recipe=gsm8k_tiny row=12 completion="so it is \\boxed{4}"

`grpo help score` lists all words.
""",
    "slurm": """\
grpo slurm [FILE | recipe=NAME] gpus_per_node=N time=HH:MM:SS [key=value ...]

Checks the recipe as `grpo train` does and writes a batch script that trains it.
The job saves and requeues itself before its time limit.

  nodes=1                  Nodes that train
  gpus_per_node=N          GPUs of each node; 0: train on CPUs
  time=HH:MM:SS            Time limit of the job
  partition=NAME           Partition, as of sbatch
  account=NAME             Account, as of sbatch
  setup=FILE               Shell file that the job reads first
  vllm_nodes=0             Further nodes that serve vLLM
  sbatch.OPTION=VALUE      Any other option of sbatch
  --submit                 Run sbatch

Example:
  grpo slurm recipe=math_qwen nodes=2 gpus_per_node=8 time=12:00:00 --submit

`grpo help slurm` lists all words.
""",
    "serve": """\
grpo serve [model=NAME | recipe=NAME] [word=value ...]

Starts vLLM's server, which `grpo train ... generation=vllm_server` samples
from. Once it is ready, the command line that trains with it is printed.

  model=NAME               Hub name or folder
  host=127.0.0.1           Address to listen on
  port=8000                Port to listen on
  tensor_parallel=1        GPUs of one copy of the model
  data_parallel=1          Copies of the model
  memory=0.9               Share of each GPU's memory
  max_model_len=null       Longest prompt and completion together
  dtype=null               Data type; null: the recipe's, or the model's own
  max_lora_rank=null       Serve an adapter of at most this rank

Example:
  grpo serve recipe=math_qwen tensor_parallel=2

`grpo help serve` lists all words.
""",
}
