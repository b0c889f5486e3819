"""The page: what is in it, how large it is, and that it works in a browser, opened from disk, without a request."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tracing.browser import Page, chromium
from tests.tracing.tables import call, copy, kernel, ms, recording
from xferlib.tracing.events import Recording
from xferlib.tracing.page import page, write
from xferlib.tracing.picture import COLORS
from xferlib.tracing.rows import MOST_LEVELS

KINDS = ("kernel", "h2d", "d2h", "gap", "wait")


def loop() -> Recording:
    """Steps of 30 ms, with compute of 10 ms, pageable copies of 8 ms, and a wait."""
    events = []
    for start in range(0, 600, 30):
        events += [
            copy(start, start + 8, memory="pageable", site="train.py:12", nbytes=80 << 20),
            kernel(start + 8, start + 18, name="void gemm<float, 128>(float const*, float*)"),
            copy(start + 10, start + 12, kind="d2h", stream=3, site="train.py:14"),
            call("wait", start + 9, start + 18.5, site="train.py:15", name="cudaStreamSynchronize"),
            call("put", start + 19, start + 21, site="train.py:11", name="put (host)"),
        ]
    return recording(*events, notes=("a note: <b>not bold</b> </script>",))


def large() -> Recording:
    """More events than a page can show."""
    kernels = [kernel(at / 100, at / 100 + 0.006, name=f"kernel_{at % 50}") for at in range(60_000)]
    return recording(*kernels, *(copy(at, at + 0.5) for at in range(600)))


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    told: dict[str, Any] = json.loads(found)
    return told


def marks(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    strings = told["strings"]
    for row in told["rows"]:
        for lane in row["lanes"]:
            start = 0
            for i, step in enumerate(lane["s"]):
                start += step
                end = start + lane["d"][i]
                yield {
                    "row": row["name"],
                    "start": start,
                    "end": end,
                    "kind": strings[lane["k"][i]],
                    "name": strings[lane["n"][i]],
                    "site": strings[lane["p"][i]],
                    "nbytes": lane["b"][i],
                    "events": lane["c"][i],
                }
                start = end


def test_the_data_has_every_event_at_its_time() -> None:
    table = loop()
    found = list(marks(data_of(page(table))))
    assert sorted((mark["start"], mark["end"], mark["kind"]) for mark in found if mark["kind"] != "gap") == sorted(
        (event.start, event.end, event.kind) for event in table.events
    )
    assert {mark["site"] for mark in found if mark["kind"] == "h2d"} == {"train.py:12"}
    assert {mark["row"] for mark in found if mark["kind"] == "wait"} == {"MainThread"}


def test_the_tables_have_findings_and_where() -> None:
    told = data_of(page(loop()))
    assert [(gap["site"], gap["finding"]) for gap in told["gaps"]] == [("train.py:15", True), ("train.py:12", True)]
    assert [(row["copies"], row["site"]) for row in told["pageable"]] == [(20, "train.py:12")]
    (device,) = told["devices"]
    assert [link["copies"] for link in device["links"]] == [20, 20]


def test_nothing_of_the_data_ends_its_element() -> None:
    text = page(loop())
    assert text.count("</script>") == 2
    assert data_of(text)["notes"] == ["a note: <b>not bold</b> </script>"]


def test_the_page_names_no_address() -> None:
    text = page(recording(kernel(0, 1)))
    assert not re.search(r"https?://|//[a-z]|@import|url\(", re.sub(r"^// .*$", "", text, flags=re.MULTILINE).replace("// ", ""))
    assert "default-src 'none'" in text


def test_what_differs_in_the_legend_differs_in_color_and_a_picture_has_the_colors_of_the_page() -> None:
    text = page(loop())
    names = dict(re.findall(r'(\w+): \["[^"]+", "(\w+)"\]', next(line for line in text.splitlines() if "const KINDS" in line)))
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in text.split("</style>")[0].split("prefers-color-scheme"))
    assert names.keys() == COLORS.keys()
    assert {kind: light[name] for kind, name in names.items()} == COLORS
    used = set(names.values())
    assert len({light[name] for name in used}) == len({dark[name] for name in used}) == len(used)
    assert names["gap"] not in (names["wait"], names["source"])


def test_a_large_trace_is_thinned_out_and_says_so(tmp_path: Path) -> None:
    write(large(), tmp_path / "large.html", most_nbytes=400_000)
    text = (tmp_path / "large.html").read_text()
    told = data_of(text)
    found = list(marks(told))
    assert "Thinned out: 60600 events are drawn as" in told["notes"][0]
    # Nothing is lost: what is not drawn by itself is in a mark that says how many.
    assert sum(mark["events"] for mark in found if mark["kind"] == "kernel") == 60_000
    assert sum(mark["nbytes"] for mark in found if mark["kind"] == "h2d") == 600 << 20
    assert told["devices"][0]["kernels"] == 60_000


def test_a_page_has_at_most_two_megabytes(tmp_path: Path) -> None:
    write(recording(*(kernel(at / 100, at / 100 + 0.006, name=f"kernel_{at}") for at in range(50_000))), tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size <= 2_000_000


def test_a_page_keeps_the_size_that_is_asked_for(tmp_path: Path) -> None:
    write(large(), tmp_path / "small.html", most_nbytes=40_000)
    assert (tmp_path / "small.html").stat().st_size <= 40_000
    found = list(marks(data_of((tmp_path / "small.html").read_text())))
    # By now copies are drawn as one, too.
    copies = [mark for mark in found if mark["kind"] == "h2d"]
    assert len(copies) < 600
    assert sum(mark["events"] for mark in found if mark["kind"] == "kernel") == 60_000
    assert sum(mark["nbytes"] for mark in copies) == 600 << 20


def test_no_text_of_all_events_is_made_where_they_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[int] = []

    def dumps(*values: Any, **options: Any) -> str:
        text = json_dumps(*values, **options)
        texts.append(len(text))
        return text

    json_dumps = json.dumps
    monkeypatch.setattr("xferlib.tracing.page.json.dumps", dumps)
    write(large(), tmp_path / "small.html", most_nbytes=60_000)
    assert max(texts) < 200_000
    assert len(texts) <= 3


@pytest.mark.parametrize("runs", [True, False])
def test_the_collector_waits_while_a_page_is_made(runs: bool) -> None:
    came: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        came.append(phase)

    table, before = large(), gc.isenabled()
    gc.collect()
    gc.callbacks.append(note)
    try:
        (gc.enable if runs else gc.disable)()
        page(table)
        assert gc.isenabled() is runs
    finally:
        gc.callbacks.remove(note)
        (gc.enable if before else gc.disable)()
    # What it has put off comes at once, with a start and a stop for each; without a wait there are hundreds.
    assert len(came) < 20


def test_events_that_overlap_in_a_row_are_in_lanes() -> None:
    told = data_of(page(recording(call("put", 0, 10), call("issue", 1, 3), call("issue", 4, 6), call("wait", 4, 5), kernel(0, 1))))
    (host,) = [row for row in told["rows"] if row["group"] == "host"]
    assert [[told["strings"][kind] for kind in lane["k"]] for lane in host["lanes"]] == [["put"], ["issue", "issue"], ["wait"]]


def test_more_that_overlap_than_there_are_lanes_are_one_mark_with_all_their_bytes() -> None:
    found = list(marks(data_of(page(recording(*(copy(at, 100 + at, nbytes=1 << 20) for at in range(MOST_LEVELS + 2)))))))
    assert [mark["events"] for mark in found] == [1] * (MOST_LEVELS - 1) + [3]
    assert found[-1]["nbytes"] == 3 << 20


def test_a_doubt_stands_beneath_the_verdict() -> None:
    short = recording(kernel(0, 10), copy(2, 6), kernel(20, 100), notes=("a note",))
    told = data_of(page(short))
    assert "doubts" not in told
    assert told["notes"] == ["in so short a time another run may say otherwise: take more steps", "a note"]
    long = recording(kernel(0, 10), *(copy(at, at + 1) for at in range(5)), kernel(20, 300))
    assert data_of(page(long))["notes"] == []


def test_a_page_of_nothing() -> None:
    told = data_of(page(Recording(events=(), start=0, end=ms(5))))
    assert told["verdict"] == "No copy and no kernel was recorded"
    assert told["rows"] == []


@pytest.fixture(scope="module")
def browsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    if chromium() is None:
        pytest.skip("there is no Chromium: the page was not opened")
    folder = tmp_path_factory.mktemp("page")
    write(loop(), folder / "run.html")
    with Page(folder / "run.html") as opened:
        yield opened, folder


def place(opened: Page, kind: str) -> tuple[float, float]:
    """Return where the middle of the first mark of a kind is, after the page has shown everything."""
    opened.key("Escape")
    opened.key("0")
    told = json.loads(opened.evaluate("document.getElementById('data').textContent"))
    for number, row in enumerate(told["rows"]):
        for level, lane in enumerate(row["lanes"]):
            for i, name in enumerate(lane["k"]):
                if told["strings"][name] == kind:
                    x, y = opened.evaluate(f"xferlibTrace.place({number}, {level}, {i})")
                    return x, y
    raise AssertionError(f"there is no {kind}")


def test_in_a_browser_it_says_no_error_and_asks_for_nothing(browsed: tuple[Page, Path]) -> None:
    opened, folder = browsed
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [(folder / "run.html").as_uri()]
    assert "pageable" in opened.evaluate("document.getElementById('findings').textContent")
    assert opened.evaluate("document.querySelectorAll('b').length") == 0


def test_in_a_browser_a_click_shows_what_an_event_is(browsed: tuple[Page, Path]) -> None:
    opened, _ = browsed
    opened.click(*place(opened, "h2d"))
    text = opened.evaluate("document.getElementById('tip').innerText")
    for part in ("80.0 MiB", "pageable", "train.py:12", "10.49 GB/s", "8.00 ms"):
        assert part in text
    assert opened.evaluate("xferlibTrace.kept()") == "80.0 MiB"
    opened.key("Escape")
    assert opened.evaluate("xferlibTrace.kept()") is None
    assert opened.errors == []


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_browser_every_kind_is_drawn_where_it_is(browsed: tuple[Page, Path], kind: str) -> None:
    opened, _ = browsed
    x, y = place(opened, kind)
    # By way of another canvas: to read the page's own would slow it down, and the console says so.
    look = (
        "(x, y) => { const one = new OffscreenCanvas(1, 1).getContext('2d'), c = document.getElementById('canvas');"
        "const box = c.getBoundingClientRect(), r = devicePixelRatio;"
        "one.drawImage(c, -Math.floor((x - box.left) * r), -Math.floor((y - box.top) * r));"
        "return String(one.getImageData(0, 0, 1, 1).data); }"
    )
    right, bottom = opened.evaluate("(b => [b.right, b.bottom])(document.getElementById('canvas').getBoundingClientRect())")
    opened.wait_for(f"({look})({x}, {y - 5}) !== ({look})({right - 3}, {bottom - 2})")


def test_in_a_browser_it_zooms_and_moves_by_mouse_and_keys(browsed: tuple[Page, Path]) -> None:
    opened, _ = browsed
    x, y = place(opened, "kernel")
    everything = opened.evaluate("xferlibTrace.range()")
    opened.wheel(x + 300, y, -200)
    opened.wait_for(f"xferlibTrace.range()[1] - xferlibTrace.range()[0] < {everything[1] - everything[0]} * .8")
    before = opened.evaluate("xferlibTrace.range()")
    opened.drag(x + 300, y, -100)
    after = opened.evaluate("xferlibTrace.range()")
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    opened.key("+")
    closer = opened.evaluate("xferlibTrace.range()")
    assert closer[1] - closer[0] < after[1] - after[0]
    opened.key("ArrowRight")
    assert opened.evaluate("xferlibTrace.range()")[0] > closer[0]
    opened.key("0")
    assert opened.evaluate("xferlibTrace.range()") == everything
    assert opened.errors == []


def test_in_a_browser_a_finding_leads_to_its_longest_piece(browsed: tuple[Page, Path]) -> None:
    opened, _ = browsed
    opened.key("0")
    opened.evaluate("document.querySelector('#findings button').click()")
    start, end = opened.evaluate("xferlibTrace.range()")
    assert end - start < ms(60)
    assert opened.errors == []


def test_in_a_browser_it_follows_the_colors_of_the_system(browsed: tuple[Page, Path]) -> None:
    opened, _ = browsed
    light = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.send("Emulation.setEmulatedMedia", features=[])
    assert (light, dark) == ("rgb(251, 251, 250)", "rgb(20, 22, 26)")


def test_a_large_page_opens_in_a_browser(browsed: tuple[Page, Path]) -> None:
    opened, folder = browsed
    write(large(), folder / "large.html", most_nbytes=400_000)
    opened.open(folder / "large.html")
    opened.wait_for("document.getElementById('notes').textContent.includes('Thinned out')")
    assert opened.errors == []
