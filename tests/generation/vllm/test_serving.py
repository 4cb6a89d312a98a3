"""Servers of `grpo serve`, with real vLLM: fresh weights, several servers, and their deaths.

The tests run in the order of this file: the last ones kill the servers of the first ones.
"""

from __future__ import annotations

import base64
import copy
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import Request
from grpo_cli.generation.vllm import server_key, weight_transfer
from grpo_cli.generation.vllm.server import ServerGenerator
from grpo_cli.generation.vllm.weight_transfer import Link
from grpo_cli.records import Completion
from tests.conftest import as_prompts
from tests.vllm_engines import (
    PROMPTS,
    SAMPLING,
    SEEDS,
    Serving,
    assert_never_stale,
    difference,
    difference_of,
    grpo_train,
    make_model,
    move,
    played,
    recipe_for,
    run_metrics,
    save_model,
    serve,
    setup_for,
    wait_until_up,
    with_adapter,
)

pytestmark = pytest.mark.vllm
factory = pytest.importorskip("vllm.distributed.weight_transfer.factory")
worker = pytest.importorskip("grpo_cli.generation.vllm.worker")


class Servers:
    """tied and tied_too serve the same small model, untied another, sums the tiny recipe's.

    tied_too can also apply an adapter itself.
    """

    tied: Serving
    tied_too: Serving
    untied: Serving
    sums: Serving
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Servers]:
    base = tmp_path_factory.mktemp("servers")
    found = Servers()
    found.folders = {
        "tied": save_model(base / "tied", tokenizer, tied=True),
        "untied": save_model(base / "untied", tokenizer, tied=False),
    }
    started: list[Serving] = []
    try:
        for name in ("tied", "tied_too", "untied", "sums"):
            words = ["max_lora_rank=3"] if name == "tied_too" else []
            folder = found.folders.get(name.removesuffix("_too"))
            if folder is None:
                words = ["recipe=arithmetic_tiny"]
            started.append(serve(folder, base / f"{name}.out", *words))
            setattr(found, name, started[-1])
        wait_until_up(started)
        yield found
    finally:
        for serving in started:
            serving.end()


def generator_of(
    folder: Path, model: PreTrainedModel, servings: list[Serving], said: list[str], **of_vllm: Any
) -> ServerGenerator:
    urls = [s.url for s in servings]
    recipe: Recipe = recipe_for(folder, "vllm_server", servers=urls, **of_vllm)
    recipe.generation.vllm.engine_args = {}
    return ServerGenerator.make(setup_for(recipe, model, say=said.append))


@pytest.mark.parametrize(
    ("name", "transfer"), [("tied", "gloo"), ("untied", "gloo"), ("tied", "disk")]
)
def test_never_stale(
    servers: Servers,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    transfer: str,
) -> None:
    policy = make_model(tokenizer, tied=name == "tied")
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 2**20)
    monkeypatch.chdir(tmp_path)  # the recipe's output_dir, in which transfer=disk writes
    generator = generator_of(
        servers.folders[name], policy, [getattr(servers, name)], [], transfer=transfer
    )
    generator.update_weights(policy, 0)
    assert_never_stale(generator, policy)
    rollouts = played(generator, tokenizer)  # each goes on as soon as its environment has answered
    assert max(len(r.completion.model_turns) for r in rollouts) == 3
    assert difference_of(policy, rollouts) < 1e-3
    generator.close()


@pytest.mark.parametrize("sync", ["adapter", "merge"])
def test_an_adapter_is_never_stale(
    servers: Servers, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, sync: str
) -> None:
    policy = make_model(tokenizer, tied=True)
    recipe = recipe_for(servers.folders["tied"], "vllm_server", servers=[servers.tied_too.url])
    recipe.output_dir, recipe.generation.vllm.engine_args = str(tmp_path), {}
    with_adapter(recipe, policy, sync)
    move(policy, 0)  # the first update has a trained adapter, as with adapter.path
    generator = ServerGenerator.make(setup_for(recipe, policy, 104))
    for step in range(4):
        metrics = generator.update_weights(policy, step)
        groups = generator.generate(as_prompts(PROMPTS), 4, SAMPLING, SEEDS)
        assert difference(policy, groups) < 1e-4
        assert metrics["weights/check_difference"] < 1e-4
        assert all(c.sampled_at == step for group in groups for c in group)
        before = copy.deepcopy(policy)
        move(policy, step + 1)
        assert difference(policy, groups) > 0.02
    if sync == "adapter":  # an update that does nothing is found
        (link,) = generator.links.values()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link.folder, "write", lambda tensors: None)
            pattern = r"does not compute with the weights of step 4: .* sent them twice"
            with pytest.raises(TrainingError, match=pattern):
                generator.update_weights(policy, 4)
    generator.close()
    if sync == "merge":
        recipe.adapter.sync = "adapter"
        pattern = r"has the weights of an earlier run, .* start it again, or use adapter.sync=merge"
        with pytest.raises(UserError, match=pattern):
            ServerGenerator.make(setup_for(recipe, policy, 104))
    assert difference(before, groups) < 1e-4
    assert not list(tmp_path.rglob("*.safetensors"))


def pickle_that_touches(file: Path) -> str:
    class Crafted:
        def __reduce__(self) -> Any:
            return Path.touch, (file,)

    return base64.b64encode(pickle.dumps([Crafted()])).decode()


def test_every_route_needs_the_key(servers: Servers, tmp_path: Path) -> None:
    url, key = servers.tied.url, server_key.headers(server_key.read_key())
    paths = httpx2.get(f"{url}/openapi.json", headers=key, timeout=60).json()["paths"]
    asked = [(method, path) for path, methods in paths.items() for method in methods]
    asked += [("get", path) for path in ("/openapi.json", "/docs", "/metrics", "/no/such/route")]
    assert {
        ("get", "/health"), ("post", "/collective_rpc"), ("post", "/update_weights"),
        ("post", "/init_weight_transfer_engine"), ("post", "/pause"), ("post", "/v1/completions"),
        ("post", "/inference/v1/generate"),
    } <= {*asked}  # fmt: skip
    for method, path in asked:
        for headers in ({}, {"Authorization": "Bearer of another key"}):
            answer = httpx2.request(method.upper(), url + path, headers=headers, json={})
            assert answer.status_code == 401, (method, path)
    print(f"{len(asked)} routes answer 401")
    assert httpx2.options(f"{url}/pause", headers={"Origin": "http://a"}).status_code == 401


def test_a_crafted_pickle_is_refused(servers: Servers, tmp_path: Path) -> None:
    url, key = servers.tied.url, server_key.headers(server_key.read_key())
    crafted = pickle_that_touches(tmp_path / "pwned")
    update = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}
    body = {"update_info": update | {"ipc_handles_pickled": crafted}}
    for headers, status in (({}, 401), (key, 500)):
        answer = httpx2.post(f"{url}/update_weights", headers=headers, json=body)
        assert answer.status_code == status
    # Nor does the worker of transfer=ipc, which needs a GPU, know such a field.
    with pytest.raises(TypeError, match="ipc_handles_pickled"):
        worker.IpcUpdate(**update, handles=[{}], ipc_handles_pickled=crafted)
    assert factory.WeightTransferEngineFactory._registry["ipc"]() is worker.IpcEngine
    assert not (tmp_path / "pwned").exists()
    assert pickle.loads(base64.b64decode(crafted)) == [None]  # the pickle does what it should
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("in_flight", [False, True])
def test_prefetched_are_one_step_old(servers: Servers, tmp_path: Path, in_flight: bool) -> None:
    words = ["generation=vllm_server", f"generation.vllm.servers=[{servers.sums.url}]"]
    words += [
        "generation.vllm.prefetch_steps=1",
        f"generation.vllm.in_flight={in_flight}",
        "steps=5",
    ]
    grpo_train(*words, f"output_dir={tmp_path}", "prompts_per_step=32")
    steps = run_metrics(tmp_path)
    ages = [s["staleness/max"] for s in steps]  # what reaches the server late is newer
    assert (ages[0], max(ages)) == (0, 1)
    assert [s["epoch"] for s in steps] == pytest.approx([32 * n / 1400 for n in range(1, 6)])
    assert all(s["weights/check_difference"] < 1e-4 for s in steps)
    assert steps[0]["staleness/logp_difference"] < 1e-4
    assert max(s["staleness/logp_difference"] for s in steps) > 1e-4


def test_server_that_dies_leaves_its_prompts_to_the_other(
    servers: Servers, tokenizer: PreTrainedTokenizerFast
) -> None:
    policy, said = make_model(tokenizer, tied=True), list[str]()
    both = [servers.tied, servers.tied_too]
    generator = generator_of(servers.folders["tied"], policy, both, said)
    generator.update_weights(policy, 0)
    prompts, seeds = PROMPTS * 8, list(range(96))
    whole = generator.generate(as_prompts(prompts), 4, SAMPLING, seeds)
    servers.tied_too.halt()  # so that it has answered nothing when it dies
    groups: dict[int, list[Completion]] = {}
    with generator.session() as session:
        session.submit(Request(as_prompts(prompts), 4, SAMPLING, seeds))
        for done in session.drain():
            if not groups:
                servers.tied_too.kill()
            groups[done.number] = done.completions
    assert [[c.ids for c in groups[n]] for n in range(96)] == [[c.ids for c in g] for g in whole]
    (note,) = [s for s in said if servers.tied_too.url in s]
    assert re.search(r"failed: (the connection broke|nothing listens|answered 500)", note)
    move(policy, 1)
    assert generator.update_weights(policy, 1)["weights/servers"] == 1
    assert difference(policy, generator.generate(as_prompts(PROMPTS), 4, SAMPLING, SEEDS)) < 1e-3
    generator.close()


def test_server_killed_during_an_update(
    servers: Servers, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_model(tokenizer, tied=False)
    monkeypatch.setattr(Link, "timeout", 60.0)
    generator = generator_of(servers.folders["untied"], policy, [servers.untied], [])
    generator.update_weights(policy, 0)
    (link,) = generator.links.values()
    monkeypatch.setattr(link, "flush", lambda flush=link.flush: (servers.untied.kill(), flush()))
    begin = time.monotonic()
    with pytest.raises(TrainingError, match=rf"no server is left\. server {servers.untied.url}: "):
        generator.update_weights(policy, 1)
    print(f"killed while it was updated: {time.monotonic() - begin:.1f} s")
