"""The page of timelines: what it holds, and what a real browser shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from mimo.schedule import Action, ActionKind, Bar, Costs, Link, Timeline, Transfer, simulate, write_page
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward, generate
from mimo.topology import Grid, Module, ModuleGraph

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
CANVAS_BARS = 6001
NASTY = "</script><img src=x onerror=alert(1)><!--{{data}}"


def _step(name: str, *, ranks: int, microbatches: int, modules: tuple[str, ...] = ("vision", "language")) -> Timeline:
    """Return a step in which every rank does forward, input and weight gradient of each microbatch, rank after rank."""
    kinds: tuple[ActionKind, ...] = ("forward", "input-gradient", "weight-gradient")
    bars = [
        Bar(
            ranks=(rank,),
            action=Action(kind=kind, module=modules[rank % len(modules)], stage=rank, microbatches=(microbatch,)),
            start=rank + 3 * microbatch + at,
            finish=rank + 3 * microbatch + at + 1,
            waited=0 if microbatch or at else rank,
            cause="" if microbatch or at or not rank else "warm-up",
        )
        for rank in range(ranks)
        for microbatch in range(microbatches)
        for at, kind in enumerate(kinds)
    ]
    message = Action(kind="send", module=modules[0], stage=0, microbatches=(0,), edge="a->b")
    return Timeline(
        name=name,
        ranks=tuple(range(ranks)),
        bars=tuple(bars),
        transfers=(Transfer(action=message, sources=(0,), targets=(1,), start=1, finish=2),),
        memory={
            rank: ((rank, {modules[rank % len(modules)]: 2**20}), (rank + 3 * microbatches, {}))
            for rank in range(ranks)
        },
    )


class _Page(HTMLParser):
    """Counts what a page shows: each timeline with its attributes and the bars drawn in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.timelines: list[Mapping[str, str | None]] = []
        self.bars: list[int] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "section":
            self.timelines.append(dict(attributes))
            self.bars.append(0)
        if tag == "rect" and ("class", "bar") in attributes:
            self.bars[-1] += 1


@pytest.fixture
def browser() -> str:
    """A browser that runs without a screen."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on PATH")
    return found


def _open(browser: str, path: Path) -> str:
    """Return what a page has become once its script has run."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--virtual-time-budget=2000")
    done = subprocess.run(  # noqa: S603 -- the browser that the fixture found
        [browser, *options, f"--user-data-dir={path.parent / 'browser'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 'data-drawn="true"' in done.stdout, done.stderr
    return done.stdout


def test_schedule_page_shows_every_bar_in_a_real_browser(browser: str, tmp_path: Path) -> None:
    """Two pages: of one step, and of two steps beside each other; each bar is one rect in its own timeline."""
    one = _step("simulated", ranks=4, microbatches=5)
    other = attrs.evolve(_step("measured", ranks=3, microbatches=7), memory={}, transfers=())
    counts = []
    for number, timelines in enumerate([(one,), (one, other)]):
        write_page(tmp_path / f"{number}.html", timelines, title="a step")
        page = _Page(_open(browser, tmp_path / f"{number}.html"))
        counts.append(page.bars)
        assert page.bars == [len(timeline.bars) for timeline in timelines]
        assert [found["data-bars"] for found in page.timelines] == [str(len(timeline.bars)) for timeline in timelines]
        assert [found["data-rows"] for found in page.timelines] == [str(len(timeline.ranks)) for timeline in timelines]
    assert counts == [[60], [60, 63]]


def test_schedule_page_draws_large_plans_on_a_canvas(browser: str, tmp_path: Path) -> None:
    """A rect for each of very many bars would make the page slow; all that is in sight is painted."""
    timeline = _step("simulated", ranks=7, microbatches=CANVAS_BARS // 21 + 1)
    assert len(timeline.bars) > CANVAS_BARS
    write_page(tmp_path / "large.html", [timeline])
    page = _Page(_open(browser, tmp_path / "large.html"))
    assert page.bars == [0]
    assert "canvas" in page.tags
    assert page.timelines[0]["data-painted"] == str(len(timeline.bars))


HOVER = """<script>
const [first] = document.querySelectorAll("rect.bar");
const box = first.getBoundingClientRect();
const at = (x) => ({ clientX: box.left + x, clientY: box.top + 5, bubbles: true, cancelable: true });
const told = (x) => {
  first.closest(".plot").dispatchEvent(new PointerEvent("pointermove", at(x)));
  return [...document.getElementById("tip").children].map((line) => line.textContent).join("; ");
};
document.documentElement.dataset.bar = told(1);
document.documentElement.dataset.wait = told(-5);
const nearer = () => new WheelEvent("wheel", { ...at(1), deltaY: -300 });
for (let turn = 0; turn < 20; turn += 1) first.closest(".plot").dispatchEvent(nearer());
document.getElementById("messages").click(); // draws at once, not in a next frame that may never come
</script>"""


def test_schedule_page_shows_what_lies_under_the_pointer_and_zooms_by_the_wheel(browser: str, tmp_path: Path) -> None:
    """Action, times, wait with its cause, and bytes; what is zoomed out of sight is not drawn."""
    timeline = attrs.evolve(_step("simulated", ranks=4, microbatches=5), ranks=(3,), transfers=())
    timeline = attrs.evolve(timeline, bars=tuple(bar for bar in timeline.bars if bar.ranks == (3,)))
    write_page(tmp_path / "page.html", [timeline])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{HOVER}</body>"), encoding="utf-8")
    opened = _open(browser, tmp_path / "page.html")
    assert (
        'data-bar="forward of language, stage 3; microbatch 0; starts at 3 s, takes 1 s; after 3 s of warm-up; '
        '1 MiB saved then (language 1 MiB); rank 3"'
    ) in opened
    assert 'data-wait="warm-up: 3 s; from 0 s to 3 s; rank 3"' in opened
    assert _Page(opened).bars == [1]


def test_schedule_page_takes_names_for_text_in_a_real_browser(browser: str, tmp_path: Path) -> None:
    """Whatever a module, a timeline or the page is called, it is shown, and never run."""
    timeline = _step(NASTY, ranks=2, microbatches=2, modules=(NASTY, "b & c"))
    write_page(tmp_path / "nasty.html", [timeline], title=NASTY)
    page = _Page(_open(browser, tmp_path / "nasty.html"))
    assert page.bars == [12]
    assert "img" not in page.tags


def test_schedule_page_holds_names_as_data_only(tmp_path: Path) -> None:
    """No name can end the script that holds the data, nor be taken for a part of the template."""
    path = tmp_path / "nasty.html"
    write_page(path, [_step(NASTY, ranks=2, microbatches=1, modules=(NASTY,))], title=NASTY)
    text = path.read_text(encoding="utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 2
    found = re.search(r'id="data">(.*?)</script>', text)
    assert found
    data = json.loads(found[1])
    assert (data["modules"], data["timelines"][0]["name"]) == ([NASTY], NASTY)


def test_schedule_page_loads_nothing(tmp_path: Path) -> None:
    """It can be mailed and kept: everything lies in the one file, and its policy forbids to fetch more."""
    write_page(tmp_path / "page.html", [_step("simulated", ranks=2, microbatches=1)])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"\b(src|href)=|@import|url\((?!#)|fetch\(", text)
    assert "default-src 'none'" in text


def test_schedule_page_shows_what_lies_behind_the_language_model(tmp_path: Path) -> None:
    """A module that it feeds has a row and a colour; messages go to it and back, and the wait for it is in its name."""
    grids = [Grid(name=name, ranks=[rank]) for rank, name in enumerate(("vision", "language", "drawer"))]
    graph = ModuleGraph(
        modules=tuple(Module(grid=grid, trains=(True,)) for grid in grids),
        arrows=(("vision", "language"), ("language", "drawer")),
    )
    bytes_of = {edge.name: 1 for edge in graph.edges}
    costs = attrs.evolve(Costs.even(graph), message_bytes=bytes_of, link=Link(latency=1))
    plan = generate(graph, 3, OneForwardOneBackward(), costs)
    write_page(tmp_path / "page.html", [simulate(plan, graph, costs).timeline])
    found = re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found
    data = json.loads(found[1])
    (timeline,) = data["timelines"]
    assert data["modules"] == ["vision", "language", "drawer"]
    kinds = ("forward", "backward")
    expected = [[kind, 2, 0, [microbatch]] for microbatch in range(3) for kind in kinds]
    assert [bar[:4] for bar in timeline["rows"][2]["bars"]] == [*expected, ["reduce", 2, 0, []]]
    sent = [one for one in timeline["transfers"] if one["edge"] == "language->drawer"]
    ways = sorted((*one["sources"], *one["targets"], *one["microbatches"]) for one in sent)
    assert ways == [(*way, microbatch) for way in ((1, 2), (2, 1)) for microbatch in range(3)]
    assert {one["finish"] - one["start"] for one in sent} == {1}
    assert timeline["rows"][1]["idle"]["drawer"] > 0


def test_schedule_page_of_nothing_is_a_page(tmp_path: Path) -> None:
    """A step in which nobody did anything has rows and no bars."""
    write_page(tmp_path / "page.html", [Timeline(name="idle", ranks=(0, 1), bars=())])
    assert '"name":"ranks 0-1"' in (tmp_path / "page.html").read_text(encoding="utf-8")
