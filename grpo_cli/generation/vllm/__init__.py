"""Sampling with vLLM: in the trainer's processes, or on servers started by `grpo serve`.

Start with `colocate.py` or `server.py`, the two engines. `client.py` calls one server,
`requests.py` builds requests, `weight_transfer.py` sends all weights, `adapter_folder.py` only an
adapter, and `weight_check.py` compares engine and trainer afterwards. `launch.py` starts a server;
vLLM loads `worker.py` into its workers. vLLM itself is only imported where it is used. This package
may import what `generation` may, except `generation.embedded`.
"""
