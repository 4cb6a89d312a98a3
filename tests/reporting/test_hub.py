"""Pushes to a hub on this machine: while a run goes on, and whatever the hub does."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants

from grpo_cli.checkpoints import paths
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.reporting import hub
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.reporting.settings import Hub
from grpo_cli.training import resume
from tests.fake_hub import FakeHub
from tests.programs import until
from tests.training.test_train import recipe as written
from tests.training.test_train import trained, weights


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    # Read when huggingface_hub was imported.
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with fake.running():
        yield fake


def recipe(**settings: Any) -> Recipe:
    made = Recipe(recipe="test", hub=Hub(**settings))
    made.model.path = "Qwen/Qwen2.5-0.5B"
    return made


@pytest.fixture
def pusher(server: FakeHub, tmp_path: Path, lines: list[str]) -> Iterator[Callable[..., Pusher]]:
    """Makes the pusher of a run; `server` comes first."""
    made: list[Pusher] = []

    def make(**settings: Any) -> Pusher:
        made.append(Pusher(recipe(**{"repo": "me/x"} | settings), lines.append, True))
        return made[-1]

    yield make
    for one in made:
        one.close()


def checkpoint(folder: Path, step: int, shards: int = 1) -> Path:
    path = folder / "checkpoints" / f"step-{step}"
    (path / "training" / "shards").mkdir(parents=True)
    (path / "README.md").write_text(f"---\ntags: [grpo]\n---\n# step {step}\n")
    (path / "model.safetensors").write_bytes(bytes([step]) * 5000)
    (path / "config.json").write_text(f'{{"step": {step}}}')
    (path / "training" / "state.pt").write_bytes(bytes([step]) * 3000)
    for number in range(shards):
        (path / "training" / "shards" / f"__{number}_0.distcp").write_bytes(bytes([number]) * 2000)
    return path


def downloaded(server: FakeHub, folder: Path) -> Path:
    """The folder from which a run resumes, as `hf download me/x --local-dir` writes it."""
    for name, data in server.files["me/x"].items():
        (folder / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "got" / name).write_bytes(data)
    return folder / "got" / hub.LAST_CHECKPOINT


def test_the_start_creates_what_is_missing(server: FakeHub) -> None:
    assert hub.check(recipe(repo="x")) is None
    assert server.private == {"me/x": True}
    assert hub.check(recipe(repo="me/x")) is None
    assert hub.check(recipe()) is None


def test_a_token_that_may_not_write_is_told_at_the_start(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.check(recipe(repo="me/x"))
    server.may_write = False
    for repo in ("me/x", "me/y"):
        with pytest.raises(UserError, match=rf"hub.repo = {repo}: .*token.*\(403 You don't have"):
            hub.check(recipe(repo=repo))
    monkeypatch.setenv("HF_TOKEN", "hf_of_yesterday")
    with pytest.raises(UserError, match=r"hub.repo = me/x: .* \(401 Invalid\)") as told:
        hub.check(recipe(repo="me/x"))
    assert "hf_of_yesterday" not in str(told.value)
    assert "\n" not in str(told.value)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(UserError, match=r"hub.repo = me/x: there is no token; set HF_TOKEN"):
        hub.check(recipe(repo="me/x"))


def test_a_hub_that_is_not_there_is_a_note(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.is_broken = lambda path: True
    note = hub.check(recipe(repo="me/x"))
    assert note is not None
    assert "hub.repo = me/x: the hub cannot be reached now (500" in note
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "ConnectError" in (hub.check(recipe(repo="me/x")) or "")


@pytest.mark.programs
def test_every_save_is_pushed_over_the_one_before(
    pusher: Callable[..., Pusher], server: FakeHub, tmp_path: Path, lines: list[str]
) -> None:
    live = pusher(repo="x")
    live.push(checkpoint(tmp_path, 1), last=False)
    until(lambda: not live.in_use())
    live.push(checkpoint(tmp_path, 2), last=True)
    live.finish()
    assert lines == [f"pushed to {server.url}/x"]
    assert server.private == {"me/x": True}
    assert [message for _, message in server.commits] == ["step 1", "step 2"]
    assert {*server.files["me/x"]} == {
        ".gitattributes", "README.md", "config.json", "model.safetensors",
    }  # fmt: skip
    assert server.files["me/x"]["config.json"] == b'{"step": 2}'
    assert ModelCard(server.files["me/x"]["README.md"].decode()).data.tags == ["grpo"]


@pytest.mark.programs
def test_checkpoint_keeps_one_from_which_a_run_resumes(
    pusher: Callable[..., Pusher], server: FakeHub, tmp_path: Path
) -> None:
    live = pusher(strategy="checkpoint")
    live.push(checkpoint(tmp_path, 1, shards=3), last=False)
    until(lambda: not live.in_use())
    live.push(path := checkpoint(tmp_path, 2, shards=2), last=True)
    live.finish()
    kept = downloaded(server, tmp_path)
    whole = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    found = {p.relative_to(kept): p.read_bytes() for p in kept.rglob("*") if p.is_file()}
    assert found == whole, "the third shard is gone, too"
    assert "config.json" in server.files["me/x"]


@pytest.mark.programs
def test_a_failure_is_a_note_and_the_next_checkpoint_an_attempt(
    pusher: Callable[..., Pusher], server: FakeHub, tmp_path: Path, lines: list[str]
) -> None:
    live = pusher()
    server.is_broken = lambda path: "/commit/" in path
    live.push(checkpoint(tmp_path, 1), last=False)
    until(lambda: not live.in_use())
    (note,) = lines
    assert note.startswith("hub: step-1 could not be pushed (500 broken for the test); the run con")
    server.is_broken = lambda path: False
    live.push(checkpoint(tmp_path, 2), last=True)
    live.finish()
    assert lines[1:] == [f"pushed to {server.url}/me/x"]
    assert server.files["me/x"]["config.json"] == b'{"step": 2}'


@pytest.mark.programs
def test_a_slow_hub_gets_the_last_checkpoint_and_keeps_its_files(
    pusher: Callable[..., Pusher], server: FakeHub, tmp_path: Path
) -> None:
    live = pusher()
    server.slow = 1.0
    paths = [checkpoint(tmp_path, step) for step in (1, 2, 3)]
    live.push(paths[0], last=False)
    server.uploading.wait(60)
    live.push(paths[1], last=False)
    assert live.in_use() == {paths[0]}, "the one between is skipped"
    live.push(paths[2], last=True)
    assert live.in_use() == {paths[0], paths[2]}
    shutil.rmtree(paths[1])
    live.finish()
    assert [message for _, message in server.commits] == ["step 1", "step 3"]


@pytest.mark.programs
@pytest.mark.parametrize("how", ["late", "closed"])
def test_the_end_does_not_wait_for_ever(
    how: str, pusher: Callable[..., Pusher], server: FakeHub, tmp_path: Path, lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub, "WAIT_SECONDS", 1.0 if how == "late" else 600.0)
    live = pusher()
    server.slow = 30.0
    live.push(checkpoint(tmp_path, 1), last=True)
    server.uploading.wait(60)
    program, began = live._process, time.monotonic()
    if how == "closed":
        live.close()
    else:
        live.finish()
    assert time.monotonic() - began < 10
    assert program is not None
    assert program.wait(10) < 0, "the upload has ended, too"
    why = {"late": "not done in 1 s", "closed": "the run ends first"}
    assert len(lines) == 1
    assert lines[0].startswith(f"hub: step-1 is not pushed ({why[how]}")
    assert server.commits == []


@pytest.mark.runs
def test_a_run_is_resumed_from_the_hub(server: FakeHub, tmp_path: Path) -> None:
    live = trained(
        tmp_path, steps=2, checkpoint__keep_last=1, checkpoint__every=1, log__completions_every=1,
        hub__repo="me/x", hub__strategy="checkpoint",
    )  # fmt: skip
    assert paths.steps_saved(live.folder) == [2]
    path = downloaded(server, tmp_path)
    other, straight = tmp_path / "other", tmp_path / "straight"
    resumed = trained(other, resume=str(path))
    assert torch.equal(weights(resumed), weights(trained(straight)))
    card = ModelCard((path / "README.md").read_text(encoding="utf-8"))
    assert card.data.model_name == "me/x"


@pytest.mark.runs
def test_a_run_goes_on_whatever_the_hub_does(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Reporter, "say", lambda self, text: said.append(text))
    server.is_broken = lambda path: "/api/" in path
    broken = trained(tmp_path, hub__repo="me/x")
    assert (broken.folder / "summary.json").is_file()
    notes = [line for line in said if "hub" in line]
    assert notes[0].startswith("note: hub.repo = me/x: the hub cannot be reached now (500 broken")
    assert notes[-1].startswith("hub: step-4 is not pushed (500 broken for the test); by hand: hf ")
    server.is_broken = lambda path: False
    trained(tmp_path, hub__repo="me/x", steps=6, resume="auto")
    assert server.commits[-1] == ("me/x", "step 6")


@pytest.mark.runs
def test_a_sharded_checkpoint_gets_a_model_folder_for_the_hub(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MODEL_FOLDER_UP_TO", 0)
    trained(tmp_path, hub__repo="me/x", hub__strategy="end")
    assert "model.safetensors" in server.files["me/x"]
    saved = [paths.checkpoint_path(tmp_path / "run", step) for step in (2, 4)]
    assert [paths.is_model(path) for path in saved] == [False, True]


def test_a_secret_in_the_recipe_is_not_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "sk-judge")
    settings: dict[str, Any] = {"hub__repo": "a/b", "hub__strategy": "checkpoint"}
    with pytest.raises(UserError, match=r"reward.judge.args.api_key: is a secret written"):
        written(tmp_path, reward={"judge": {"args": {"api_key": "sk-judge-key"}}}, **settings)
    written(tmp_path, reward={"judge": {"args": {"api_key": "${oc.env:JUDGE}"}}}, **settings)
