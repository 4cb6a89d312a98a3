import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_cli.models import tiny
from grpo_cli.rewards import reward_model as module
from grpo_cli.rewards.reward_model import reward_model

END = tiny.END  # id 2, the tokenizer's eos
ROWS = [
    ("What is 1+1?", " 2"),
    ("Say äöü 🙂", " äöü 🙂, and then some more of it"),
    ("q", ""),
    ("", "a"),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    module._load.cache_clear()
    yield
    module._load.cache_clear()


SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.5,
}  # fmt: skip


def save_qwen(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    labels: int = 1,
    pad: int | None = 0,
    head: bool = True,
) -> str:
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        **SMALL,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
        num_labels=labels,
        attention_dropout=0.5,  # would show if the model were not in eval mode
    )
    kind = transformers.Qwen2ForSequenceClassification if head else transformers.Qwen2ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def qwen(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    return save_qwen(tmp_path / "qwen", tokenizer)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """Letters as tokens, between [CLS] and [SEP]; the score is read at [CLS]."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: i for i, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    config = transformers.BertConfig(
        vocab_size=len(words), max_position_embeddings=24, num_labels=1, pad_token_id=0, **SMALL
    )
    folder = tmp_path / "bert"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return str(folder)


def alone(folder: str, ids: list[int]) -> float:
    """What transformers gives to the row by itself, without padding or mask."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def score(folder: str, rows: list[tuple[Any, Any]], **args: Any) -> list[float | None]:
    prompts, completions = (list(column) for column in zip(*rows, strict=True))
    args = {"model": folder, "device": "cpu", **args}
    found: list[float | None] = reward_model(prompts=prompts, completions=completions, **args)
    return found


def as_chat(prompt: str, completion: str) -> tuple[Any, Any]:
    return ([{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}])


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
CHATS = [as_chat(*row) for row in ROWS]
KIND = [([{"role": "system", "content": "Be kind."}, *p], c) for p, c in CHATS]


@pytest.mark.parametrize(
    ("rows", "args", "text"),
    [
        (ROWS, {}, "{}{}"),
        (ROWS, {"chat": True}, CHAT),
        (CHATS, {}, CHAT),
        (KIND, {"chat": False}, "Be kind.\n{}\n{}"),
    ],
)
def test_rows_are_plain_text_or_go_through_the_models_own_template(
    rows: list[Any], args: dict[str, Any], text: str, qwen: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = [alone(qwen, tokenizer(text.format(*row))["input_ids"]) for row in ROWS]
    assert score(qwen, rows, **args) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_arguments_of_the_template(qwen: str, tokenizer: PreTrainedTokenizerFast) -> None:
    own = transformers.AutoTokenizer.from_pretrained(qwen)
    own.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if stern %} Be stern.{% endif %}"
    )
    own.save_pretrained(qwen)
    row, args = as_chat("q", "a"), {"chat_template_kwargs": {"stern": True}}
    expected = [alone(qwen, tokenizer(text)["input_ids"]) for text in ("qa", "qa Be stern.")]
    assert score(qwen, [row]) == pytest.approx(expected[:1], abs=1e-5)
    assert score(qwen, [row], **args) == pytest.approx(expected[1:], abs=1e-5)
    assert score(qwen, [("q", "a")], chat=True, **args) == pytest.approx(expected[1:], abs=1e-5)
    with pytest.raises(ValueError, match="chat_template_kwargs is only read with the chat templ"):
        score(qwen, [("q", "a")], **args)


def test_special_tokens_are_the_templates_own(bert: str) -> None:
    template = "[CLS]{% for m in messages %}{{ m['content'] }}{% endfor %}[SEP]"
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(bert)
    assert score(bert, [as_chat("ab", "c")]) == score(bert, [("ab", "c")])
    assert score(bert, [as_chat("ab", "c")]) != score(bert, [("[CLS]ab", "c[SEP]")])


# The head reads the last token that is not the pad token: no pad token, the end token as such,
# and one of its own.
@pytest.mark.parametrize("pad", [None, 2, 0])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_a_row_scores_the_same_whatever_stands_beside_it(
    pad: int | None, batch_tokens: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save_qwen(tmp_path / "rm", tokenizer, pad=pad)
    chooser = random.Random(0)
    texts = ["".join(chooser.choices("abcdefgh +-=", k=n)) for n in (3, 50, 1, 17, 18, 9, 2, 30)]
    # Some end in the end token, some in two, one holds it, one holds what pads the others.
    texts = [t + END * (i % 3) for i, t in enumerate(texts)] + [f"a{END}b", END, f"x{tiny.PAD}"]
    rows = [("", text) for text in texts]
    single = [alone(folder, tokenizer(text)["input_ids"]) for text in texts]
    assert score(folder, rows, batch_tokens=batch_tokens) == pytest.approx(single, abs=1e-5)
    backwards = score(folder, rows[::-1], batch_tokens=batch_tokens)
    assert backwards == pytest.approx(single[::-1], abs=1e-5)


def test_an_encoder_scores_ragged_rows_like_single_ones(bert: str) -> None:
    rows = [("ab", "c"), ("what is it", "abcdefgh"), ("", "z"), ("q", "rst")]
    letters = {letter: 4 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    expected = [alone(bert, [1, *(letters.get(x, 3) for x in p + c), 2]) for p, c in rows]
    assert score(bert, rows) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01


def test_what_is_too_long_loses_its_beginning(
    qwen: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    long = ("p" * 40, "the answer")
    assert score(qwen, [long], max_length=12) == score(qwen, [("pp", "the answer")])
    chat = as_chat(*long)
    ids = tokenizer(f"p<|im_end|>\n<|im_start|>assistant\n{long[1]}<|im_end|>\n")["input_ids"]
    found = score(qwen, [chat], max_length=len(ids))
    assert found == pytest.approx([alone(qwen, ids)], abs=1e-5)


def test_a_row_is_cut_to_the_models_positions(qwen: str, bert: str) -> None:
    answer = "xyz" * 80
    assert score(qwen, [("p" * 500, answer)]) == score(qwen, [("p" * 16, answer)])  # 256
    # [CLS], at which the score is read, and [SEP] stay beside the last 22 letters of 24 positions.
    assert score(bert, [("p" * 500, "abcdefgh")]) == score(bert, [("p" * 14, "abcdefgh")])
    assert score(bert, [("p" * 500, "abc")], max_length=500) == score(bert, [("p" * 19, "abc")])
    own = transformers.AutoTokenizer.from_pretrained(qwen)
    own.model_max_length = 100  # less than the positions, as RoBERTa has
    own.save_pretrained(qwen)
    module._load.cache_clear()
    assert score(qwen, [("p" * 500, "xyz" * 33)]) == score(qwen, [("p", "xyz" * 33)])


def test_several_labels(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = save_qwen(tmp_path / "three", tokenizer, labels=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokenizer("ab")["input_ids"]])).logits[0].tolist()
    found = [score(folder, [("a", "b")], label=label)[0] for label in (0, "LABEL_1", 2)]
    assert found == pytest.approx(expected, abs=1e-5)
    for label, said in ((None, "not set"), (3, "3"), (-1, "-1"), ("good", "'good'"), (True, "Tr")):
        with pytest.raises(ValueError, match=rf"label is {said}.*0 \(LABEL_0\), 1 \(LABEL_1\), 2"):
            score(folder, [("a", "b")], label=label)


def test_a_language_model_is_refused_and_moves_no_random_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save_qwen(tmp_path / "lm", tokenizer, head=False)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"lm is no reward model: it lacks the weights score\.we"):
        score(folder, ROWS)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_loaded(tmp_path: Path, qwen: str) -> None:
    with pytest.raises(ValueError, match=r"model is '.*/nothing'; there is no such folder\.$"):
        score(f"{tmp_path}/nothing", ROWS)
    with pytest.raises(ValueError, match=r"^reward_model: no-such/model cannot be loaded: .+"):
        score("no-such/model", ROWS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"/empty cannot be loaded: .+"):
        score(f"{tmp_path}/empty", ROWS)
    with pytest.raises(ValueError, match=r"/qwen cannot be loaded: .+"):
        score(qwen, ROWS, device="abacus")


def test_a_score_that_is_not_finite(qwen: str) -> None:
    scorer = module._load(qwen, None, "auto", "cpu", False)
    with torch.no_grad():
        scorer.model.score.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"/qwen in torch.float32 gives a score that is not fin"):
        score(qwen, ROWS)


def test_a_tokenizer_without_template(bert: str) -> None:
    with pytest.raises(ValueError, match="has no chat template; for rows as plain text set chat"):
        score(bert, [as_chat("a", "b")])
    assert score(bert, [as_chat("a", "b")], chat=False) == score(bert, [("a\n", "b")])


def test_called_as_the_trainer_calls_it(qwen: str) -> None:
    values = score(qwen, ROWS, completion_ids=[[1]] * 4, subject=["Algebra"] * 4, label=0)
    assert [type(value) for value in values] == [float] * 4
    assert reward_model(prompts=[], completions=[], model="none") == []
    assert score(qwen, [("", ""), ("q", "a")]) == [None, score(qwen, [("q", "a")])[0]]


def test_loaded_once_without_gradient_or_dropout(qwen: str) -> None:
    assert score(qwen, ROWS) == score(qwen, ROWS)
    assert score(qwen, ROWS, max_length=9, label=0)
    assert module._load.cache_info().misses == 1
    scorer = module._load(qwen, None, "auto", "cpu", False)
    assert not scorer.model.training
    assert not scorer.model.config.use_cache
    assert not any(p.requires_grad for p in scorer.model.parameters())


def test_weights_in_sixteen_bits_give_scores_near_by(qwen: str) -> None:
    exact, rough = score(qwen, ROWS), score(qwen, ROWS, dtype="bfloat16")
    assert rough != exact
    assert rough == pytest.approx(exact, abs=0.3, rel=0.1)


@pytest.mark.parametrize(
    ("device", "available", "expected"),
    [
        (None, "cuda", "cuda:1"),
        ("auto", "mps", "mps"),
        (None, "", "cpu"),
        ("cuda", "cuda", "cuda:1"),
        ("cpu", "cuda", "cpu"),
    ],
)
def test_devices(
    device: str | None, available: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available == "mps")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert module._resolved(device) == expected


@pytest.mark.gpu
def test_on_a_gpu_the_scores_are_those_of_the_cpu(qwen: str) -> None:
    expected = score(qwen, ROWS, device="cpu")
    assert score(qwen, ROWS, device="cuda") == pytest.approx(expected, abs=1e-3)
