"""`python -m grpo_cli` is the `grpo` command."""

from grpo_cli.cli import main

main()
