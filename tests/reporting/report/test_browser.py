"""The report in Chromium, at two widths: its tabs, filters and switches, as a person uses them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_cli.data.stored_completions import completion_row, write_parquet
from grpo_cli.reporting.report import page as report_page
from grpo_cli.reporting.run_folder import RunFolder
from tests.browser import Browser, Page
from tests.conftest import make_group
from tests.episodes import make_episode
from tests.pictures import image_groups, write_groups
from tests.report_runs import HOSTILE, completion, write_run

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("chromium")]

TABS = ("overview", "curves", "time", "rewards", "completions", "recipe")
WIDTHS = (400, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.start() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


def written(*runs: Path) -> Path:
    path = runs[0] / "report.html"
    data = [report_page.read(RunFolder.open(run)) for run in runs]
    compared = {"recipe": [], "why": "not evaluated"} if len(runs) > 1 else None
    report_page.write(data, path, compared)
    return path


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return written(write_run(folder / "one", steps=90, stored=(1, 90), rows=30))


def ends_well(page: Page) -> None:
    """Checks that nothing was logged or asked of a network, and that nothing is too wide."""
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def open_completions(page: Page) -> None:
    page.click("#tab-completions")
    page.wait("document.querySelector('[data-ready]')")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_tab(browser: Browser, one: Path, width: int) -> None:
    page = browser.open(one, width)
    charts = {"overview": 6, "curves": 12, "time": 3, "rewards": 5}
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert (
            page.evaluate("document.querySelectorAll('[role=tabpanel]:not([hidden])').length") == 1
        )
        assert page.evaluate("location.hash") == f"#{tab}"
        if tab == "completions":
            page.wait("document.querySelector('[data-ready]')")
        if tab in charts:
            drawn = f"document.querySelectorAll('#panel-{tab} canvas').length"
            page.wait(f"{drawn} >= {charts[tab]}")
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), tab
    ends_well(page)


def test_curves_are_chosen(browser: Browser, one: Path) -> None:
    page = browser.open(one)
    page.click("#tab-curves")
    shown = "[...document.querySelectorAll('#panel-curves figure')].map(f => f.dataset.metric)"
    assert "num_tokens" not in page.evaluate(shown)
    page.type("#metric-search", "num_to")
    visible = "[...document.querySelectorAll('.chip[data-name]')].filter(c => !c.hidden).length"
    assert page.evaluate(visible) == 1
    page.click('.chip[data-name="num_tokens"]')
    assert "num_tokens" in page.evaluate(shown)
    ends_well(page)


def test_an_accuracy_that_stays_has_no_difference(browser: Browser, folder: Path) -> None:
    run = write_run(folder / "third", stored=())
    for name in ("summary.json", "metrics.jsonl"):  # a third, which the curves round to 0.33333
        text = (run / name).read_text(encoding="utf-8")
        text = re.sub(r'("(eval/)?accuracy": )[\d.]+', rf"\g<1>{1 / 3}", text)
        (run / name).write_text(text, encoding="utf-8")
    page = browser.open(written(run))
    assert page.text(".big").count("33.3") == 2
    assert page.text(".delta") == "0 points"
    ends_well(page)


FILTERS = {  # of 60 + 60 completions of 30 rows: by `report_runs.completion`
    "all": 120,
    "truncated": 24,
    "failed": 12,
}


def test_filters_of_completions(browser: Browser, one: Path) -> None:
    page = browser.open(one)
    open_completions(page)
    for name, number in FILTERS.items():
        page.click(f'[data-filter="{name}"]')
        assert page.text("#found") == f"{number} of 120 completions"
        assert page.text(f'[data-filter="{name}"] .count') == str(number)
    page.click('[data-filter="all"]')
    page.type("#row", "7")
    assert page.text("#found") == "4 of 120 completions"
    assert "row 7" in page.text(".detail h3")
    page.type("#row", "")
    page.type("#search", "QUESTION 12?")
    page.wait("document.querySelector('#found').innerText.startsWith('4 of')")
    page.type("#search", "nothing has this")
    page.wait("document.querySelector('#found').innerText.startsWith('0 of')")
    assert "No completion matches" in page.text(".list")
    ends_well(page)


def test_tokens_have_colours(browser: Browser, one: Path) -> None:
    page = browser.open(one)
    open_completions(page)
    coloured = "[...document.querySelectorAll('.token')].filter(t => t.style.background).length"
    tokens = page.evaluate("document.querySelectorAll('.token').length")
    assert tokens > 10
    assert 0 < page.evaluate(coloured) <= tokens
    assert re.match(r'".": log-prob', page.evaluate("document.querySelector('.token').title"))
    page.click('#panel-completions [data-key="advantage"]')
    assert page.evaluate(coloured) == tokens
    page.click('#panel-completions [data-key="none"]')
    assert page.evaluate("document.querySelectorAll('.token').length") == 0


def test_a_hostile_model(browser: Browser, folder: Path) -> None:
    run = write_run(folder / "hostile", stored=())
    rows = [completion(1, 0, i, 10, HOSTILE) | {"prompt": HOSTILE} for i in range(2)]
    write_parquet(run / "completions" / "step-1.parquet", rows)
    page = browser.open(written(run))
    open_completions(page)
    for colours in ("none", "logprob"):
        page.click(f'#panel-completions [data-key="{colours}"]')
        assert HOSTILE in page.text(".detail").replace("\n", "")
    assert page.evaluate("window.hacked === undefined")
    assert page.evaluate("document.querySelectorAll('#app script, #app img').length") == 0
    ends_well(page)


def test_episodes_and_images(browser: Browser, folder: Path) -> None:
    run = write_run(folder / "episodes", stored=())
    write_groups(run / "completions" / "step-1.parquet", image_groups())
    episode = make_episode((0.5, None))
    rows = [completion_row(2, make_group(9, [episode]), 0)]
    write_parquet(run / "completions" / "step-2.parquet", rows)
    page = browser.open(written(run))
    open_completions(page)
    loaded = "[...document.querySelectorAll('.detail img')].map(i => i.naturalWidth)"
    page.wait(f"{loaded}[0] > 0")
    page.type("#panel-completions select", "2", event="change")
    text = page.text(".conversation")
    for said in ("assistant, turn 1", "reward 0.5", "tool multiply", "42", "assistant, turn 2"):
        assert said in text
    page.click('#panel-completions [data-key="none"]')
    assert "multiply(a=6, b=7)" in page.text(".conversation")
    ends_well(page)


def test_two_runs(browser: Browser, folder: Path) -> None:
    runs = [write_run(folder / name, steps=20) for name in ("run-a", "run-b")]
    page = browser.open(written(*runs))
    page.click("#tab-compare")
    text = page.text("#panel-compare")
    for said in ("Side by side", "run-a", "run-b", "not evaluated", "80.0\u00a0%"):
        assert said in text
    for tab in TABS:
        page.click(f"#tab-{tab}")
    open_completions(page)
    page.click('#panel-completions [aria-label="Run"] [data-key="1"]')
    page.wait("document.querySelector('.detail h3')")
    ends_well(page)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_run_that_has_stored_little(browser: Browser, folder: Path, kept: int) -> None:
    run = write_run(folder / f"little-{kept}", steps=max(1, kept), stored=())
    for name in ("summary.json", "plan.json", "alarms.jsonl", "command.txt"):
        (run / name).unlink()
    if not kept:
        (run / "metrics.jsonl").unlink()
    page = browser.open(written(run))
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert page.text(f"#panel-{tab}")
    page.wait("document.querySelector('[data-ready]')")
    assert "not recorded" in page.text("#panel-overview") + page.text("#panel-time").lower()
    ends_well(page)
