"""The verbs of the `grpo` command, one module each; start with serve.py or export.py.

A module checks its words (config/words.py) and its recipe before it imports torch, if possible.
Commands may import every package below; nothing except cli.py imports a command.
"""
