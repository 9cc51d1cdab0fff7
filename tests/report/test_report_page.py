"""The page of a simulation: everything escaped, nothing remote, well formed."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.report.page import degrees_of, simulation_page
from lengthwise.report.simulation import (
    COLUMNS,
    closing_sentences,
    mfu_text,
    remarks,
    result_rows,
    simulation_json,
    simulation_table,
)
from lengthwise.simulator import Best, Found, RankMesh, Scenario, best_mesh, compare

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
    return compare(BATCHES, Scenario(shape=SHAPE, hardware=HARDWARE, devices=12, capacity_tokens=8192))


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
    named = {
        name: tuple(_named(each, HOSTILE) for each in getattr(detailed, name))
        for name in ("rivals", "layouts", "planners")
    }
    told = {"about": HOSTILE, "sentence": HOSTILE, "notes": [HOSTILE], "verdict": HOSTILE, "remarks": [HOSTILE]}
    page = _page(replace(detailed, **named), **told)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;&#x27;&quot;") >= 15
    _read(page)


def test_page_opens_with_the_sentence_and_step_times_as_bars(compared) -> None:
    """One bar for each way that fits, as long as its step; a way that does not fit says so."""
    page = _page(compared)
    assert page.index("<h1>one sentence</h1>") < page.index("<h2>Step times</h2>") < page.index("<h2>Lengths")
    bars = page[page.index("<table class=steps>") :]
    widths = [float(each) for each in re.findall(r'<rect class="(?:bar|ours)" width="([\d.]+)"', bars)]
    fitting = [row.found.mean_seconds for row in compared.rows if row.found]
    assert len(fitting) == 4
    assert widths == pytest.approx([100 * each / max(fitting) for each in fitting], abs=0.1)
    assert "does not fit: longest sequence 60,000, a GPU holds 8,192" in page


def test_page_shows_lengths_degrees_and_gpus_over_time(compared) -> None:
    page = _page(compared)
    tags = _read(page)
    assert len([a for tag, a in tags if tag == "rect" and a.get("class") == "bar" and "height" in a]) >= 16
    dots = {(int(x), int(y)) for x, y in re.findall(r"<title>(\d+) tokens? over (\d+) GPUs?</title>", page)}
    assert dots == set(degrees_of(compared.ours.found))
    spans = [a for tag, a in tags if tag == "rect" and a.get("class") in ("ring", "local")]
    assert spans
    assert all(64 <= float(a["x"]) <= 708.5 for a in spans)
    assert page.count("GPU 11<") == 2, "both ways draw the same devices"
    for several in ("1 sequences", "1 tokens", "1 GPUs"):
        assert not re.search(rf"(?<![\d.,]){several}", page)


def test_page_names_its_axes_and_explains_every_word(detailed) -> None:
    page = _page(detailed)
    axes = re.findall(r'<text class="[^"]*small"[^>]*>([^<]*)</text>', page)
    titles = ["tokens of a sequence", "share", "tokens of the sequence", "GPUs", "time since the step began"]
    assert set(titles) <= set(axes)
    words = " ".join(re.findall(r"<p class=key><b>([^<]*)</b>:", page))
    ways, columns = ("FSDP2", "padded", "packed", "one ring size"), ("zero3", "recompute MLP", "ratio", "memory", "MFU")
    for word in (*ways, *columns, "idle"):
        assert word in words
    assert "of ideal" not in _page(replace(detailed, planners=()))
    lengths = page[page.index("tokens and attention work by length") : page.index("Bars: share")]
    assert re.findall(r">(\d+ %)<", lengths) == [f"{ticks} %" for ticks in range(0, 81, 20)]
    borders = re.findall(r'<text class="(?:odd )?small"[^>]*middle">(\d+K?)<', lengths)
    assert borders == [
        *map(str, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        "1K",
        "2K",
        "4K",
        "8K",
        "16K",
        "32K",
        "60000",
    ]


def test_page_draws_the_share_of_attention_work_of_each_length(compared) -> None:
    page = _page(replace(compared, batches=[[1024] * 3, [2048]]))
    marks = [a for tag, a in _read(page) if tag == "line" and a.get("class") == "mark"]
    bars = [a for tag, a in _read(page) if tag == "rect" and a.get("class") == "bar" and "x" in a]
    heights = [240 - 36 - float(mark["y1"]) for mark in marks]
    assert heights[1] / heights[0] == pytest.approx(4 / 3, rel=0.01)  # 2048^2 over 3 x 1024^2
    assert float(bars[1]["height"]) / float(bars[0]["height"]) == pytest.approx(2 / 3, rel=0.01)


def test_each_planner_is_held_against_the_best_of_the_others(found) -> None:
    """Of three, which take 3, 1 and 2 times as long, the middle one against the last, both others against it."""
    first = found[0].found

    def taking(times: int) -> Found:
        return replace(
            first, steps=tuple(replace(step, step_seconds=times * step.step_seconds) for step in first.steps)
        )

    rows = result_rows([taking(3), taking(1), taking(2)])
    assert [row[COLUMNS.index("over best other")] for row in rows] == ["0.33x", "2.00x", "0.50x"]


def test_rows_json_and_table_say_the_same(found, detailed) -> None:
    rows = result_rows([each.found for each in found])
    assert [row[0] for row in rows] == ["static", "lengthwise"]
    written = simulation_json(detailed, {"model": "llama-7b"})
    ratios = [written["planners"][name]["speedup_over_best_other"] for name in ("static", "lengthwise")]
    assert ratios[0] == pytest.approx(1 / ratios[1])
    for row, ratio in zip(rows, ratios, strict=True):
        assert row[COLUMNS.index("over best other")] in (f"{ratio:.2f}x", f"equal ({ratio:.2f}x)")
    assert result_rows([found[0].found])[0][COLUMNS.index("over best other")] == "no other"
    assert written["planners"]["static"]["step_seconds"] == found[0].found.step_seconds
    table = simulation_table(found)
    assert table.rows[0] == ("planner", "static", "lengthwise")
    assert [row[0] for row in table.rows] == list(COLUMNS)


def test_remarks_name_full_devices_and_planners_without_a_mesh(found, compared) -> None:
    most = [each.found.most("memory_bytes") for each in found]
    assert remarks(found, device_bytes=max(most), names={}) == []
    (full,) = remarks(found, device_bytes=min(most) - 1, names={})
    assert "static, lengthwise" in full
    refusal = PlanError("sequence 3", expected="at most {room|all}", got="9 tokens", remedy="Raise {capacity_tokens}.")
    unheld = replace(found[0], found=None, refusal=refusal)
    (said,) = remarks([unheld, found[1]], device_bytes=max(most), names={"capacity_tokens": "--capacity"})
    assert said.startswith("static: no mesh holds these sequences (error[plan] sequence 3")
    assert "Raise --capacity." in said
    assert list(simulation_json(replace(compared, planners=(unheld, found[1])), {})["refused"]) == ["static"]


def test_recomputation_is_listed_with_its_batches(found, compared) -> None:
    ours = found[1].found
    setting = replace(ours.setting, capacities={"none": 8192, "layer": 8192})
    mixed = replace(ours, setting=setting, steps=(replace(ours.steps[0], recompute="layer"), ours.steps[1]))
    assert (mfu_text(0.75), mfu_text(0.76)) == ("75.0 %", "76.0 % (above what is known to be reached)")
    (row,) = result_rows([mixed])
    assert row[COLUMNS.index("recomputes")] == "layer (1 batch) and none (1 batch)"
    written = simulation_json(replace(compared, planners=(replace(found[1], found=mixed),)), {})
    assert written["planners"]["lengthwise"]["recompute"] == ["layer", "none"]


def _compared(found: list[Best], theirs: tuple[float, ...], ours: tuple[float, ...]) -> list[Best]:
    """Let static take these seconds on the batches, and lengthwise those."""
    return [replace(each, found=_found(each.found, took)) for each, took in zip(found, (theirs, ours), strict=True)]


def test_closing_sentences_say_what_is_saved_and_how_sure_that_is(found) -> None:
    said = closing_sentences(_compared(found, (4.0, 4.0), (2.5, 2.5)), "12 GPUs of h100")
    assert said == (
        "On 12 GPUs of h100 a step takes 2.50 s with lengthwise (one GPU a rank, rings of up to 12, 8,192 tokens a "
        "rank), 40.0 % of the ideal, and 4.00 s with static, the best other plan (one GPU "
        "a rank, rings of up to 12, 8,192 tokens a rank). The same training needs 37.5 % fewer GPU hours (1.60x; "
        "1.52x to 1.68x with an error of 5.0 % of the model and the spread of 2 batches). Simulated, not measured."
    )
    one = _compared(found, (4.0, 4.0), (2.5, 2.5))[:1]
    assert "a step takes 4.00 s with static" in closing_sentences(one, "1 GPU")
    options = {"one_mesh": True, "unit": "bytes", "not_compared": ["packed-dp", "bytescale"]}
    mesh = closing_sentences(_compared(found, (4.0, 4.0), (2.5, 2.5)), "12 GPUs", **options)
    assert "All planners used one mesh" in mesh
    assert "lengths in bytes, not tokens" in mesh
    assert "Not compared: packed-dp, bytescale; they may be better than static." in mesh


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ((4.0, 4.0), (4.0, 4.0), "no gain beyond the error"),
        ((4.1, 4.1), (4.0, 4.0), "That is 1.02x (0.97x to 1.08x"),
        ((4.0, 6.0), (4.0, 4.0), "no gain beyond the error"),  # one batch alone gains
        ((4.4, 4.4), (4.0, 4.0), "needs 9.1 % fewer GPU hours"),
        ((2.5, 2.5), (4.0, 4.0), "lengthwise does not help here: static needs 37.5 % fewer GPU hours"),
    ],
)
def test_closing_sentences_say_where_there_is_no_gain(found, theirs, ours, told: str) -> None:
    said = closing_sentences(_compared(found, theirs, ours), "12 GPUs")
    assert told in said
    assert said.count("fewer GPU hours") == ("fewer" in told)


def _found(found: Found, took: tuple[float, ...], **changes) -> Found:
    """Let batch i take `took[i]` seconds, a second of it the ideal."""
    steps = tuple(
        replace(step, step_seconds=seconds, ideal_seconds=1.0) for step, seconds in zip(found.steps, took, strict=True)
    )
    return replace(found, steps=steps, **changes)


def _named(best: Best, planner: str) -> Best:
    """Return it with another name of the planner."""
    found = best.found and replace(best.found, planner=planner)
    return replace(best, planner=planner, found=found)
