"""Sends weights from the trainer to servers: one link for each server, of one of five kinds.

    gloo   our own transfer (`gloo_wire.py`, `worker.GlooEngine`); for CPUs
    nccl   vLLM's own transfer over PyNccl; for GPUs, also across nodes
    ipc    vLLM's own, by handles of CUDA memory (`ipc_wire.py`); for a server on the trainer's GPU
    disk   a shared folder
    files  adapter.sync=adapter: only the adapter, in a shared folder

No kind sends a pickle, and no server reads one from a store.

Weights are sent a bucket at a time, so that no second copy of them exists, and all servers receive
a bucket concurrently. After an error in a transfer the server must be restarted, since its weights
are partly updated.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import first_line
from grpo_cli.generation.vllm import gloo_wire, ipc_wire, lora
from grpo_cli.generation.vllm.adapter_folder import AdapterFolder
from grpo_cli.generation.vllm.client import REQUEST_SECONDS, UPDATE_SECONDS, Server, ServerLost
from grpo_cli.generation.vllm.weights import (
    BUCKET_BYTES,
    WeightInfo,
    Weights,
    buckets,
    flattened,
    unflattened,
)

POLL = 1e-3  # seconds between checks of a transfer
RENDEZVOUS_SECONDS = 60.0  # timeout for trainer and workers to join a group
BEAT = 1.0  # seconds between two heartbeats while servers answer


class Link:
    """Sends weights to one server, a bucket at a time."""

    replaces = "weights"  # "weights": an update replaces all of them; or "adapter"
    timeout = UPDATE_SECONDS

    def __init__(self, server: Server, folder: Path) -> None:
        """folder: for files that this server reads."""
        self.server = server

    def begin(self, infos: Sequence[WeightInfo]) -> None:
        """Prepares the server for these weights."""
        self.server.call("/start_weight_update", {}, self.timeout)

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        """Sends the next bucket; may return before it has arrived."""
        raise NotImplementedError

    def flush(self) -> None:
        """Waits until the last bucket has arrived."""

    def end(self, version: str) -> None:
        """Waits until the server uses the new weights, and labels them `version`."""
        self.server.call("/finish_weight_update", {"weight_version": version}, self.timeout)

    def release(self) -> None:
        """Frees the server's resources for the run, at the run's end."""
        self.server.call("/shutdown_weight_transfer_engine", {})

    def close(self) -> None:
        """Frees this process's resources and files for the server."""


class BroadcastLink(Link):
    """Broadcasts in a process group with the server's workers.

    The server answers a call once all weights have arrived, so calls run in a thread meanwhile.
    """

    answer: Future[Any]  # result of the pending call

    def tell(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """Starts a call in a daemon thread, which does not delay the exit of the process."""
        self.answer = answer = Future[Any]()

        def call() -> None:
            try:
                answer.set_result(self.server.call(path, body, timeout))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=call, daemon=True).start()

    def raise_failure(self) -> None:
        """Raises the error of the pending call if it has already failed."""
        if self.answer.done():
            self.answer.result()

    def begin(self, infos: Sequence[WeightInfo]) -> None:
        """Announces the weights; the time limit grows with the number of buckets."""
        super().begin(infos)
        update = {"update_info": described(infos)}
        number = sum(1 for _ in buckets(infos, BUCKET_BYTES))
        self.tell("/update_weights", update, self.timeout * (number + 1))

    def end(self, version: str) -> None:
        self.answer.result()
        super().end(version)


# Kept until the process exits, as in `distributed._groups` and for the same reason.
_groups: list[Any] = []


class GlooLink(BroadcastLink):
    """Broadcasts from this process to the server's workers, with a deadline for each bucket."""

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server, folder)
        url = urlsplit(server.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        own = gloo_wire.local_address(url.hostname or "127.0.0.1", port)
        size, rendezvous = server.world_size + 1, RENDEZVOUS_SECONDS
        try:
            store, port = gloo_wire.listen(own, size, rendezvous)
        except (OSError, RuntimeError) as error:
            raise server.lost("weight transfer", f"cannot listen at {own} ({error})") from error
        init = {
            "address": own, "port": port, "size": size, "timeout": self.timeout,
            "bucket_bytes": BUCKET_BYTES,
        }  # fmt: skip
        self.tell("/init_weight_transfer_engine", {"init_info": init}, rendezvous)
        try:
            self.group = gloo_wire.group(store, own, 0, size, rendezvous)
        except RuntimeError as error:
            self.raise_failure()
            raise server.lost("weight transfer", f"its workers did not come ({error})") from error
        self.answer.result()
        _groups.append(self.group)
        self.work: Any = None

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        self.raise_failure()
        self.work = gloo_wire.broadcast(self.group, flat.cpu(), self.timeout)

    def flush(self) -> None:
        work, self.work = self.work, None  # drops the reference to the bucket
        deadline = time.monotonic() + self.timeout
        try:
            # Polls, since a failed server answers before the broadcast times out.
            while not work.is_completed() and time.monotonic() < deadline:
                self.raise_failure()
                time.sleep(POLL)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            self.raise_failure()
            said = f"the connection broke ({first_line(error)})"
            raise self.server.lost("weight transfer", said) from error


class NcclLink(BroadcastLink):
    """Uses vLLM's NCCL transfer, unpacked: one broadcast per weight, on this process's GPU.

    A broadcast that waits for a dead peer cannot be aborted. Past its deadline the process is ended
    with a message (`deadline`).
    """

    def __init__(self, server: Server, folder: Path) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer import nccl_common

        super().__init__(server, folder)
        size, rendezvous = server.world_size + 1, RENDEZVOUS_SECONDS
        # NCCL's id is sent in the request, which carries the key. With an address instead, the
        # workers would unpickle data from the store at that address.
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
        init = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1,
            "world_size": size, "packed": False,
        }  # fmt: skip
        self.tell("/init_weight_transfer_engine", {"init_info": init}, rendezvous)
        with deadline(rendezvous, server, "weight transfer"):
            self.group = nccl_common.uid_init_process_group(
                unique_id, 0, size, torch.cuda.current_device()
            )
            self.answer.result()

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        self.raise_failure()
        with deadline(self.timeout, self.server, "weight transfer"):
            for _, weight in unflattened(flat, bucket):
                self.group.broadcast(weight.contiguous(), 0, stream=torch.cuda.current_stream())

    def flush(self) -> None:
        with deadline(self.timeout, self.server, "weight transfer"):
            torch.cuda.current_stream().synchronize()


class IpcLink(Link):
    """Uses vLLM's CUDA IPC transfer: the server opens this process's memory."""

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server, folder)
        if server.world_size > 1:
            why = f"ipc reaches the trainer's own GPU alone, and it has {server.world_size}"
            raise server.lost("weight transfer", why)
        self.uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        server.call("/init_weight_transfer_engine", {"init_info": {"packed": False}}, self.timeout)

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        weights = unflattened(flat, bucket)
        handles = [{self.uuid: ipc_wire.handle_of(w)} for _, w in weights]
        torch.cuda.synchronize()
        update = {"update_info": {**described(bucket), "handles": handles}}
        self.server.call("/update_weights", update, self.timeout)

    def close(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class DiskLink(Link):
    """Writes all weights as safetensors files into a folder of the run; the server reads them."""

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server, folder)
        folder.mkdir(parents=True, exist_ok=True)
        check_shared(server, folder, "transfer=disk writes the weights")
        self.folder = folder

    def begin(self, infos: Sequence[WeightInfo]) -> None:
        self.parts = 0
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        weights = {name: w.contiguous().cpu() for name, w in unflattened(flat, bucket)}
        save_file(weights, self.folder / f"model-{self.parts:05d}.safetensors")
        self.parts += 1

    def end(self, version: str) -> None:
        self.server.rpc("grpo_load", str(self.folder), timeout=self.timeout)
        self.server.call("/update_weight_version", {"new_version": version})

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class AdapterLink(Link):
    """Writes the adapter into a folder of the run, from which the server reads it.

    The first update registers the adapter under the name that requests use; later ones replace its
    weights.
    """

    replaces = "adapter"

    def __init__(self, server: Server, folder: Path, name: str, policy: nn.Module) -> None:
        """name: unique name of the run."""
        super().__init__(server, folder)
        self.name, self.folder, self.is_loaded = name, AdapterFolder(folder, policy), False
        what = "adapter.sync=adapter writes the adapter"
        check_shared(server, folder, what, f", or {lora.OTHER_WAY}")

    def begin(self, infos: Sequence[WeightInfo]) -> None:
        self.tensors: list[tuple[str, Tensor]] = []

    def put(self, flat: Tensor, bucket: list[WeightInfo]) -> None:
        self.tensors += unflattened(flat, bucket)

    def end(self, version: str) -> None:
        self.folder.write(self.tensors)
        self.tensors = []
        path = str(self.folder.path)
        if self.is_loaded:
            self.server.rpc("grpo_load_adapter", path, timeout=self.timeout)
        else:
            with contextlib.suppress(ServerLost):  # an adapter of an earlier, lost link, if any
                self.release()
            body = {"lora_name": self.name, "lora_path": path}
            try:
                self.server.call("/v1/load_lora_adapter", body, self.timeout, is_json=False)
            except ServerLost as error:
                hint = f"If vLLM cannot apply this adapter, {lora.OTHER_WAY}."
                raise ServerLost(f"{error}\n{hint}") from error
            self.is_loaded = True
        self.server.call("/update_weight_version", {"new_version": version})

    def release(self) -> None:
        self.server.call("/v1/unload_lora_adapter", {"lora_name": self.name}, is_json=False)

    def close(self) -> None:
        self.folder.remove()


KINDS: dict[str, type[Link]] = {
    "gloo": GlooLink,
    "nccl": NcclLink,
    "ipc": IpcLink,
    "disk": DiskLink,
}


def connect(
    server: Server, kind: str, name: str, folder: Path, adapted: nn.Module | None = None
) -> Link:
    """Returns a link to a server, of the kind that the recipe and the server agree on.

    Args:
        kind: generation.vllm.transfer.
        name: unique name of the run.
        folder: for files that this server reads.
        adapted: the policy, if only its adapter is sent; None: all weights are sent.

    Raises:
        ServerLost: the link cannot be made.
    """
    if adapted is not None:
        try:
            return AdapterLink(server, folder, name, adapted)
        except OSError as error:
            raise server.lost("weight transfer", f"{type(error).__name__}: {error}") from error
    if kind == "auto":
        kind = server.transfer
    if kind in ("nccl", "ipc") and not torch.cuda.is_available():
        why = f"it was started with transfer={kind}, and the trainer has no GPU"
        raise server.lost("weight transfer", why)
    if kind != "disk" and kind != server.transfer:
        raise server.lost(
            "weight transfer",
            f"it was started with transfer={server.transfer}, and the run has {kind}",
        )
    try:
        return KINDS[kind](server, folder)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise server.lost("weight transfer", f"{type(error).__name__}: {error}") from error


def check_shared(server: Server, folder: Path, what: str, otherwise: str = "") -> None:
    """Raises a ServerLost if the server cannot read a folder of the run."""
    if not all(server.rpc("grpo_can_read", str(folder))):
        why = (
            f"it cannot read {folder}, where {what}; give an output_dir on a file system that the "
            f"server's node shares{otherwise}"
        )
        raise server.lost("weight transfer", why)


def send(
    links: Sequence[Link], weights: Weights, version: str, pause: str
) -> dict[str, ServerLost]:
    """Sends the weights to all servers concurrently; servers that fail are dropped.

    Args:
        version: label of the weights, which completions then report.
        pause: "wait" until running completions are done, or "keep" them paused in the middle.

    Returns:
        The errors of the servers that failed and must be restarted, by address.
    """
    lost: dict[str, ServerLost] = {}
    alive = list(links)

    def each(step: str, do: Any) -> None:
        """Calls `do` for every remaining server concurrently."""
        with ThreadPoolExecutor(max(len(alive), 1)) as pool:
            futures = {pool.submit(do, link): link.server for link in alive}
            while wait(futures, BEAT).not_done:  # not a stall: each call has its own deadline
                heartbeat.touch()
        for future, server in futures.items():
            error = future.exception()
            if isinstance(error, ServerLost):
                lost[server.url] = error
            elif error is not None:  # such as a full disk: the server's update is incomplete
                lost[server.url] = server.lost(step, f"{type(error).__name__}: {error}")
        alive[:] = [link for link in alive if link.server.url not in lost]

    infos = weights.infos()
    # Running completions may take as long as any request.
    patience = REQUEST_SECONDS if pause == "wait" else Link.timeout

    def begin(link: Link) -> None:
        link.server.call(f"/pause?mode={pause}", {}, patience)
        link.server.rpc("grpo_begin_update", link.replaces, timeout=link.timeout)
        link.begin(infos)

    def end(link: Link) -> None:
        link.end(version)
        link.server.rpc("grpo_end_update")
        answer = link.server.call("/reset_prefix_cache", {}) if pause == "wait" else None
        if answer is not None and not answer.get("success", True):
            raise link.server.lost("/reset_prefix_cache", "it was not reset")
        link.server.call("/resume", {})

    each("the beginning of a weight update", begin)
    passing = iter(weights)
    for bucket in buckets(infos, BUCKET_BYTES):
        flat = flattened(passing, bucket)
        each("weight transfer", lambda link: link.put(flat, bucket))  # noqa: B023 - done before the next
        each("weight transfer", lambda link: link.flush())
    each("the end of a weight update", end)
    return lost


def described(infos: Sequence[WeightInfo]) -> dict[str, Any]:
    """Returns the description of weights in vLLM's requests."""
    return {
        "names": [i.name for i in infos],
        "dtype_names": [str(i.dtype).removeprefix("torch.") for i in infos],
        "shapes": [list(i.shape) for i in infos],
    }


@contextlib.contextmanager
def deadline(seconds: float, server: Server, what: str) -> Iterator[None]:
    """Ends the process with a message if the block, which cannot be aborted, takes longer."""

    def end() -> None:
        print(f"grpo: {server.lost(what, f'not done within {seconds:g} s')}", flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
