"""vLLM as the sampler: in the trainer's processes, or as servers of `grpo serve`.

Start with `colocate.py` or `server.py`, the two engines. `client.py` calls one server,
`requests.py` builds requests, `weight_transfer.py` sends weights, `adapter_folder.py` an adapter
only, `weight_check.py` compares engine and trainer after it, `launch.py` starts a server, and
`worker.py` is what vLLM loads into its workers. vLLM itself is only imported where it is used. May
import what `generation` may, and of `generation` nothing that decodes with the policy's module.
"""
