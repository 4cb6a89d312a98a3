"""Weights on their way to servers: cut, flattened, sent, and what happens when they do not arrive.

vLLM's own ways (nccl, ipc) need a GPU.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_cli.generation.vllm import weight_transfer
from grpo_cli.generation.vllm.client import Server, ServerLost
from grpo_cli.generation.vllm.weight_transfer import Link, connect, send
from grpo_cli.generation.vllm.weights import WeightInfo, Weights, buckets, flattened
from tests.fake_vllm import FakeVllm, serving

LIMIT = 2**20
RUN = "run"  # whose weights they are


class MixedTypes(nn.Module):
    """Several dtypes, a weight larger than a bucket, one of no axis, a frozen one, a tied head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)

        def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=dice).to(dtype))

        self.embed = weight(300, 7)
        self.large = weight(LIMIT // 4 + 1)
        self.narrow = weight(5, 3, dtype=torch.bfloat16)
        self.other_narrow = weight(4, dtype=torch.float16)
        self.scale = weight()
        self.turned = nn.Parameter(torch.randn(3, 5, generator=dice).T)  # not contiguous
        self.frozen = weight(2, 2).requires_grad_(False)
        self.embed.data[0, 0] = torch.nan
        self.register_buffer("table", torch.zeros(3))
        self.head = self.embed


def assert_bit_equal(found: dict[str, Tensor], model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape), name
        assert bits(found[name]) == bits(weight), name


def bits(weight: Tensor) -> bytes:
    return weight.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# Cutting and flattening.


def info(name: str, numel: int, dtype: torch.dtype = torch.float32) -> WeightInfo:
    return WeightInfo(name, (numel,), dtype)


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("infos", "cut"),
    [
        ([info("a", 2), info("b", 2)], ["ab"]),  # 8 + 8 bytes fill 16
        ([info("a", 1), info("b", 1), info("c", 3), info("d", 1)], ["ab", "cd"]),
        ([info("a", 1), info("b", 9), info("c", 1)], ["a", "b", "c"]),
        ([info("a", 4, HALF), info("b", 4, HALF), info("c", 1, HALF)], ["ab", "c"]),
        ([info("a", 1), info("b", 1, HALF), info("c", 1)], ["a", "b", "c"]),
        ([info("a", 1), WeightInfo("b", (), torch.float32), WeightInfo("c", (2, 1), HALF)],
         ["ab", "c"]),
    ],
    ids=str,
)  # fmt: skip
def test_buckets_of_sixteen_bytes(infos: list[WeightInfo], cut: list[str]) -> None:
    assert ["".join(i.name for i in b) for b in buckets(infos, 16)] == cut


def test_unexpected_weight_is_refused() -> None:
    for name, dtype in (("b", torch.float32), ("a", HALF)):
        with pytest.raises(ValueError, match=rf"^{name} was to be WeightInfo\(name='a', shape=\(2"):
            flattened(iter([(name, torch.zeros(2, dtype=dtype))]), [info("a", 2)])


# Links.


@pytest.fixture
def fakes() -> Iterator[list[FakeVllm]]:
    """Two servers, the second of two workers."""
    servers = [FakeVllm({}), FakeVllm({}, workers=2)]
    with serving(*servers):
        yield servers


def linked(fakes: list[FakeVllm], transfer: str, folder: Path) -> list[Link]:
    servers = [Server(fake.url, key=fake.key) for fake in fakes]
    for server in servers:
        assert server.greet({})
    return [connect(s, transfer, RUN, folder / f"server-{n}") for n, s in enumerate(servers)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts weights into buckets of 1 MiB, and waits for nothing for long."""
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 2**20)
    monkeypatch.setattr(Link, "timeout", 30.0)


BY_GLOO = [
    "/pause", "grpo_begin_update", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "grpo_end_update", "/reset_prefix_cache", "/resume",
]  # fmt: skip
BY_DISK = [
    "/pause", "grpo_begin_update", "grpo_load", "/update_weight_version", "grpo_end_update",
    "/reset_prefix_cache", "/resume",
]  # fmt: skip


@pytest.mark.parametrize(("transfer", "calls"), [("gloo", BY_GLOO), ("disk", BY_DISK)])
def test_every_weight_arrives_on_every_worker_of_every_server(
    fakes: list[FakeVllm], tmp_path: Path, transfer: str, calls: list[str]
) -> None:
    links = linked(fakes, transfer, tmp_path)
    for seed, version in ((0, "run:0"), (1, "run:1")):  # and again, over the same links
        model = MixedTypes(seed)
        for fake in fakes:
            fake.calls.clear()
        assert send(links, Weights(model), version, "wait") == {}
        for fake in fakes:
            for held in fake.held:
                assert_bit_equal(held, model)
            assert fake.calls == calls
            assert (fake.version, fake.updating, fake.paused) == (version, False, False)
    assert [len(fake.held) for fake in fakes] == [1, 2]
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("transfer", "call"), [("gloo", "/finish_weight_update"), ("disk", "grpo_load")]
)
def test_failed_server(fakes: list[FakeVllm], tmp_path: Path, transfer: str, call: str) -> None:
    model = MixedTypes()
    links = linked(fakes, transfer, tmp_path)
    bad, good = fakes
    bad.faults[call] = bad.fail
    lost = send(links, Weights(model), "v", "wait")
    route = call.replace("grpo_", "/collective_rpc grpo_").split()[0]
    assert {url: str(error) for url, error in lost.items()} == {
        bad.url: f"server {bad.url}: {route} failed: answered 500: EngineCore encountered an issue."
    }
    assert_bit_equal(good.held[1], model)
    assert (good.version, good.paused) == ("v", False)


def test_failed_cache_reset(fakes: list[FakeVllm], tmp_path: Path) -> None:
    fakes[1].faults["/reset_prefix_cache"] = lambda: {"success": False}
    lost = send(linked(fakes, "disk", tmp_path), Weights(nn.Linear(2, 1)), "v", "wait")
    assert list(lost) == [fakes[1].url]
    assert "/reset_prefix_cache failed: it was not reset" in str(lost[fakes[1].url])


@pytest.mark.programs
def test_transfer_deadline(
    fakes: list[FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "timeout", 1.5)
    bad, good = fakes
    bad.faults["/update_weights"] = bad.hang
    model = nn.Linear(3, 2)
    lost = send(linked(fakes, "gloo", tmp_path), Weights(model), "v", "wait")
    assert list(lost) == [bad.url]
    why = r"(weight transfer failed: the connection broke|/update_weights failed: no answer)"
    assert re.match(f"server {bad.url}: {why}", str(lost[bad.url]))
    assert_bit_equal(good.held[0], model)


# Meeting.


def refused(fake: FakeVllm, transfer: str, folder: Path) -> str:
    server = Server(fake.url, key=fake.key)
    server.greet({})
    with pytest.raises(ServerLost) as error:
        connect(server, transfer, RUN, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "server", "workers", "gpu", "why"),
    [
        ("gloo", "nccl", 1, True, "it was started with transfer=nccl, and the run has gloo"),
        ("auto", "ipc", 1, False, "it was started with transfer=ipc, and the trainer has no GPU"),
        ("ipc", "ipc", 2, True, "ipc reaches the trainer's own GPU alone, and it has 2"),
    ],
)
def test_recipe_and_server_must_agree(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    server: str,
    workers: int,
    gpu: bool,
    why: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    fake = FakeVllm({}, transfer=server, workers=workers)
    with serving(fake):
        said = refused(fake, recipe, tmp_path)
        assert said.startswith(f"server {fake.url}: weight transfer failed: {why}")


@pytest.mark.parametrize(
    ("recipe", "server", "kind"),
    [
        ("auto", "gloo", "GlooLink"),
        ("disk", "nccl", "DiskLink"),  # any server can read a folder
    ],
)
def test_chosen_transfer(tmp_path: Path, recipe: str, server: str, kind: str) -> None:
    fake = FakeVllm({}, transfer=server)
    with serving(fake):
        (link,) = linked([fake], recipe, tmp_path)
        assert type(link).__name__ == kind
        link.close()


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda fake: lambda: {}, r"weight transfer failed: its workers did not come \("),
        (lambda fake: fake.fail, r"/init_weight_transfer_engine failed: answered 500: EngineCore"),
    ],
    ids=["answers and does not join", "500"],
)
def test_missing_workers(
    fakes: list[FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Any, why: str
) -> None:
    monkeypatch.setattr(weight_transfer, "RENDEZVOUS_SECONDS", 0.5)
    fakes[0].faults["/init_weight_transfer_engine"] = happens(fakes[0])
    said = refused(fakes[0], "gloo", tmp_path)
    assert re.match(f"server {fakes[0].url}: {why}", said)


def test_unreadable_folder(fakes: list[FakeVllm], tmp_path: Path) -> None:
    fakes[0].reads = False
    said = refused(fakes[0], "disk", tmp_path / "weights")
    assert f"cannot read {tmp_path}/weights, where transfer=disk writes the weights; give" in said


def test_folder_holds_the_newest_weights(fakes: list[FakeVllm], tmp_path: Path) -> None:
    left_over = tmp_path / "server-1" / "old.safetensors"
    left_over.parent.mkdir()
    left_over.write_bytes(b"")
    links = linked(fakes, "disk", tmp_path)
    large, small = MixedTypes(), nn.Linear(2, 1)
    for model, files in ((large, 5), (small, 1)):
        send(links, Weights(model), "v", "wait")
        names = [f"model-{i:05d}.safetensors" for i in range(files)]
        for number in (0, 1):
            folder = tmp_path / f"server-{number}"
            assert sorted(f.name for f in folder.iterdir()) == names
    for fake in fakes:
        assert_bit_equal({n: fake.held[0][n] for n, _ in small.named_parameters()}, small)
        assert len(fake.held[0]) == 2
    for link in links:
        link.close()
    assert list(tmp_path.iterdir()) == []


def test_deadline_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    over = threading.Event()
    monkeypatch.setattr(weight_transfer.os, "_exit", lambda code: [ended.append(code), over.set()])
    server = Server("http://node1:8000")
    with weight_transfer.deadline(0.01, server, "weight transfer"):
        over.wait(30)
    assert ended == [1]
    assert "node1:8000: weight transfer failed: not done within 0.01 s." in capsys.readouterr().out
