"""The judge asks a real vLLM server, whose random model writes a score because it must."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.generation.vllm import server_key
from grpo_cli.rewards.judge import judge
from tests.vllm_engines import save_model, serve, wait_until_up

pytestmark = pytest.mark.vllm

Ask = Callable[..., list[float | None]]


@pytest.fixture(scope="module")
def ask(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Ask]:
    """Asks a server with a tiny random Qwen2."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    save_model(folder, tokenizer, tied=False, positions=4096)
    serving = serve(None, folder / "server.out", f"model={folder}", "max_model_len=4096")

    def values(completions: list[Any], **args: Any) -> list[float | None]:
        known = {"base_url": f"{serving.url}/v1", "model": str(folder), "api_key_env": "JUDGE_KEY"}
        prompts = ["What is 2+2?"] * len(completions)
        return asyncio.run(judge(prompts=prompts, completions=completions, **known | args))

    try:
        wait_until_up([serving])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JUDGE_KEY", server_key.read_key())
            yield values
    finally:
        serving.end()


def test_a_judge_that_must_write_a_score(ask: Ask) -> None:
    replies: list[list[str]] = []
    regex = {"structured_outputs": {"regex": "Score: [0-9]"}}
    forced: dict[str, Any] = {"extra_body": regex, "pattern": "Score: ([0-9])", "reask": 0}
    args: dict[str, Any] = {"answer": ["4", "4"], **forced}
    values = ask(
        ["It is 4.", "It is {5} 🙂."], log_extra=lambda _, column: replies.append(column), **args
    )
    (written,) = replies
    assert values == [int(reply.removeprefix("Score: ")) / 10 for reply in written]
    chat = [[{"role": "assistant", "content": "It is 4."}]]
    assert ask(chat, answer=["4"], **forced) == values[:1]


def test_a_server_that_refuses(ask: Ask) -> None:
    with pytest.raises(RuntimeError, match=r"answered 404: .*`?nobody`? does not exist"):
        ask(["It is 4."], model="nobody")
    with pytest.raises(RuntimeError, match=r"answered 400: .*4096"):
        ask(["x" * 5000])
