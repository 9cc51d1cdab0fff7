"""The page of a simulation: everything escaped, nothing remote, well formed."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.page import simulation_page
from lengthwise.report.simulation import COLUMNS, closing_sentences, result_rows, simulation_json
from lengthwise.simulator import RankMesh, Scenario, best_mesh, compare

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
BATCHES = [[60_000, *[2000] * 30, 1], [30_000, 7, *[5000] * 15]]
HOSTILE = '<img src=x onerror="alert(1)">&\'"'


@pytest.fixture(scope="module")
def found():
    sizes = {"devices": 12, "context_tokens": 60_000, "capacity_tokens": 8192, "takes_capacity": True}
    scenario = Scenario(shape=SHAPE, hardware=HARDWARE, kinds=("none",), only=RankMesh(), **sizes)
    return [best_mesh(planner, BATCHES, scenario) for planner in ("static", "lengthwise")]


@pytest.fixture(scope="module")
def compared():
    return compare(BATCHES, Scenario(shape=SHAPE, hardware=HARDWARE, devices=12, capacity_tokens=8192, kinds=("none",)))


@pytest.fixture(scope="module")
def detailed(compared, found):
    return replace(compared, planners=tuple(found))


def _page(comparison, **more):
    return simulation_page(comparison, **{"about": "about", "sentence": "one sentence", **more})


class _Balance(HTMLParser):
    """Collects tags; those that need closing must be closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "p", "td", "th", "tr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert tag in ("p", "td", "th", "tr") or self.open.pop() == tag


def _read(page):
    """Return the tags of a page and their attributes."""
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_page_loads_nothing_and_runs_nothing(detailed) -> None:
    page = _page(detailed)
    tags = _read(page)
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "img", "iframe", "object", "form", "a"})
    named = {name for _, attributes in tags for name in attributes}
    assert not any(name.startswith("on") or name in ("href", "src", "style", "xlink:href") for name in named)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    policy = next(a["content"] for tag, a in tags if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'"
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_page_escapes_what_comes_from_outside(detailed) -> None:
    named = {}
    for kind in ("rivals", "layouts", "planners"):
        rows = getattr(detailed, kind)
        founds = [each.found and replace(each.found, planner=HOSTILE) for each in rows]
        named[kind] = tuple(replace(a, planner=HOSTILE, found=b) for a, b in zip(rows, founds, strict=True))
    told = {"about": HOSTILE, "sentence": HOSTILE, "notes": [HOSTILE], "verdict": HOSTILE, "remarks": [HOSTILE]}
    page = _page(replace(detailed, **named), **told)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;&#x27;&quot;") >= 15
    _read(page)


def test_page_opens_with_the_sentence_and_step_times_as_bars(compared) -> None:
    """One bar for each way that fits, as long as its step; a way that does not fit says so."""
    page = _page(compared)
    bars = page[page.index("<table class=steps>") :]
    widths = [float(each) for each in re.findall(r'<rect class="(?:bar|ours)" width="([\d.]+)"', bars)]
    fitting = [row.found.mean_seconds for row in compared.rows if row.found]
    assert len(fitting) == 4
    assert widths == pytest.approx([100 * each / max(fitting) for each in fitting], abs=0.1)
    assert "does not fit: longest sequence 60,000, a GPU holds 8,192" in page


def test_rows_json_and_table_say_the_same(found, detailed) -> None:
    rows = result_rows([each.found for each in found])
    assert [row[0] for row in rows] == ["static", "lengthwise"]
    written = simulation_json(detailed, {"model": "llama-7b"})
    ratios = [written["planners"][name]["speedup_over_best_other"] for name in ("static", "lengthwise")]
    assert ratios[0] == pytest.approx(1 / ratios[1])
    for row, ratio in zip(rows, ratios, strict=True):
        assert row[COLUMNS.index("over best other")] in (f"{ratio:.2f}x", f"equal ({ratio:.2f}x)")
    assert written["planners"]["static"]["step_seconds"] == found[0].found.step_seconds
    unheld = replace(found[0], found=None, refusal=PlanError("sequence 3", expected="", got="9 tokens", remedy=""))
    assert list(simulation_json(replace(detailed, planners=(unheld, found[1])), {})["refused"]) == ["static"]


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ((4.0, 4.0), (4.0, 4.0), "no gain beyond the error"),
        ((4.0, 6.0), (4.0, 4.0), "no gain beyond the error"),  # one batch alone gains
        ((4.4, 4.4), (4.0, 4.0), "needs 9.1 % fewer GPU hours"),
        ((2.5, 2.5), (4.0, 4.0), "lengthwise does not help here: static needs 37.5 % fewer GPU hours"),
    ],
)
def test_closing_sentences_say_where_there_is_no_gain(found, theirs, ours, told: str) -> None:
    changed = []
    for best, seconds in zip(found, (theirs, ours), strict=True):
        took = zip(best.found.steps, seconds, strict=True)
        steps = tuple(replace(step, step_seconds=each, ideal_seconds=1.0) for step, each in took)
        changed.append(replace(best, found=replace(best.found, steps=steps)))
    said = closing_sentences(changed, "12 GPUs")
    assert told in said
    assert said.count("fewer GPU hours") == ("fewer" in told)
