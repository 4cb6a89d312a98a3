"""Cases of a model divided over processes, for tests/distributed/test_fsdp.py.

Each case is called on every process. As a program, all of them for one number of processes:

    torchrun --nproc-per-node 2 tests/sharded.py FOLDER

It writes the name of each case that went well to FOLDER/done, and ends with the first that did not.
"""

import contextlib
import copy
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_cli.distributed import fsdp
from grpo_cli.distributed.settings import Distributed
from grpo_cli.distributed.workers import Workers, exit_process
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.embedded.generator import GatheringGenerator, TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm.weights import AdapterWeights, Weights
from grpo_cli.models import adapters, attention, loading, micro_batches, optimizers, tiny
from grpo_cli.models.activation_bytes import bytes_per_token
from grpo_cli.models.packing import length
from grpo_cli.models.policy_logprobs import ForwardMode, PolicyLogprobs, inference
from grpo_cli.models.settings import Adapter, Model, Optimizer
from grpo_cli.records import Completion, Prompt, Rollout
from grpo_cli.training import logprob_passes
from grpo_cli.training.run import Run
from tests import programs
from tests.conftest import BUILD, CPU, as_prompts
from tests.fake_vllm import FakeVllm, recipe_for, serving
from tests.generation.embedded.test_generator import MANY_EOS, PROMPTS, SEEDS, same
from tests.models.families import BY_NAME, Family
from tests.models.test_architectures import make
from tests.partial_run import partial_run

TOKENIZER = tiny.make_tokenizer(BUILD, [])
CHUNKED = ForwardMode(packed=False, chunked=True)
Case = Callable[[Workers], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# What cases are made of.


def make_model(seed: int = 0, *, tied: bool = True, layers: int = 2) -> PreTrainedModel:
    """The same on every process that gives the same seed."""
    build = copy.copy(BUILD)
    build.num_layers = layers
    torch.manual_seed(seed)
    model = tiny.make_model(build, TOKENIZER)
    if not tied:
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = False
        untied = type(model)(config)
        untied.generation_config = model.generation_config
        return untied
    return model


def divided(
    model: PreTrainedModel, *, half: torch.dtype | None = None, reshard: bool = True
) -> PreTrainedModel:
    return fsdp.shard(copy.deepcopy(model), CPU, half_type=half, reshard_after_forward=reshard)


def make_rollouts(number: int = 8, longest: int = 9, vocabulary: int = 200) -> list[Rollout]:
    """Of a prompt two each, of any lengths."""
    random = torch.Generator().manual_seed(number)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=random).tolist()

    found = []
    for row in range(-(-number // 2)):
        prompt = Prompt(row, ids(1 + row % 4), "", {})
        for j in range(2):
            n = 2 + (3 * row + 2 * j) % (longest - 1)
            found.append(Rollout(prompt, Completion(ids(n), [0.0] * n, "stop"), ""))
    return found[:number]


def weighted(rollouts: Sequence[Rollout], logprobs: Tensor) -> Tensor:
    """A sum with a weight of its own for each token."""
    total = logprobs.sum() * 0
    for row, r in zip(logprobs, rollouts, strict=True):
        n = len(r.completion.ids)
        total = total + (row[:n] * (torch.tensor(r.completion.ids) % 7 - 2)).sum()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the whole model, by name; every process calls it."""
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    return {n: fsdp.full_tensor(p.grad).detach().clone() for n, p in named if p.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Gradients, each relative to its largest element."""
    assert found.keys() == expected.keys()
    assert len(found) > 3
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        apart = (found[name] - tensor).abs().max().item()
        assert scale > 0, f"{name}: nothing to compare"
        assert apart <= relative * scale, f"{name}: {apart / scale:.1e}"


def assert_only_shards(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), f"{name} is whole"
        rows = -(-p.shape[0] // dist.get_world_size())
        assert p.to_local().shape[0] <= rows, f"{name}: {p.to_local().shape} of {p.shape}"


def bare_run(
    workers: Workers, policy_logprobs: PolicyLogprobs, tokens: int | None, **settings: Any
) -> Run:
    """What computes rollouts, and no more of a run."""
    return partial_run(
        workers,
        policy_logprobs,
        micro_batches.MicroBatchBudget(tokens, print, runs_in_lockstep=workers.runs_in_lockstep),
        torch.optim.SGD(policy_logprobs.model.parameters()),
        **settings,
    )


# Sharding.


def loaded(workers: Workers, tied: bool) -> PreTrainedModel:
    """As a run loads it: whole on the main process, a structure on the others."""
    folder: list[Any] = [None]
    if workers.is_main:
        folder[0] = tempfile.mkdtemp(prefix="grpo-sharded-")
        make_model(5, tied=tied).save_pretrained(folder[0])
        TOKENIZER.save_pretrained(folder[0])
    dist.broadcast_object_list(folder, 0)
    model, _ = loading.load(Model(path=folder[0]), folder[0], weights=workers.is_main)
    workers.barrier()
    if workers.is_main:
        for file in Path(folder[0]).iterdir():
            file.unlink()
        Path(folder[0]).rmdir()
    return model


def has_the_main_processs_weights(workers: Workers, tied: bool) -> None:
    model = loaded(workers, tied)
    metas = {t.is_meta for t in (*model.parameters(), *model.buffers())}
    assert metas == {not workers.is_main}, "only the main process has weights"
    assert len(list(model.buffers())) > 0, "rotary tables, which no checkpoint holds"
    model.register_buffer("kept", torch.full((3,), float(workers.rank + 1)))
    model.register_buffer("none", None)
    model.base_model.layers[0].mlp.register_buffer(
        "table", torch.tensor([workers.rank]), persistent=False
    )
    model.base_model.layers[1].requires_grad_(False)
    model.base_model.norm.requires_grad_(False)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    fsdp.shard(model, CPU, reshard_after_forward=True)
    expected = make_model(5, tied=tied)
    assert_only_shards(model)
    assert fsdp.is_sharded(model)
    assert not fsdp.is_sharded(expected)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trained
    head = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert head == tied
    named = dict(model.named_parameters())
    assert list(named) == [n for n, _ in expected.named_parameters()]
    held = 0
    for name, p in expected.named_parameters():
        assert torch.equal(fsdp.full_tensor(named[name].detach()), p), name
        held += cast(DTensor, named[name]).to_local().numel()
    total = workers.sum({"held": float(held)})["held"]
    assert total == sum(p.numel() for p in expected.parameters()), "each weight once"
    assert model.kept.tolist() == [1, 1, 1]
    assert model.base_model.layers[0].mlp.table.tolist() == [0]
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert not any(b.is_meta for b in model.buffers())
    layers = fsdp.layers(model)
    assert [*map(id, layers)] == [*map(id, model.base_model.layers)]
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    # And it computes with them.
    rollouts = make_rollouts()
    with inference(model), inference(expected):
        found, _ = PolicyLogprobs(model, packed=False)(rollouts, 1.0)
        torch.testing.assert_close(found, PolicyLogprobs(expected, packed=False)(rollouts, 1.0)[0])


@case
def model_is_the_main_processs(workers: Workers) -> None:
    for tied in (True, False):
        has_the_main_processs_weights(workers, tied=tied)


@case
def only_shards_are_left_after_passes_without_backward(workers: Workers) -> None:
    rollouts = make_rollouts()
    for reshard in (True, False):
        for chunked in (True, False):
            model = divided(make_model(), reshard=reshard)
            policy_logprobs = PolicyLogprobs(model, chunked=chunked, agree_on=workers.first)
            with torch.no_grad():
                policy_logprobs(rollouts, 1.0)
            assert_only_shards(model)
            policy_logprobs.check(rollouts, 1.0)
            assert_only_shards(model)
            assert policy_logprobs.mode == ForwardMode(packed=True, chunked=chunked)
            assert all(p.grad is None for p in model.parameters()), "a check leaves no gradient"
            measured = bytes_per_token(policy_logprobs, rollouts, 1.0)
            whole_one = PolicyLogprobs(make_model(), chunked=chunked)
            whole_one.check(rollouts, 1.0)
            expected = bytes_per_token(whole_one, rollouts, 1.0)
            assert abs(measured / expected - 1) < 0.02, (measured, expected)
            assert_only_shards(model)
            # And a backward after all that is what it should be.
            own = rollouts[workers.rank :: workers.size]
            weighted(own, policy_logprobs(own, 1.0)[0]).backward()
            assert_near(gradients(model), summed(make_model(), rollouts), 1e-5)
            assert_only_shards(model)


def summed(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Gradients of one process that has all rollouts, computed plainly."""
    policy_logprobs = PolicyLogprobs(model, packed=False, chunked=False)
    weighted(rollouts, policy_logprobs(rollouts, 1.0)[0]).backward()
    return gradients(model)


@case
def gradient_norm_is_of_all_and_bounds_all(workers: Workers) -> None:
    rollouts = make_rollouts()
    plain = make_model()
    summed(plain, rollouts)
    model = divided(make_model())
    own = rollouts[workers.rank :: workers.size]
    weighted(own, PolicyLogprobs(model)(own, 1.0)[0]).backward()
    norm = fsdp.norm_of(plain.parameters(), 0.5)
    assert norm > 5, "something is cut"
    uncut = gradients(model)
    assert abs(fsdp.norm_of(model.parameters(), None) / norm - 1) < 1e-5
    assert all(torch.equal(g, uncut[name]) for name, g in gradients(model).items())
    assert abs(fsdp.norm_of(model.parameters(), 0.5) / norm - 1) < 1e-5
    assert_near(gradients(model), gradients(plain), 1e-4)
    after = sum(float(g.square().sum()) for g in gradients(model).values()) ** 0.5
    assert abs(after - 0.5) < 1e-3


@case
def half_is_near_and_what_is_kept_is_float32(workers: Workers) -> None:
    rollouts = make_rollouts()
    plain = make_model()
    with torch.no_grad():
        exact, _ = PolicyLogprobs(plain, packed=False, chunked=False)(rollouts, 1.0)
    expected = summed(plain, rollouts)
    model = divided(make_model(), half=torch.bfloat16)
    halves = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    policy_logprobs = PolicyLogprobs(model, autocast=halves, agree_on=workers.first, say=refuse)
    policy_logprobs.check(rollouts, 1.0)  # computes in float32 too
    seen: set[torch.dtype] = set()
    model.base_model.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda module, args: seen.add(module.weight.dtype)
    )
    own = rollouts[workers.rank :: workers.size]
    logprobs, _ = policy_logprobs(own, 1.0)
    assert logprobs.dtype == torch.float32
    there = exact[workers.rank :: workers.size][:, : logprobs.shape[1]]
    apart = (logprobs - there).abs().max().item()
    assert 0 < apart < 0.05, apart
    weighted(own, logprobs).backward()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    found = gradients(model)
    assert {g.dtype for g in found.values()} == {torch.float32}
    both = [torch.cat([g[n].flatten() for n in expected]) for g in (found, expected)]
    relative = ((both[0] - both[1]).norm() / both[1].norm()).item()
    assert 0 < relative < 0.05, relative
    assert_only_shards(model)


def refuse(text: str) -> None:
    raise AssertionError(text)


@case
def other_models_are_right_by_the_way_that_all_agree_on(workers: Workers) -> None:
    names = [
        "falcon",  # an attention that is not known: rows are padded
        "gemma2",  # what it asks of attention shows in the check
        "mistral, completions longer than its window",
        *("gpt2", "mixtral", "mamba", "falcon_h1"),
    ]
    rollouts = make_rollouts(8, 9, vocabulary=90)
    for family in map(BY_NAME.__getitem__, names):
        # Grouped products of experts have no float64, and Mamba's scans are in float32 anyway.
        narrow = family.model_type in ("mixtral", "mamba", "falcon_h1")
        dtype = torch.float32 if narrow else torch.float64
        expected = summed(make(family).to(dtype), rollouts)
        model = divided(make(family).to(dtype))
        assert len(fsdp.layers(model)) == 2, family
        said: list[str] = []
        policy_logprobs = PolicyLogprobs(model, agree_on=workers.first, say=said.append)
        # The first rollouts of the main process; the others have none.
        bare = bare_run(workers, policy_logprobs, 10**6)
        bare.policy.micro_batches.calibrate(rollouts if workers.is_main else [], 1.0)
        assert policy_logprobs.checked
        assert policy_logprobs.mode == family.mode, (family, said)
        assert len(said) == (family.mode == CHUNKED), said
        own = rollouts[workers.rank :: workers.size]
        weighted(own, policy_logprobs(own, 1.0)[0]).backward()
        assert_near(gradients(model), expected, 1e-4 if narrow else 1e-5)


@case
def an_objection_of_one_process_is_everyones(workers: Workers) -> None:
    rollouts = make_rollouts()
    model = divided(make_model())
    said: list[str] = []
    policy_logprobs = PolicyLogprobs(model, agree_on=workers.first, say=said.append)
    attend = attention.Layout.attend
    last = workers.rank == workers.size - 1

    def wrong(self: Any, *args: Any) -> Tensor:
        out: Tensor = attend(self, *args)
        return out * 1.5 if last else out

    attention.Layout.attend = wrong  # type: ignore[method-assign]
    try:
        policy_logprobs.check(rollouts, 1.0)
    finally:
        attention.Layout.attend = attend  # type: ignore[method-assign]
    assert policy_logprobs.mode == CHUNKED
    assert said == workers.gather(said)[0]
    assert " differ by " in said[0]


# What runs do in step.


@case
def all_give_up_what_one_processs_rollouts_are_too_long_for(workers: Workers) -> None:
    family = Family("mistral", settings={"sliding_window": 12})
    plain, model = make(family), divided(make(family))
    said: list[str] = []
    bare = bare_run(
        workers, PolicyLogprobs(model, agree_on=workers.first, say=said.append), tokens=10**6
    )
    short = make_rollouts(4, 5, vocabulary=90)
    logprob_passes.token_stats(bare.policy, bare.policy.logprobs, short, 1.0)
    assert bare.policy.logprobs.mode.packed
    long = make_rollouts(10, 20, vocabulary=90)
    assert max(map(length, short)) < 12 < max(map(length, long))
    own = long if workers.rank == workers.size - 1 else short[: 2 * workers.rank]
    found = logprob_passes.token_stats(bare.policy, bare.policy.logprobs, own, 1.0)
    assert len(found) == len(own)
    with torch.no_grad():
        for rollout, seen in zip(own, found, strict=True):
            true, _ = PolicyLogprobs(plain, packed=False)([rollout], 1.0)
            torch.testing.assert_close(seen.logprobs, true[0], rtol=1e-3, atol=1e-4)
    assert bare.policy.logprobs.mode == CHUNKED
    (note,) = said
    assert "its attention sees 12 tokens and no more" in note
    logprob_passes.token_stats(bare.policy, bare.policy.logprobs, own, 1.0)
    assert len(said) == 1, "it is given up once"


@case
def micro_batches_are_as_large_as_the_fullest_process_has_room_for(workers: Workers) -> None:
    model = divided(make_model())
    bare = bare_run(workers, PolicyLogprobs(model, agree_on=workers.first), tokens=None)
    fit = micro_batches.tokens_that_fit
    kept: list[float] = []

    def fitting(device: Any, bytes_per_token: float, **_: Any) -> int:
        kept.append(bytes_per_token)
        return 4096 >> workers.rank

    micro_batches.tokens_that_fit = fitting  # type: ignore[assignment]
    try:
        # The last process alone has rollouts, and the others measure on the same.
        last = workers.rank == workers.size - 1
        bare.policy.micro_batches.calibrate(make_rollouts() if last else [], 1.0)
    finally:
        micro_batches.tokens_that_fit = fit
    assert bare.policy.micro_batches.budget.tokens == 4096 >> (workers.size - 1)
    assert len(set(workers.gather(kept[0]))) == 1 == len(kept)
    assert_only_shards(model)


# Whole weights for an engine.


def with_adapter(plain: PreTrainedModel) -> PreTrainedModel:
    """The model with a LoRA adapter that changes it."""
    # Rank 1: fewer rows than processes. The last norm stays gathered after a forward.
    adapter = Adapter(method="lora", rank=1, args={"modules_to_save": ["norm"]})
    adapters.attach(plain, adapters.config_of(adapter, "base", None), 3)
    random = torch.Generator().manual_seed(4)
    for p in adapters.tensors_of(plain).values():
        p.data += torch.randn(p.shape, generator=random) * 0.05
    return plain


@case
def an_adapter_is_sharded_and_merged(workers: Workers) -> None:
    plain, rollouts = with_adapter(make_model(2)), make_rollouts(4 * workers.size)
    model, own = divided(plain), rollouts[workers.rank :: workers.size]
    assert_near(summed(model, own), summed(plain, rollouts), 1e-5)
    for kind in (Weights, AdapterWeights):
        assert kind(model).infos() == kind(plain).infos()
        for (name, tensor), (other, expected) in zip(kind(model), kind(plain), strict=True):
            assert name == other
            assert torch.equal(tensor, expected), name
    skeleton = loading.skeleton(model)
    fsdp.fill(skeleton, model, torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(skeleton(ids).logits, plain(ids).logits)
    with torch.no_grad():
        model(ids)
    before = adapters.copied(model)
    with adapters.replaced(model, {name: tensor / 2 for name, tensor in before.items()}):
        halves = adapters.copied(model)
        with torch.no_grad():
            model(ids)
    after = adapters.copied(model)
    assert all(torch.equal(halves[n].to_local() * 2, t.to_local()) for n, t in before.items())
    assert all(torch.equal(after[n].to_local(), t.to_local()) for n, t in before.items())


@case
def servers_get_the_whole_weights(workers: Workers) -> None:
    from grpo_cli.generation.factory import make_generator
    from grpo_cli.generation.vllm.server import ServerGenerator

    plain = make_model(2)
    model = divided(plain)
    fakes = []
    if workers.is_main:
        config = plain.config.get_text_config().to_dict()
        fakes = [FakeVllm(config), FakeVllm(config, workers=2)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(*fakes))
        urls = workers.gather([fake.url for fake in fakes])[0]
        recipe = recipe_for(cast(Any, [SimpleNamespace(url=url) for url in urls]))
        prompts = [Prompt(0, [5, 6], "", {})]
        generator = make_generator(recipe, model, TOKENIZER, workers, prompts, print)
        assert isinstance(generator, ServerGenerator)
        for step in range(2):
            assert generator.update_weights(model, step)["weights/servers"] == 2
            for fake in fakes:
                for held in fake.held:
                    assert held.keys() == dict(plain.named_parameters()).keys()
                    for name, p in plain.named_parameters():
                        assert torch.equal(held[name], p), name
            move(plain, model)
        generator.close()
        workers.barrier()


def move(*models: nn.Module) -> None:
    """By a factor that is exact in every precision."""
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.mul_(2.0)


@case
def compiled_layers_compute_the_same(workers: Workers) -> None:
    """By a backend that takes little time; aot_eager has also been tried."""
    rollouts = make_rollouts()
    own = rollouts[workers.rank :: workers.size]
    expected, model = divided(make_model()), divided(make_model())
    plain, compiled = (
        PolicyLogprobs(m, compile_backend=backend, agree_on=workers.first, say=refuse)
        for m, backend in ((expected, None), (model, "eager"))
    )
    for policy_logprobs in (plain, compiled):
        policy_logprobs.check(rollouts, 1.0)
    assert compiled.mode.compiled
    for _ in range(2):  # the second time the layers are gathered anew
        found = [p(own, 1.0)[0] for p in (plain, compiled)]
        assert (found[0] - found[1]).abs().max() < 1e-5
        for logprobs in found:
            weighted(own, logprobs).backward()
    assert_near(gradients(model), gradients(expected), 1e-5)
    with torch.no_grad():
        compiled(own, 1.0)
    assert_only_shards(model)


@case
def gradients_that_overflow_on_one_process_are_skipped_on_all(workers: Workers) -> None:
    """In float16, whether each has a share of the model or the complete one."""
    rollouts = make_rollouts()
    own = rollouts[workers.rank :: workers.size]
    is_last = workers.rank == workers.size - 1
    for is_divided in (True, False):
        half = copy.copy(workers)
        half.half_type, half.runs_in_lockstep = torch.float16, is_divided
        model = divided(make_model(), half=torch.float16) if is_divided else make_model()
        logprobs = PolicyLogprobs(model, autocast=half.autocast, say=refuse)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = half.grad_scaler()
        small = 1e-3
        for factor, is_taken in ((1e9 if is_last else small, False), (small, True)):
            before = [fsdp.full_tensor(p.detach()).clone() for p in model.parameters()]
            loss = factor * weighted(own, logprobs(own, 1.0)[0])
            assert loss.isfinite()
            half.backward(scaler.scale(loss))
            half.sum_gradients(model.parameters())
            scaler.unscale_(optimizer)
            norm = fsdp.norm_of(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = [fsdp.full_tensor(p.detach()) for p in model.parameters()]
            has_moved = not all(map(torch.equal, before, after))
            found = (has_moved, math.isfinite(norm), scaler.get_scale())
            assert found == (is_taken, is_taken, 2.0**15)


@case
def the_host_holds_shards_and_computes_the_same(workers: Workers) -> None:
    """With distributed.offload=all, which on a CPU takes the same paths."""
    rollouts = make_rollouts()
    own, found = rollouts[workers.rank :: workers.size], []
    for on_host in (False, True):
        model = fsdp.shard(make_model(), CPU, reshard_after_forward=True, on_host=on_host)
        assert_only_shards(model)
        config = Optimizer(learning_rate=1e-2, weight_decay=0.1)
        optimizer = optimizers.make(config, model, offload="all" if on_host else "none")
        logprobs = PolicyLogprobs(model, say=refuse)
        for _ in range(3):
            weighted(own, logprobs(own, 1.0)[0]).backward()
            fsdp.norm_of(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert_only_shards(model)
        assert fsdp.device_of(model) == CPU
        found.append([fsdp.full_tensor(p.detach()).clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 1e-5  # AdamW is fused on the host


# Generation.


@case
def what_is_sampled_is_the_whole_models(workers: Workers) -> None:
    """By each process of its own prompts, of which it may have none."""
    sampling = Sampling(max_tokens=10)
    numbers = [[0, 1, 4], [2], []][workers.rank]
    prompts, seeds = [PROMPTS[n] for n in numbers], [SEEDS[n] for n in numbers]
    for tied, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        plain = make_model(4, tied=tied)
        model = divided(plain)
        ours = GatheringGenerator(model, dtype, MANY_EOS, 100, say=refuse)
        alone = copy.deepcopy(plain)
        for p in alone.parameters():  # and not the rotary tables, which stay as they are
            p.data = p.data.to(dtype)
        theirs = TransformersGenerator(alone, MANY_EOS, 100, say=refuse)
        ids: list[list[list[int]]] = []
        for step in range(2):
            found = ours.generate(as_prompts(prompts), 2, sampling, seeds)
            expected = theirs.generate(as_prompts(prompts), 2, sampling, seeds)
            assert len(found) == len(numbers)
            for group, other in zip(found, expected, strict=True):
                assert all(same(a, b) for a, b in zip(group, other, strict=True))
            ids.append([c.ids for group in found for c in group])
            assert_only_shards(model)
            assert all(p.is_meta for p in ours.policy.parameters()), "the copy is gone"
            move(alone, model)  # what is sampled next is of the new weights
            assert ours.update_weights(model, step + 1) == {}
            assert ours.policy is not model, "the skeleton decodes, and never the shards"
        assert not numbers or ids[0] != ids[1], "the weights have moved and nothing else"


@case
def episodes_of_a_sharded_policy_are_those_of_a_whole_one(workers: Workers) -> None:
    """By each process of its own prompts, of which it may have none."""
    plain = make_model(4)
    numbers = [[0, 1, 4], [2], []][workers.rank]
    prompts = [Prompt(n, PROMPTS[n], [{"role": "user", "content": "?"}], {}) for n in numbers]
    eos_ids = [2, *MANY_EOS]  # the template's own, too
    chat = Chat(ChatTemplate(TOKENIZER, eos_ids))
    settings = EnvironmentSettings(path="tests.kill_harness:Talks")

    def sampled(generator: Generator) -> list[list[Completion]]:
        with contextlib.closing(Sessions(settings)) as sessions:
            loop = EpisodeLoop(sessions, {"": chat}, EpisodeSettings())
            seeds = [SEEDS[n] for n in numbers]
            request = Request(prompts, 2, Sampling(max_tokens=100), seeds)
            with loop.sample(generator, request) as groups:
                found = {n: group for n, _, group in groups}
        return [found[n] for n in range(len(numbers))]

    ours = GatheringGenerator(divided(plain), torch.float32, eos_ids, 100, say=refuse)
    theirs = TransformersGenerator(copy.deepcopy(plain), eos_ids, 100, say=refuse)
    found, expected = sampled(ours), sampled(theirs)
    for group, other in zip(found, expected, strict=True):
        assert all(map(same, group, other))
        assert [c.is_sampled for c in group] == [c.is_sampled for c in other]
        assert all(len(c.turns) > 2 for c in group)


# Starting them.


@functools.cache
def outcome(processes: int) -> tuple[list[str], str]:
    """(cases that went well with so many processes, what the program printed); started once."""
    with tempfile.TemporaryDirectory(prefix="grpo-sharded-") as folder:
        key = "of-the-fake-servers-" + "0" * 32  # each process has a cache of its own
        command = programs.torchrun(processes, __file__, folder)
        done = programs.run(command, GRPO_SERVER_KEY=key)
        file = Path(folder) / "done"
        names = file.read_text().split() if file.exists() else []
    return names, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


def main(folder: Path, names: Sequence[str]) -> None:
    workers = Workers("cpu", config=Distributed(strategy="fsdp2"))
    assert workers.runs_in_lockstep
    for name in names or CASES:
        CASES[name](workers)
        workers.barrier()
        if workers.is_main:
            with (folder / "done").open("a") as file:
                file.write(f"{name}\n")
    workers.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    exit_process(0)
