"""The engine in the trainer's process, with real vLLM: never stale, exact about what it drew."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Vllm
from tests.vllm_engines import (
    CACHE,
    LONG,
    PROMPTS,
    SAMPLING,
    SEEDS,
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
    setup_for,
    with_adapter,
)

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from grpo_cli.generation.vllm import colocate, worker  # noqa: E402
from grpo_cli.generation.vllm.colocate import ColocatedGenerator  # noqa: E402
from tests.conftest import as_prompts  # noqa: E402
from tests.generation.test_sampling import log_distribution  # noqa: E402


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def engine(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[ColocatedGenerator]:
    folder = save_model(tmp_path_factory.mktemp("model"), tokenizer, tied=request.param)
    model = make_model(tokenizer, tied=request.param)
    recipe = recipe_for(folder, "vllm_colocate", engine_args={**CACHE, "disable_log_stats": False})
    generator = ColocatedGenerator.make(setup_for(recipe, model, 150))
    yield generator
    generator.close()


@pytest.fixture
def policy(engine: ColocatedGenerator) -> PreTrainedModel:
    """The engine's policy, at its first weights again, which the engine has too."""
    model = engine.policy
    with torch.no_grad():
        for mine, first in zip(model.parameters(), make_first(model).parameters(), strict=True):
            mine.copy_(first)
    engine.update_weights(model, 0)
    return model


FIRST: dict[bool, PreTrainedModel] = {}


def make_first(model: PreTrainedModel) -> PreTrainedModel:
    tied = bool(model.config.tie_word_embeddings)
    return FIRST.setdefault(tied, copy.deepcopy(model))


def test_never_stale(engine: ColocatedGenerator, policy: PreTrainedModel) -> None:
    assert_never_stale(engine, policy)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(24, min_p=0.2),
        Sampling(24, min_tokens=10, temperature=1.3),
        Sampling(24, temperature=1.2, top_k=20, top_p=0.8, repetition_penalty=1.2),
        Sampling(24, presence_penalty=0.8, frequency_penalty=0.6),
        Sampling(24, logit_bias=((7, 3.0), (9, -4.0)), repetition_penalty=1.3),
    ],
    ids=repr,
)
def test_logprobs_match_the_policy(
    engine: ColocatedGenerator, policy: PreTrainedModel, sampling: Sampling
) -> None:
    groups = engine.generate(as_prompts(PROMPTS), 3, sampling, SEEDS)
    checked = 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            ids = torch.tensor([prompt + c.ids])
            with torch.no_grad():
                logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for t in range(len(c.ids)):
                seen[t, torch.tensor(prompt + c.ids[:t])] = True
            places = range(1, len(c.ids) + 1)
            forbidden = torch.tensor([[2] if t < sampling.min_tokens else [-1] for t in places])
            counts = torch.zeros_like(logits)
            for t, token in enumerate(c.ids[:-1]):
                counts[t + 1 :, token] += 1
            log_p = log_distribution(
                logits, sampling, seen=seen, counts=counts, forbidden=forbidden
            )
            own = log_p[torch.arange(len(c.ids)), torch.tensor(c.ids)]
            assert own.isfinite().all(), "a token that is ruled out was drawn"
            assert torch.allclose(own, torch.tensor(c.sampling_logprobs), atol=2e-4)
            assert len(c.ids) >= sampling.min_tokens or c.finish_reason == "length"
            checked += len(c.ids)
    assert checked > 100


def test_greedy_is_the_likeliest_token(engine: ColocatedGenerator, policy: PreTrainedModel) -> None:
    groups = engine.generate(as_prompts(PROMPTS), 2, Sampling(8, temperature=0.0), SEEDS)
    for prompt, (one, other) in zip(PROMPTS, groups, strict=True):
        assert one == other
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + one.ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == one.ids


def test_a_seed_is_a_completion(engine: ColocatedGenerator, policy: PreTrainedModel) -> None:
    groups = engine.generate(as_prompts(PROMPTS), 4, SAMPLING, SEEDS)
    alone = engine.generate(as_prompts(PROMPTS[3:4]), 4, SAMPLING, SEEDS[3:4])
    assert [c.ids for c in alone[0]] == [c.ids for c in groups[3]]
    assert len({tuple(c.ids) for c in groups[3]}) == 4
    others = engine.generate(as_prompts(PROMPTS[3:4]), 4, SAMPLING, [5])
    assert [c.ids for c in others[0]] != [c.ids for c in groups[3]]


def test_group_shares_its_prompt(engine: ColocatedGenerator, policy: PreTrainedModel) -> None:
    def hits() -> int:
        found = {m.name: m.value for m in engine.llm.get_metrics() if hasattr(m, "value")}
        return int(found["vllm:prefix_cache_hits"])

    block = engine.engine.vllm_config.cache_config.block_size
    shared = (len(LONG[0]) - 1) // block * block  # complete blocks, without the last token
    before = hits()
    groups = engine.generate(as_prompts(LONG[:2]), 4, SAMPLING, SEEDS[:2])
    assert hits() - before == 2 * (4 - 1) * shared > 0
    assert difference(policy, groups, prompts=LONG[:2]) < 1e-3


def test_eos_and_stop_strings_end_a_completion(
    engine: ColocatedGenerator, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    groups = engine.generate(as_prompts(PROMPTS), 4, Sampling(60), SEEDS)
    every = [c for group in groups for c in group]
    ended = [c for c in every if c.finish_reason == "stop"]
    assert ended
    assert all(c.ids[-1] == 2 and 2 not in c.ids[:-1] for c in ended)
    assert all(len(c.ids) == 60 and 2 not in c.ids for c in every if c not in ended)
    texts = [tokenizer.decode(c.ids) for c in every]
    stop = max("bcghjklpquvwyz", key=lambda s: sum(s in t for t in texts))
    again = engine.generate(as_prompts(PROMPTS), 4, Sampling(60, stop=(stop,)), SEEDS)
    stopped = 0
    for before, after in zip(every, (c for g in again for c in g), strict=True):
        assert before.ids[: len(after.ids)] == after.ids
        text = tokenizer.decode(after.ids)
        if stop in text:
            stopped += 1
            assert text.index(stop) + len(stop) == len(text)
            assert after.finish_reason == "stop"
    assert stopped


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "[0-9]{3}-[xyz]+"},
        {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                  "additionalProperties": False}},
    ],
    ids=["regex", "json"],
)  # fmt: skip
def test_structured_outputs(
    engine: ColocatedGenerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    structured: dict[str, Any],
) -> None:
    monkeypatch.setattr(engine, "structured", structured)
    groups = engine.generate(as_prompts(PROMPTS[:3]), 2, Sampling(80, temperature=0.7), SEEDS[:3])
    ended = [c for g in groups for c in g if c.finish_reason == "stop"]
    assert ended
    for c in ended:
        text = tokenizer.decode(c.ids, skip_special_tokens=True)
        if "regex" in structured:
            assert re.fullmatch(structured["regex"], text), text
            prompt = PROMPTS[next(i for i, g in enumerate(groups) if c in g)]
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7
            digits = torch.tensor(tokenizer("0123456789")["input_ids"])
            own = torch.tensor(c.ids[0]) == digits
            assert logits[digits].log_softmax(-1)[own].item() == pytest.approx(
                c.sampling_logprobs[0], abs=1e-4
            )
        else:
            assert json.loads(text) in ({"a": 1}, {"a": 2})


def test_refused_settings(engine: ColocatedGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "structured", {"regex": "(a"})
    with pytest.raises(TrainingError, match=r"^vLLM refuses a request: .+"):
        engine.generate(as_prompts(PROMPTS[:1]), 2, SAMPLING, SEEDS[:1])


def test_prompts_of_several_steps(engine: ColocatedGenerator, policy: PreTrainedModel) -> None:
    """vLLM turns a seeded random stream back after a part of a prompt, which a CPU's cannot."""
    prompts = [[70 + (i * j) % 60 for i in range(100)] for j in range(60)]
    groups = engine.generate(as_prompts(prompts), 1, SAMPLING, range(60))
    assert difference(policy, groups, prompts=prompts) < 1e-3


@pytest.mark.parametrize("order", ["repeatable", "eager"])
def test_log_probabilities_of_episodes(
    engine: ColocatedGenerator,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    order: str,
) -> None:
    rollouts = played(engine, tokenizer, order)
    turns = [len(r.completion.model_turns) for r in rollouts]
    assert max(turns) == 3
    assert sum(turns) > 2 * len(turns)
    assert difference_of(policy, rollouts) < 1e-3


def test_stale_head_is_found(
    engine: ColocatedGenerator, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not policy.config.tie_word_embeddings:
        pytest.skip("an untied head is sent like any other weight")
    monkeypatch.setattr(worker, "refresh_packed_heads", lambda model: None)
    move(policy, 1)
    with pytest.raises(TrainingError, match=r"not compute with the weights of step 1: .* twice"):
        engine.update_weights(policy, 1)


def test_wrong_version_is_found(
    engine: ColocatedGenerator, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "step", 3)
    with pytest.raises(TrainingError, match=r"sampled with weights \['0'\], not .* of step 3"):
        engine.generate(as_prompts(PROMPTS), 2, SAMPLING, SEEDS)


@pytest.mark.parametrize("sync", ["merge", "adapter"])
def test_an_adapter_is_never_stale(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, sync: str
) -> None:
    folder = save_model(tmp_path / "model", tokenizer, tied=True)
    recipe, policy = recipe_for(folder, "vllm_colocate"), make_model(tokenizer, tied=True)
    recipe.output_dir = str(tmp_path / "run")
    with_adapter(recipe, policy, sync)
    move(policy, 0)  # the first update has a trained adapter, as with adapter.path
    engine = ColocatedGenerator.make(setup_for(recipe, policy, 160))
    try:
        prompts = PROMPTS + LONG
        for step in range(4):
            metrics = engine.update_weights(policy, step)
            groups = engine.generate(as_prompts(prompts), 2, SAMPLING, list(range(len(prompts))))
            assert difference(policy, groups, prompts=prompts) < 1e-4
            assert metrics["weights/check_difference"] < 1e-4
            before = copy.deepcopy(policy)
            move(policy, step + 1)
            assert difference(policy, groups, prompts=prompts) > 0.02
        written = sorted(p.name for p in (tmp_path / "run").rglob("*.*"))
        if sync == "merge":
            assert written == []
            return
        assert written == ["adapter_config.json", "adapter_model.safetensors"]
        # An engine that does not apply the new adapter is found.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.engine, "add_lora", lambda request: True)
            pattern = r"not compute with the weights of step 4: .* sent them twice"
            with pytest.raises(TrainingError, match=pattern):
                engine.update_weights(policy, 4)
        engine.update_weights(policy, 4)
        # What vLLM refuses is one sentence, and the engine samples on.
        (tmp_path / "run/vllm_weights/adapter_config.json").write_text('{"r": 3}')
        with pytest.raises(TrainingError, match=r"not take the adapter of step 5: .*sync=merge"):
            engine.update_weights(policy, 5)
        groups = engine.generate(as_prompts(PROMPTS), 2, SAMPLING, SEEDS)
        assert difference(before, groups) > difference(policy, groups) == pytest.approx(0, abs=1e-4)
    finally:
        engine.close()
    assert not (tmp_path / "run/vllm_weights").exists()


class Asleep:
    """Stands in for an engine that can sleep, which on the CPU none can; keeps what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)

    def apply_model(self, function: Any) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True

    def reset_encoder_cache(self) -> None: ...

    def set_weight_version(self, version: str) -> None: ...


@pytest.mark.parametrize("level", [1, 2])
def test_wakes_with_weights_before_the_cache(level: int) -> None:
    generator = object.__new__(ColocatedGenerator)
    fake = Asleep()
    vars(generator).update(
        llm=fake, engine=fake, config=Vllm(sleep=level), sleeping=[], has_weights=True, step=4,
        policy=torch.nn.Linear(1, 1), apart=colocate._Apart(), lora_rank=None,
    )  # fmt: skip
    generator.offload()
    generator.offload()
    assert fake.calls == [f"sleep {level}"]
    generator.load(5)
    generator._wake_up()
    assert fake.calls[1:] == ["wake weights", "reload_weights", "wake kv_cache"]
    fake.calls.clear()
    generator.offload()
    generator._wake_up()  # nothing was sent since: a level of 2 has thrown the weights away
    loads = ["reload_weights"] if level == 2 else []
    assert fake.calls == [f"sleep {level}", "wake weights", *loads, "wake kv_cache"]


@pytest.fixture
def left_by_a_killed_run() -> Iterator[None]:
    """Shared memory of the name that vLLM gives to every run of two tensor-parallel processes."""
    left = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")
    left.touch()
    yield
    left.unlink()
    assert not list(left.parent.glob("grpo-*"))


@pytest.mark.usefixtures("left_by_a_killed_run")
def test_two_processes_divide_the_prompts(tmp_path: Path) -> None:
    """With an engine each, and as one engine over both. Nothing trains: the two are comparable."""
    found = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        words = ["generation=vllm_colocate", f"generation.vllm.tensor_parallel={size}", "steps=2"]
        words += ["optimizer.learning_rate=0", "prompts_per_step=9", f"output_dir={out}"]
        grpo_train(*words, processes=2)
        found[size] = run_metrics(out)
    for step, (mine, other) in enumerate(zip(found[1], found[2], strict=True), 1):
        for metrics in (mine, other):
            assert metrics["epoch"] == pytest.approx(9 * step / 1400)
            assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
            assert metrics["sampling/effective_sample_size"] == pytest.approx(1, abs=1e-5)
        for key in ("reward", "num_tokens", "completions/mean_length"):
            assert mine[key] == pytest.approx(other[key]), key


def test_two_processes_apply_the_adapter_of_a_sharded_policy(tmp_path: Path) -> None:
    words = ["generation=vllm_colocate", "adapter=lora", "adapter.sync=adapter", "adapter.rank=2"]
    words += ["distributed=fsdp2", "optimizer.learning_rate=0.01", "steps=3", "prompts_per_step=8"]
    grpo_train(*words, f"output_dir={tmp_path}", processes=2)
    steps = run_metrics(tmp_path)
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
        assert metrics["weights/check_difference"] < 1e-4
    assert not (tmp_path / "vllm_weights").exists()
