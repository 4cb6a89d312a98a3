"""The page holds everything, and nothing of a run reaches it as markup."""

import base64
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_cli.data.stored_completions import write_parquet
from grpo_cli.reporting.report import page
from grpo_cli.reporting.report.completions import ReportLimits
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import HOSTILE, completion, write_run


def block(html: str, name: str) -> Any:
    found = re.search(rf'id="block-{name}">([^<]*)</script>', html)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def made(folder: Path) -> str:
    return page.html([page.read(RunFolder.open(folder), ReportLimits())])


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    html = made(write_run(tmp_path))
    without_licence = html.replace("https://github.com/leeoniya/uPlot", "")
    urls = set(re.findall(r"https?://[^\"' )]+", without_licence))
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html


def test_texts_of_a_model_are_no_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>name</b>", stored=())
    hostile = [completion(1, 0, i, 10, HOSTILE) for i in range(2)]
    write_parquet(folder / "completions" / "step-1.parquet", hostile)
    html = made(folder)
    assert HOSTILE not in html
    assert "<b>name" not in html
    assert html.count("</script>") == 3
    assert block(html, "completions-0")["completion"] == [HOSTILE] * 2


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    folder = write_run(tmp_path)
    command = "grpo train hub.token=hf_abcdef tracking.api_key=plain123\n"
    (folder / "command.txt").write_text(command)
    head = json.dumps(block(made(folder), "head"))
    assert "hf_abcdef" not in head
    assert "plain123" not in head
    assert "grpo train" in head


def test_a_report_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(page, "read", fails)
    said: list[str] = []
    page.Report(said.append).on_end(cast(Any, SimpleNamespace(rank=0, folder=tmp_path)))
    (line,) = said
    assert f"not written (MemoryError: no room); grpo report {tmp_path} writes" in line
