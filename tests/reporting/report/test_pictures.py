"""Images become small pictures, each once, within a budget."""

from grpo_cli.reporting.report.pictures import Pictures
from tests.test_images import RED, encoded


def test_each_image_is_held_once() -> None:
    pictures = Pictures(10_000)
    cells = [{"bytes": encoded(RED)}, {"bytes": encoded(RED.resize((6, 4)))}]
    assert [pictures.add(cell) for cell in [*cells, cells[0]]] == [0, 1, 0]
    assert len(pictures.urls) == 2
    assert pictures.sizes == [RED.size, (6, 4)]
    assert all(url.startswith("data:image/webp;base64,") for url in pictures.urls)


def test_what_is_no_picture_and_what_has_no_room() -> None:
    assert Pictures(10_000).add({"bytes": b"broken"}) == -2
    assert Pictures(10_000).add(None) == -2
    pictures = Pictures(0)
    assert pictures.add({"bytes": encoded(RED)}) == -1
    assert pictures.left_out == 1
