"""Every command in the documentation is one that its parser takes; run files load, Python runs, links lead somewhere.

Nothing is run but Python blocks. Whole commands stand in fenced blocks and in tables and are parsed whole; in running
text a command may be cut short, and only the words and options that it has are looked up.
"""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import lengthwise
import plots
from families import attention_cell
from lengthwise.cli import VERBS, read_command
from lengthwise.cli.options import PlanChoices
from lengthwise.cli.simulate_meshes import MeshChoices
from lengthwise.config import load_config
from lengthwise.core.plan import Plan
from lengthwise.core.trained import FAMILIES, family_refusal

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "\n    python benchmarks/" in path.read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OTHERS = ("pip", "python3", "source", ".", "git", "cd", "export", "axolotl")  # of other people, not looked at
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class ParsedError(Exception):
    """Stops a benchmark where its arguments have been parsed."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words_of(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def is_shallow() -> bool:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() != "false"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block."""
    for match in FENCE.finditer(text):
        yield match[1], textwrap.dedent(match[2])


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a page, and whether each stands there whole."""
    for language, block in blocks(text):
        if language in ("", "sh", "bash", "shell"):
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.split(r" && | \|\| | > \S+$", re.sub(r"(^|\s)#.*", "", line).rstrip()):
                    if command.strip():
                        yield command.strip(), True
    text = re.sub(r"`[^`]+`\s+at\s+commit [0-9a-f]{7}\b", "", text)  # an experiment of then, whose script is gone
    for line in FENCE.sub("", text).split("\n\n"):
        for code in re.findall(r"`([^`]+)`", line):
            words = " ".join(code.split())
            if re.match(r"(lengthwise |make |pytest |torchrun |python (benchmarks/|examples/|-m lengthwise ))", words):
                yield words, False


def refuse(command: str, *, whole: bool) -> None:
    """Raise if a command is not one that its parser takes."""
    words = shlex.split(command)
    while words and "=" in words[0]:  # of the environment
        words.pop(0)
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "lengthwise":
        refuse_verb(words[1:], whole=whole)
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert set(targets) <= TARGETS, f"no target {targets} in the Makefile"
    elif words[0] == "torchrun":
        run = importlib.import_module("torch.distributed.run")
        parsed = run.get_args_parser().parse_args(words[1:])
        if parsed.module:
            assert parsed.training_script == "lengthwise", command
            refuse_verb(parsed.training_script_args, whole=whole)
        else:
            assert (ROOT / parsed.training_script).exists(), command
    elif words[:2] == ["python", "-m"]:
        assert words[2] in ("pytest", "lengthwise"), command
        if words[2] == "lengthwise":
            refuse_verb(words[3:], whole=whole)
    elif words[0] == "pytest" or (words[0] == "python" and words[1].startswith("examples/")):
        assert (ROOT / words[1]).exists(), command
    elif words[0] == "python":
        parse_benchmark(ROOT / words[1], words[2:])
    else:
        assert words[0] in OTHERS, f"a command that no test knows: {command}"


def refuse_verb(words: list[str], *, whole: bool) -> None:
    if words in (["--version"], ["--help"]):
        return
    assert words[0] in VERBS, f"lengthwise has no verb {words[0]}"
    if whole:
        read_command(words)
        return
    options = {field.name for field in fields(VERBS[words[0]][0])}
    for group, choices in (("planning", PlanChoices), ("machine", MeshChoices)):
        options |= {field.name for field in fields(choices)} if group in options else set()
    for word in words[1:]:
        if word.startswith("--"):
            assert word[2:].partition("=")[0].replace("-", "_") in options, f"{words[0]} has no option {word}"


def parse_benchmark(script: Path, words: list[str]) -> argparse.ArgumentParser:
    """Parse arguments as a benchmark does; return its parser."""
    assert script in SCRIPTS, f"no such benchmark, or one that does not name its own command: {script}"
    parse = argparse.ArgumentParser.parse_args
    parsers = []

    def stop(self, *_: object) -> None:
        parsers.append(self)
        parse(self, words)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(ParsedError):
            importlib.import_module(script.stem).main()
    return parsers[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_docs_page_holds(page: Path, tmp_path: Path, monkeypatch) -> None:
    """Its commands are taken by their parsers, its blocks are what they say, its links and files are there."""
    monkeypatch.chdir(tmp_path)
    text, wrong = page.read_text(encoding="utf-8"), []
    for command, whole in commands(text):
        try:
            refuse(command, whole=whole)
        except (AssertionError, SystemExit) as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)
    assert not missing_links(page, text)
    assert not missing_files(text)
    for language, block in blocks(text):
        check_block(page, language, block)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_benchmarks_take_the_options_that_they_name(script: Path) -> None:
    parser = parse_benchmark(script, [])
    document = importlib.import_module(script.stem).__doc__ or ""
    (usage,) = re.findall(rf"^    python benchmarks/{script.name}\b(.*?)\n\n", document, re.MULTILINE | re.DOTALL)
    known = set(parser._option_string_actions)
    assert set(re.findall(r"--[a-z-]+", usage)) <= known, usage
    assert set(re.findall(r"--[a-z-]+", document)) <= known | {"--no-deps"}, document  # an option of pip


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_benchmarks_have_a_page_that_says_how_it_was_made(script: Path) -> None:
    if script.stem in ("families", "plots", "gpu_check"):  # pages elsewhere, pictures
        return
    page = (ROOT / "docs" / "benchmarks" / f"{script.stem}.md").read_text(encoding="utf-8")
    begin, end = (f"<!-- {script.stem}: {part} -->\n" for part in ("begin", "end"))
    assert page.count(begin) == page.count(end) == 1
    made = " ".join(page.partition(begin)[2].partition(end)[0].rpartition("\n\n")[2].split())
    how = r"(Modelled|Measured|Simulated|Emulated)\b.*"
    assert re.match(rf"{how} by `python benchmarks/{script.name}\b.*` on 20\d\d-\d\d-\d\d, commit", made), made


def test_commits_named_in_pages_are_in_the_history() -> None:
    if is_shallow():
        pytest.skip("no whole history here")
    history = subprocess.check_output(["git", "-C", str(ROOT), "log", "--format=%H"], text=True).split()
    named = {(page.name, each) for page in PAGES for each in re.findall(r"\bcommit ([0-9a-f]{7})\b", words_of(page))}
    assert named
    assert not sorted((page, each) for page, each in named if not any(one.startswith(each) for one in history))


def check_block(page: Path, language: str, block: str) -> None:
    if language == "yaml":
        for name in re.findall(r"path: ([\w./-]+)", block):
            Path(name).write_text('{"text": "a"}\n', encoding="utf-8")
        for text in (block, re.sub(r"^# (?=\w+:)", "", block, flags=re.MULTILINE)):  # also what is commented out
            Path("run.yaml").write_text(text, encoding="utf-8")
            load_config(Path("run.yaml"))
    elif language == "json":
        raw = json.loads(block)
        if str(raw.get("schema", "")).startswith("lengthwise.plan"):
            Plan.from_json(block)
    elif snippets := re.findall(r'^--8<-- "(.+)"$', block, re.MULTILINE):
        for snippet in snippets:  # of the built site; examples have tests of their own
            compile((ROOT / snippet).read_text(encoding="utf-8"), snippet, "exec")
    elif language == "python":
        exec(compile(block, str(page), "exec"), {})
    else:
        assert language in ("", "sh", "bash", "shell", "text", "mermaid", "diff"), f"no test knows blocks of {language}"


def test_docs_examples_are_as_wide_as_the_site_shows_them() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = re.sub(r'--8<-- "(.*)"', lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), text)
    lines = [line for language, block in blocks(shown) if language != "text" for line in block.splitlines()]
    assert not [line for line in lines if len(line) > 88]


def missing_links(page: Path, text: str) -> list[str]:
    missing = []
    for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset|href)="([^"]+)"', text)]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"https?://", link):
            continue
        if not target.exists():
            missing.append(link)
        elif anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            missing += [link] * (anchor not in {anchor_of(title) for title in titles})
    return missing


def anchor_of(title: str) -> str:
    """Make the anchor of a title as GitHub does."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_docs_pages_are_all_reached_from_the_readme() -> None:
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        left += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= seen, sorted(map(name_of, set(PAGES) - seen))


def test_docs_site_shows_every_page() -> None:
    nav = re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {name_of(page).removeprefix("docs/") for page in PAGES if page.parent != ROOT}
    decisions = {page for page in pages if page.startswith("decisions/") and page != "decisions/README.md"}
    assert sorted(nav) == sorted(pages - decisions)
    (style,) = re.findall(r"^extra_css: \[(.*)\]$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert "td:first-child code" in (ROOT / "docs" / style).read_text(encoding="utf-8"), "keys are not broken"


def test_docs_lists_and_tables_have_an_empty_line_before_them() -> None:
    wrong = []  # GitHub does without; the site would show one paragraph
    for page in PAGES:
        for block in FENCE.sub("```", page.read_text(encoding="utf-8")).split("\n\n"):
            first, *rest = block.strip("\n").splitlines() or [""]
            is_free = re.match(r"- |\d+\. |\||<!--|    ", first)
            if not is_free and any(re.match(r"- |\d+\. |\|", line) for line in rest):
                wrong.append(f"{name_of(page)}: {first}")
            if re.match(r" {1,3}\S", first):
                wrong.append(f"{name_of(page)}: {first}: four spaces inside a list")
    assert not wrong, "\n".join(wrong)


def test_docs_command_line_page_gets_the_help_of_every_verb(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    hooks = importlib.import_module("hooks")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == sorted(VERBS)
    built = hooks.with_help(page)
    for verb, (made, _) in VERBS.items():
        section = built.partition(f"\n## {verb}\n")[2].partition("\n## ")[0]
        assert f"usage: lengthwise {verb} " in section
        options = {field.name.replace("_", "-") for field in fields(made) if field.default is not MISSING}
        assert any(f"--{option}" in section for option in options) == bool(options), verb
    with pytest.raises(ValueError, match="no verb fly"):
        hooks.with_help("<!-- help: fly -->")


def test_docs_page_on_gpus_names_the_modules_that_changed_since_its_run(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    hooks = importlib.import_module("hooks")
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no stamp"):
        hooks.with_changes("# GPUs")
    with pytest.raises(ValueError, match="git cannot compare with commit 0000000"):
        hooks.with_changes("<!-- changed since: 0000000 -->")
    if is_shallow():
        pytest.skip("no whole history here")
    assert re.search(r"^- \*\*engine\*\*: .*`step`", hooks.with_changes(page), re.MULTILINE)


def test_docs_python_page_names_the_public_api() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert set(lengthwise.__all__) <= shown | {"options"}
    assert "`lengthwise.options`" in page


@pytest.mark.parametrize(
    "text",
    [
        "```\nlengthwise plan --wrong 3\n```",
        "```\nmake nothing\n```",
        "```\npython benchmarks/planners.py --wrong\n```",
        "```\ntorchrun --nproc-per-node 2 -m lengthwise train run.yaml --wrong\n```",
        "see `lengthwise plan --wrong`",
        "| claim | `python benchmarks/planners.py --seeds many` |",
    ],
)
def test_docs_wrong_command_is_found(text: str, capsys) -> None:
    ((command, whole),) = commands(text)
    with pytest.raises((AssertionError, SystemExit)):
        refuse(command, whole=whole)


@pytest.mark.parametrize("name", sorted(plots.CHARTS))
def test_docs_pictures_are_drawn_from_the_tables_as_they_are(name: str) -> None:
    drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert plots.CHARTS[name]() == drawn, "run: python benchmarks/plots.py"


def missing_files(text: str) -> list[str]:
    text = FENCE.sub("", text)
    named = re.findall(r"`([a-z0-9_./-]+\.(?:py|toml|txt)|(?:src|tests|benchmarks|examples)/[a-z0-9_./-]*)`", text)
    return [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src" / "lengthwise"))]


def test_docs_readme_lists_what_planning_needs() -> None:
    others = {"torch", "transformers", "safetensors", "datasets", "pyarrow", "zstandard"}  # the last three read data
    needed = {re.split(r"[>=<]", each)[0] for each in PYPROJECT["project"]["dependencies"]} - others
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"pip install --no-deps -e \. && pip install (.*)", readme)
    assert set(named.split()) == needed


def test_docs_readme_names_the_versions_that_are_installed_and_the_least_ones() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    listed = " ".join([*project["dependencies"], *extras["trl"], *extras["lora"]])
    least = dict(re.findall(r"([a-z]+)>=([\d.]+)", listed))
    pinned = dict(re.findall(r"^([a-z]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    readme = words_of(ROOT / "README.md")
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in readme
    for package, name in (("torch", "torch"), ("transformers", "transformers"), ("trl", "TRL"), ("peft", "peft")):
        assert f"{name} from {least[package]}" in readme
        assert f"{name} {pinned[package]}" in readme
    assert f"Tested: {pinned['torch']} on CPUs" in (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_docs_say_one_number_of_families() -> None:
    text = " ".join(map(words_of, PAGES))
    assert set(re.findall(r"(\d+) (?:model families|are proved)", text)) == {str(len(FAMILIES))}


@pytest.mark.parametrize("page", ["README.md", "docs/families.md"])
def test_docs_say_of_todays_models_what_the_code_does(page: str) -> None:
    from transformers import AutoConfig

    table = (ROOT / page).read_text(encoding="utf-8").partition("| model | `model_type`")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) >= 10
    for _, types, trained, *attention in rows:
        if attention and trained.startswith("yes"):
            assert attention == [attention_cell(re.findall(r"`(\w+)`", types))]
        for family in re.findall(r"`(\w+)`", types):
            refusal = family_refusal(AutoConfig.for_model(family).to_dict(), "model")
            assert (refusal is None) == trained.startswith("yes"), family
            if refusal is not None:
                assert "plain TRL" in trained, family
                assert "plain TRL" in refusal.remedy, family


def test_docs_architecture_lists_the_packages_in_the_order_that_lint_checks() -> None:
    stacked = reversed(PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    layers = [each.strip().removeprefix("lengthwise.") for layer in stacked for each in layer.split("|")]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| package \| what it is \|\n(.*?)\n\n", page, re.DOTALL)
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == layers


def test_every_test_that_a_promise_names_is_there():
    page = (ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    assert [each for each in named if f"\ndef {each[1]}(" not in (ROOT / "tests" / each[0]).read_text()] == []
    rows = set(re.findall(r"^\|.*\|$", page, re.MULTILINE)) - {"|---|---|", "| promise | test |"}
    assert [row for row in rows if "::test_" not in row and "*not yet*" not in row] == []
