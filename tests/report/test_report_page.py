"""The page of a simulation: everything escaped, nothing remote, well formed."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.report.page import simulation_page
from lengthwise.report.simulation import (
    COLUMNS,
    closing_sentence,
    most_memory_bytes,
    remarks,
    result_rows,
    simulation_json,
    simulation_table,
)
from lengthwise.simulator import Setting, compare_planners

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
BATCHES = [[60_000, *[2000] * 90, 1], [30_000, 7, *[5000] * 40]]
HOSTILE = '<img src=x onerror="alert(1)">&\'"'


@pytest.fixture(scope="module")
def results():
    setting = Setting(
        shape=SHAPE,
        hardware=HARDWARE,
        cost=all_terms_cost(SHAPE, HARDWARE),
        cluster=Cluster(ranks=12, capacity_tokens=8192),
        context_tokens=60_000,
    )
    return compare_planners(["static", "lengthwise"], BATCHES, setting, progress=lambda *_: None)


class _Balance(HTMLParser):
    """Collects tags; those that need closing must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "p", "td", "th", "tr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in ("p", "td", "th", "tr"):
            assert self.open.pop() == tag


def _read(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_page_loads_nothing_and_runs_nothing(results) -> None:
    page = simulation_page(results, BATCHES, about="about", sentence="one sentence")
    tags = _read(page).seen
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


def test_page_escapes_what_comes_from_outside(results) -> None:
    hostile = [
        replace(
            each, planner=HOSTILE, first_plan=replace(each.first_plan, notes={**each.first_plan.notes, "cost": HOSTILE})
        )
        for each in results
    ]
    page = simulation_page(hostile, BATCHES, about=HOSTILE, sentence=HOSTILE)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;&#x27;&quot;") >= 8
    _read(page)


def test_page_shows_lengths_degrees_ranks_and_the_table(results) -> None:
    page = simulation_page(results, BATCHES, about="about", sentence="one sentence")
    tags = _read(page).seen
    bars = [a for tag, a in tags if tag == "rect" and a.get("class") == "bar"]
    assert len(bars) == 16  # from 1 to 32K by powers of two
    dots = set(re.findall(r"<title>(\d+) tokens? over (\d+) ranks?</title>", page))
    plan = results[-1].first_plan
    drawn = {(str(plan.tokens[i]), str(p.degree)) for m in plan.microbatches for p in m.pieces for i in p.sequences}
    assert dots == drawn
    spans = [a for tag, a in tags if tag == "rect" and a.get("class") in ("ring", "local")]
    assert spans
    assert all(64 <= float(a["x"]) <= 708.5 for a in spans)
    for column in COLUMNS:
        assert f"<th>{column}</th>" in page
    assert "rank 11" in page
    for several in ("1 sequences", "1 tokens", "1 ranks", "1 packs"):
        assert not re.search(rf"(?<![\d.,]){several}", page)


def test_page_of_pipelines_cuts_no_label(results) -> None:
    staged = replace(results[1].first, stages=4)
    page = simulation_page([replace(results[1], first=staged)], BATCHES, about="about", sentence="one sentence")
    beside = [text for text in re.findall(r'text-anchor="end">([^<]*)<', page) if text.startswith("rank")]
    assert len(beside) == 12
    assert max(map(len, beside)) <= len("rank 262143")  # what fits between the edge and the first span
    assert "12 of 12 ranks, stage 0 of 4, the first batch" in page


def test_rows_json_and_table_say_the_same(results) -> None:
    rows = result_rows(results)
    assert [row[0] for row in rows] == ["static", "lengthwise"]
    assert rows[0][COLUMNS.index("speed-up")] == "1.00x"
    written = simulation_json(results, {"model": "llama-7b"})
    ratio = written["planners"]["lengthwise"]["speedup_over_first"]
    assert rows[1][COLUMNS.index("speed-up")] == f"{ratio:.2f}x"
    assert written["planners"]["static"]["step_seconds"] == [step.step_seconds for step in results[0].steps]
    table = simulation_table(results, title="one step")
    assert table.rows[0] == ("planner", "static", "lengthwise")
    assert [row[0] for row in table.rows] == list(COLUMNS)


def test_remarks_name_full_devices_and_what_was_chosen(results) -> None:
    most = [most_memory_bytes(each) for each in results]
    assert remarks(results, device_bytes=max(most), chose_recompute=False) == []
    (full,) = remarks(results, device_bytes=min(most) - 1, chose_recompute=False)
    assert "static, lengthwise" in full
    mixed = replace(results[1], steps=(replace(results[1].steps[0], recompute="layer"), results[1].steps[1]))
    (chosen,) = remarks([results[0], mixed], device_bytes=max(most), chose_recompute=True)
    assert chosen == "recomputation chosen: static none, lengthwise layer (1 batch) and none (1 batch)"
    assert simulation_json([mixed], {})["planners"]["lengthwise"]["recompute"] == ["layer", "none"]
    page = simulation_page(results, BATCHES, about="about", sentence="one sentence", remarks=[HOSTILE, chosen])
    assert chosen in page
    assert HOSTILE not in page


def test_closing_sentence_says_what_is_saved(results) -> None:
    static, ours = (_taking(each, took) for each, took in zip(results, (4.0, 2.5), strict=True))
    sentence = closing_sentence([static, ours], "12 GPUs, one a rank,")
    assert sentence == (
        "On 12 GPUs, one a rank, a step takes 4.00 s with static, 25.0 % of the ideal, and 2.50 s with lengthwise. On "
        "this mesh, the only one compared, the same training needs 37.5 % fewer GPU hours (simulated, not measured)."
    )
    assert "needs 60.0 % more GPU hours" in closing_sentence([ours, static], "12 GPUs")
    assert "needs as many GPU hours" in closing_sentence([static, static], "12 GPUs")
    assert closing_sentence([static], "1 GPU").startswith("On 1 GPU a step takes 4.00 s with static, 25.0 % of the")


@pytest.mark.parametrize(("again", "saved"), [(2.0, "at least 20.0 %"), (8.0, "at least 37.5 %")])
def test_closing_sentence_claims_the_smaller_saving(results, again: float, saved: str) -> None:
    """Of 4 to 2.5 s as told, and of `again` to 1.6 s where both choose heads and recomputation."""
    static, ours = (_taking(each, took) for each, took in zip(results, (4.0, 2.5), strict=True))
    chosen = [_taking(static, again), _taking(ours, 1.6)]
    sentence = closing_sentence([static, ours], "12 GPUs", chosen=chosen)
    assert f"needs {saved} fewer GPU hours" in sentence
    assert f"chosen for both, {again:.2f} s and 1.60 s (first batch)" in sentence
    assert simulation_json([static, ours], {}, chosen)["chosen_seconds"] == {"static": again, "lengthwise": 1.6}


def _taking(result, step_seconds: float):
    """Let each step take so long, a second of it the ideal."""
    steps = tuple(replace(step, step_seconds=step_seconds, ideal_seconds=1.0) for step in result.steps)
    return replace(result, steps=steps)


def test_page_explains_its_words_and_the_chart_of_lengths_has_an_axis(results) -> None:
    page = simulation_page(results, BATCHES, about="about", sentence="one sentence")
    for word in ("Static", "Pack", "Ring", "Exposed", "Of ideal"):
        assert f"<p class=key>{word}: " in page
    lengths = page[page.index("tokens by length") : page.index("Share of tokens")]
    assert re.findall(r">(\d+ %)<", lengths) == ["0 %", "10 %", "20 %", "30 %", "40 %", "50 %"]
