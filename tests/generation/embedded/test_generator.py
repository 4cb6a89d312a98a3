import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.algorithm.batch import pad_right
from grpo_cli.environments.rollouter import Rollouter
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.embedded import decode_batch
from grpo_cli.generation.embedded.engine import DecodingStep
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import loading
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Prompt, Rollout
from grpo_cli.scoring.step_rewards import token_of_character
from tests.conftest import as_prompts

PROMPTS = [[40, 41, 42, 43, 44, 45, 46], [50], [60, 61, 62], [70, 71, 72, 73], [80, 81, 80, 81]]
SEEDS = [11, 12, 13, 14, 15]
# Ids that a random model samples one in five times: completions end after a few tokens.
MANY_EOS = list(range(200, 259))


def generate(
    model: PreTrainedModel,
    sampling: Sampling,
    *,
    order: Sequence[int] = range(5),
    num_generations: int = 2,
    eos_ids: Sequence[int] = MANY_EOS,
    max_rows: int = 100,
) -> dict[int, list[Completion]]:
    """Completions by number of the prompt, for some prompts in some order."""
    groups = TransformersGenerator(model, eos_ids, max_rows).generate(
        as_prompts([PROMPTS[i] for i in order]),
        num_generations,
        sampling,
        [SEEDS[i] for i in order],
    )
    assert [len(g) for g in groups] == [num_generations] * len(order)
    return dict(zip(order, groups, strict=True))


def same(a: Completion, b: Completion) -> bool:
    close = a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
    return a.ids == b.ids and a.finish_reason == b.finish_reason and close


def one_by_one(model: PreTrainedModel, prompt: list[int], length: int, eos: int) -> list[int]:
    """transformers' own greedy completion of one prompt."""
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=length, eos_token_id=eos
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def test_greedy_matches_transformers(model: PreTrainedModel) -> None:
    unending = [one_by_one(model, prompt, 10, eos=-1) for prompt in PROMPTS]
    eos = unending[0][4]  # so that one row ends while others go on
    expected = [one_by_one(model, prompt, 10, eos) for prompt in PROMPTS]
    assert sorted({len(ids) for ids in expected})[0] < 10
    found = generate(model, Sampling(10, temperature=0), num_generations=1, eos_ids=[eos])
    assert [found[i][0].ids for i in range(5)] == expected
    ends = ["stop" if ids[-1] == eos else "length" for ids in expected]
    assert [found[i][0].finish_reason for i in range(5)] == ends
    assert set(ends) == {"stop", "length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_reproduces_reported_logprobs(model: PreTrainedModel, temperature: float) -> None:
    found = generate(model, Sampling(9, temperature=temperature), num_generations=3)
    rollouts = [Rollout(Prompt(0, PROMPTS[i], "", {}), c, "") for i, g in found.items() for c in g]
    policy_logprobs = PolicyLogprobs(model)
    policy_logprobs.check(rollouts, temperature)
    logprobs, _ = policy_logprobs(rollouts, temperature)
    sampled = pad_right(
        [torch.tensor(r.completion.sampling_logprobs) for r in rollouts], logprobs.shape[1]
    )
    assert (logprobs - sampled).abs().max() < 1e-4
    assert sampled.min() < -1
    assert logprobs.requires_grad


SAMPLING = Sampling(12, temperature=0.9, top_p=0.98, top_k=200, min_p=0.001)


@pytest.mark.parametrize(
    "changed",
    [
        {"order": [0, 3]},  # only a longer one
        {"order": [1, 3, 2, 0, 4]},
        {"max_rows": 2},
        {"num_generations": 5, "max_rows": 11},
    ],
    ids=str,
)
def test_completions_are_batch_invariant(model: PreTrainedModel, changed: dict[str, Any]) -> None:
    expected = generate(model, SAMPLING)
    assert len({len(c.ids) for g in expected.values() for c in g}) > 3
    for i, group in generate(model, SAMPLING, **changed).items():
        assert all(same(a, b) for a, b in zip(group, expected[i], strict=False)), i


@pytest.mark.parametrize(("worth", "copied"), [(-1, 1), (10**9, 1), (10**9, 0)])
def test_sharing_prompts_changes_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, worth: int, copied: int
) -> None:
    """Rows stop sharing their prompt never, at once, or where there is no memory for copies."""
    expected = generate(model, SAMPLING, num_generations=4)
    monkeypatch.setattr(decode_batch, "WORTH", worth)
    monkeypatch.setattr(decode_batch, "COPIED", copied * decode_batch.COPIED)
    for i, group in generate(model, SAMPLING, num_generations=4).items():
        assert all(same(a, b) for a, b in zip(group, expected[i], strict=True)), i


def test_completions_depend_on_seed_and_number(model: PreTrainedModel) -> None:
    found = generate(model, SAMPLING, num_generations=4)
    assert len({tuple(c.ids) for c in found[0]}) == 4
    generator = TransformersGenerator(model, MANY_EOS, 100)
    twice = generator.generate(as_prompts([PROMPTS[0]] * 3), 2, SAMPLING, [11, 11, 99])
    assert [c.ids for c in twice[0]] == [c.ids for c in twice[1]]
    assert [c.ids for c in twice[0]] != [c.ids for c in twice[2]]


def test_eos_ids_of_a_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config.eos_token_id = 7
    assert loading.eos_ids(model.generation_config, tokenizer) == [2, 7]
    model.generation_config.eos_token_id = None
    assert loading.eos_ids(model.generation_config, tokenizer) == [2]


def noted(model: PreTrainedModel) -> list[int]:
    """Rows of each decoding step that follows; 0 for a prefill."""
    sizes: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        attending = kwargs.get("attending")
        if attending is not None:
            sizes.append(kwargs["input_ids"].numel() if isinstance(attending, DecodingStep) else 0)

    model.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


CHECK = [0] + [4] * 15  # two rows of each of two prompts: the engine's check of itself


def test_waiting_prompts_join(model: PreTrainedModel) -> None:
    sizes = noted(model)
    few_eos = range(240, 259)
    found = generate(model, Sampling(40), num_generations=1, eos_ids=few_eos, max_rows=4)
    steps = sizes[len(CHECK) :]
    assert max(steps) == 4
    begun = [i for i, size in enumerate(steps) if size == 0]
    joined = [steps[i + 1] for i in begun[1:]]
    assert joined == [3], "one that waited beside two that were at work"
    lengths = [len(c.ids) for g in found.values() for c in g]
    assert sum(steps) == sum(n - 1 for n in lengths), "a row was computed after it had ended"


def test_wrong_engine_is_not_used(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generate(model, SAMPLING)
    monkeypatch.setattr(decode_batch, "merge", lambda out, lse, other, other_lse: (out, lse))
    found = generate(model, SAMPLING)
    assert "log-probabilities differ by" in capsys.readouterr().out
    for i, group in found.items():
        assert all(same(a, b) for a, b in zip(group, expected[i], strict=True))


def test_oom_halves_max_rows(model: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    expected = generate(model, SAMPLING)

    def allocate(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        attending = kwargs.get("attending")
        if (
            isinstance(attending, DecodingStep)
            and attending.longest > 8
            and sum(attending.sizes) > 4
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.register_forward_pre_hook(allocate, with_kwargs=True)
    generator = TransformersGenerator(model, MANY_EOS, 100)
    with generator.session() as session:
        session.submit(Request(as_prompts(PROMPTS), 2, SAMPLING, SEEDS))
        found = [(done.number, done.completions) for done in session.drain()]
    assert "note: out of memory: 5 completions at a time" in capsys.readouterr().out
    assert generator.max_rows == 5
    assert sorted(number for number, _ in found) == [0, 1, 2, 3, 4], "each group once"
    for i, group in found:
        assert all(same(a, b) for a, b in zip(group, expected[i], strict=True))
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(TrainingError, match=r"out of memory while 2 completions .*none left"):
        generator.generate(as_prompts(PROMPTS[:1]), 2, SAMPLING, SEEDS[:1])


def test_oom_keeps_the_groups_of_its_step(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(model, SAMPLING, num_generations=1)
    take, failed = decode_batch.DecodeBatch.take, []

    def fail_once(batch: decode_batch.DecodeBatch, *given: Any) -> None:
        if batch.state.finished and batch.num_generations == 1 and not failed:
            failed.append(batch)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        take(batch, *given)

    monkeypatch.setattr(decode_batch.DecodeBatch, "take", fail_once)
    found = generate(model, SAMPLING, num_generations=1)
    assert failed
    assert all(same(found[i][0], expected[i][0]) for i in expected)


@pytest.mark.parametrize("decoder", ["sdpa", "eager"])
def test_min_tokens_stop_strings_and_the_repetition_penalty(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, decoder: str
) -> None:
    model.set_attn_implementation(decoder)

    def completions(sampling: Sampling) -> list[Completion]:
        generator = TransformersGenerator(model, MANY_EOS, 100, tokenizer=tokenizer, say=str)
        return [c for g in generator.generate(as_prompts(PROMPTS), 4, sampling, SEEDS) for c in g]

    plain = completions(Sampling(20))
    assert min(len(c.ids) for c in plain) < 7
    late = completions(Sampling(20, min_tokens=7))
    assert min(len(c.ids) for c in late) == 7
    for c, prompt in zip(late, [p for p in PROMPTS for _ in range(4)], strict=True):
        assert not set(c.ids[:6]) & set(MANY_EOS), "no eos before its time"
        logits = model(torch.tensor([prompt])).logits[0, -1]
        logits[MANY_EOS] = -torch.inf
        # What was drawn from: the distribution without the eos, renormalised.
        assert c.sampling_logprobs[0] == pytest.approx(
            logits.log_softmax(-1)[c.ids[0]].item(), abs=1e-4
        )
    letter = tokenizer.decode([late[0].ids[3]])
    stopped = completions(Sampling(20, min_tokens=1, stop=(letter,)))[0]
    assert stopped.finish_reason == "stop"
    assert letter in tokenizer.decode(stopped.ids[-1:]) or stopped.ids[-1] in MANY_EOS
    greedy = completions(Sampling(20, temperature=0, min_tokens=20))
    varied = completions(Sampling(20, temperature=0, min_tokens=20, repetition_penalty=1e6))
    assert min(len(set(c.ids)) for c in varied) == 20 > min(len(set(c.ids)) for c in greedy)
    for c, prompt in zip(varied, [p for p in PROMPTS for _ in range(4)], strict=True):
        assert not set(c.ids) & set(prompt), "tokens of the prompt count as seen"


def test_penalties_and_bans(model: PreTrainedModel) -> None:
    def completions(**settings: Any) -> list[list[int]]:
        generator = TransformersGenerator(model, [], 100, say=str)
        sampling = Sampling(20, temperature=0, **settings)
        found = generator.generate(as_prompts(PROMPTS), 2, sampling, SEEDS)
        return [c.ids for group in found for c in group]

    plain = completions()
    assert any(len(set(ids)) < 20 for ids in plain), "some token is sampled twice"
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert all(len(set(ids)) == 20 for ids in completions(**{penalty: 1e6}))
    assert all(set(ids) == {11} for ids in completions(logit_bias=((11, 1e6),)))


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_put_back(model: PreTrainedModel, training: bool) -> None:
    model.train(training)
    seen: list[tuple[bool, bool]] = []
    hook = model.register_forward_pre_hook(
        lambda m, _: seen.append((m.training, torch.is_grad_enabled()))
    )
    generate(model, Sampling(3))
    assert set(seen) == {(False, False)}
    assert {m.training for m in model.modules()} == {training}
    hook.remove()
    model.register_forward_pre_hook(lambda m, _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, Sampling(3))
    assert {m.training for m in model.modules()} == {training}


def test_new_weights_need_an_update(model: PreTrainedModel) -> None:
    generator = TransformersGenerator(model, [], 8)
    before = generator.generate(as_prompts(PROMPTS[:1]), 1, Sampling(6), [0])
    other = loading.frozen_copy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    assert generator.generate(as_prompts(PROMPTS[:1]), 1, Sampling(6), [0]) == before
    generator.update_weights(other, 1)
    expected = TransformersGenerator(other, [], 8).generate(
        as_prompts(PROMPTS[:1]), 1, Sampling(6), [0]
    )
    assert generator.generate(as_prompts(PROMPTS[:1]), 1, Sampling(6), [0]) == expected != before


class Echo(Generator):
    """A generator whose completion j is the prompt, then j, then eos."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        self.seeds += request.seeds
        for number, p in reversed([*enumerate(request.prompts)]):  # in any order
            logprobs = [-1.0] * (len(p.ids) + 2)
            yield number, [Completion([*p.ids, 10 + j, 2], logprobs, "stop") for j in range(2)]


def test_sample_makes_groups_of_decoded_rollouts(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [Prompt(row, tokenizer(text)["input_ids"], text, {}) for row, text in enumerate("ab")]
    generator = Echo()
    pairs = [(7, prompts[0]), (3, prompts[1])]
    with Rollouter().groups(generator, tokenizer, pairs, 2, SAMPLING, 5) as sampled:
        groups = list(sampled)
    assert [(g.prompt_index, g.prompt.row, len(g.rollouts)) for g in groups] == [
        (3, 1, 2),
        (7, 0, 2),
    ], "as they end"
    assert generator.seeds == [derive_seed(5, 7), derive_seed(5, 3)]
    rollouts = groups[0].rollouts
    assert [r.prompt for r in rollouts] == [prompts[1]] * 2
    # The eos is one of the ids and no part of the text.
    assert rollouts[1].completion.ids == [*prompts[1].ids, 11, 2]
    assert rollouts[1].text == "b" + tokenizer.decode([11])


def test_the_spaces_of_a_completion_are_kept() -> None:
    """With `clean_up_tokenization_spaces` transformers would decode `a ='' + b`."""
    pieces = ["a", " = ", "<end>", "' '", " + b"]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces]))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", clean_up_tokenization_spaces=True
    )
    prompt = Prompt.from_ids([0, 1, 3, 4])
    with Rollouter().groups(Echo(), tokenizer, [(0, prompt)], 2, SAMPLING, 5) as sampled:
        (group,) = sampled
    assert group.rollouts[0].text == "a = ' ' + b"
    assert token_of_character(prompt.ids, 5, tokenizer) == 2


def test_finished_groups_are_handed_over_early(model: PreTrainedModel) -> None:
    sampling = Sampling(max_tokens=30)
    steps: list[int] = []  # forward passes done when a group came
    longest: list[int] = []
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count)
    generator = TransformersGenerator(model, MANY_EOS, 100)
    with generator.session() as session:
        session.submit(Request(as_prompts(PROMPTS), 2, sampling, SEEDS))
        for done in session.drain():
            longest.append(max(len(c.ids) for c in done.completions))
            steps.append(passes)
    assert len(steps) == len(PROMPTS)
    before = steps[0] - longest[0]  # passes of the engine's check
    assert [n - before for n in steps] == longest == sorted(longest)
    assert len(set(steps)) > 1, "nothing came early"


@pytest.mark.parametrize("plainly", [False, True])
def test_nan_logits_end_the_run(model: PreTrainedModel, plainly: bool) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight.mul_(torch.nan)
    generator = TransformersGenerator(broken, MANY_EOS, 100)
    if plainly:
        generator.fall_back("for this test")
    with pytest.raises(TrainingError, match=r"logits are NaN.*optimizer\.learning_rate"):
        generator.generate(as_prompts(PROMPTS), 2, Sampling(max_tokens=4), SEEDS)
