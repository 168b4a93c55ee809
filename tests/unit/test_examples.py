"""What documentation and examples say exists, and the examples do what they say."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune import SearchSpace, Tuner
from autotune.cli import compare, explain, looks, predict, results, search
from autotune.probe import trl_file
from autotune.space.knob import registry
from autotune.space.trainers import BUILTIN
from autotune.space.trl_keys import known_keys
from autotune.worker import demo

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
PAGES = sorted(
    path
    for pattern in ("*.md", "autotune/**/*.md", "examples/**/*.md", "search_spaces/**/*.md")
    for path in ROOT.glob(pattern)
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        yield match.group(1), match.group(2)


def prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def command_lines() -> Iterator[tuple[str, str]]:
    """Yield place and text of every whole `autotune` command line that is shown."""
    for page in PAGES:
        for language, text in fences(page.read_text()):
            for line in text.splitlines() if language == "sh" else ():
                if line.startswith("autotune "):
                    yield page.name, line
    for path in (*EXAMPLES.glob("*.yaml"), *(ROOT / "search_spaces").glob("*.yaml")):
        for line in path.read_text().splitlines():
            if line.startswith("#     autotune "):
                # What follows two spaces and more is the explanation beside it.
                yield path.name, re.split(r" {2,}", line.removeprefix("#     "))[0]


def mentions() -> Iterator[tuple[str, str]]:
    """Yield place and text of every command line, whole or not, in running text."""
    for page in PAGES:
        for text in re.findall(r"`(autotune [^`]+)`", prose(page.read_text())):
            yield page.name, " ".join(text.split())


def commands() -> dict[str, Any]:
    app = typer.Typer()
    for module in (search, predict, results, explain, compare, looks):
        module.register(app)
    return dict(typer.main.get_command(app).commands)


def options_of(command: Any) -> set[str]:
    named = [name for item in command.params for name in (*item.opts, *item.secondary_opts)]
    return {*named, "--help", "-h"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("chat", "chat_long_tail"),
        ("preference", "preference"),
        ("unpaired", "unpaired"),
        ("prompts", "prompts"),
    ],
)
def test_the_data_sets_are_the_generators_output(kind: str, name: str, tmp_path: Path) -> None:
    demo.write_data(tmp_path / "made.jsonl", kind)
    kept = EXAMPLES / "data" / f"{name}.jsonl"
    assert kept.read_bytes() == (tmp_path / "made.jsonl").read_bytes()


def test_the_space_loads() -> None:
    space = SearchSpace.load(EXAMPLES / "my_space.yaml")
    assert space.trainer == "sft"
    assert space.description
    assert space.fixed


@pytest.mark.parametrize("name", ["search_api.py", "search_trainer.py"])
def test_the_scripts_use_what_exists(name: str) -> None:
    path = EXAMPLES / name
    tree = ast.parse(path.read_text())
    compile(tree, str(path), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                importlib.import_module(item.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for item in node.names:
                if not hasattr(module, item.name):
                    importlib.import_module(f"{node.module}.{item.name}")


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }
    assert files <= listed


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page.read_text())):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to {target}"


@every_page
def test_paths_of_the_package_exist(page: Path) -> None:
    """Such as `executors/pool.py`; patterns and placeholders are left out."""
    for text in re.findall(r"`([\w./]+/[\w./]*\w\.(?:py|yaml|md))`", prose(page.read_text())):
        if text.startswith(("configs/", "probes/", "runs/")):
            continue
        assert any((base / text).exists() for base in (ROOT, ROOT / "autotune")), text


@pytest.mark.parametrize(("place", "line"), list(command_lines()))
def test_command_lines_parse(place: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    known = commands()
    assert words[0] in known, f"{place}: {line}"
    # Raises for an unknown option, a wrong value, or too many or too few arguments.
    with known[words[0]].make_context(words[0], words[1:]):
        pass


@pytest.mark.parametrize(("place", "text"), list(mentions()))
def test_mentioned_commands_and_options_exist(place: str, text: str) -> None:
    words = text.split()[1:]
    known = commands()
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version"), f"{place}: {text}"
        return
    assert words[0] in known, f"{place}: {text}"
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
    assert given <= options_of(known[words[0]]), f"{place}: {text}"


@every_page
def test_options_that_are_named_exist(page: Path) -> None:
    """Such as `--memory-budget` alone in running text."""
    everywhere = {name for command in commands().values() for name in options_of(command)}
    others = {"--config", "--update-golden", "--version", "--strict"}
    for text in re.findall(r"`(--[a-z][\w-]*)[^`]*`", prose(page.read_text())):
        assert text in everywhere | others, f"{page.name}: {text}"


def test_the_tables_of_knobs_are_those_of_the_spaces() -> None:
    common = SearchSpace.load("sft").knobs
    named = _check_table("\n## Knobs\n", common)
    assert named == [knob.name for knob in common]
    for trainer in sorted(BUILTIN.keys() - {"sft"}):
        own = [knob for knob in SearchSpace.load(trainer).knobs if knob.name not in named]
        shown = _check_table("\nKnobs that only some trainers have", own)
        shown += _check_table("\n### vLLM\n", own)
        assert {knob.name for knob in own} == set(shown)


def _check_table(heading: str, knobs: Sequence[Any]) -> list[str]:
    """Check the rows of a table that are of these knobs; return their names."""
    known = {knob.name: knob for knob in knobs}
    section = re.split(r"\n##+ |\nNot among them", README.read_text().partition(heading)[2])[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [re.findall(r"`(\w+)`", row)[0] for row in rows]
    assert rows
    shown = [name for name in named if name in known]
    for row, name in zip(rows, named, strict=True):
        if name not in known:
            continue
        knob = known[name]
        values, changes = row.split("|")[-4:-2]
        for change in {knob.change(value) for value in _values(knob) if value != knob.baseline}:
            assert change in changes, f"{knob.name} changes {change}"
        for text in re.findall(r"`([^`]+)`", values):
            knob.parse(text)  # every value that is shown is one that the knob takes
    return shown


def _values(knob: Any) -> tuple[Any, ...]:
    return () if knob.domain is None else tuple(knob.domain.values)


def test_pins_that_are_shown_are_possible() -> None:
    for page in PAGES:
        for name, value in re.findall(r"--pin (\w+)=(\w+)", page.read_text()):
            if (name, value) != ("KNOB", "VALUE"):
                registry.get(name).parse(value)


def test_the_readmes_space_loads(tmp_path: Path) -> None:
    text, _ = sorted(yaml_fences(), key=lambda text: not text.startswith("schema:"))
    path = tmp_path / "my_space.yaml"
    path.write_text(text)
    assert len(SearchSpace.load(path).knobs) == text.partition("fixed:")[0].count("\n  ")


def test_the_readmes_configuration_has_keys_of_trl(tmp_path: Path) -> None:
    (text,) = [text for text in yaml_fences() if not text.startswith("schema:")]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert set(trl_file.read(path).config) <= known_keys("sft")


def yaml_fences() -> list[str]:
    return [text for language, text in fences(README.read_text()) if language == "yaml"]


class _StoppedError(Exception):
    pass


def test_the_readmes_script_makes_a_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(tuner: Tuner, budget: object) -> None:
        raise _StoppedError

    scripts = [text for language, text in fences(README.read_text()) if language == "python"]
    (text,) = [text for text in scripts if "Tuner" in text]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Tuner, "search", stop)
    with pytest.raises(_StoppedError):
        exec(compile(text, str(README), "exec"), {"__name__": "__main__"})


@pytest.mark.trl
def test_the_script_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "search_api.py"), "--trials", "2"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "made")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trial " in done.stdout
    assert (tmp_path / "made" / "best.yaml").read_text().startswith("# Written by autotune")
    assert "trial 1: ok, " in done.stdout
    # All of it is where it was asked for.
    (run,) = (tmp_path / "made").glob("run-*")
    assert (run / "report.json").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.trl
@pytest.mark.parametrize("trainer", ["dpo", "kto", "reward"])
def test_the_script_for_a_trainer_runs(trainer: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "search_trainer.py"), trainer, "--trials", "2"]
    done = subprocess.run(
        [*command, "--device", "virtual:rtx-4090", "--folder", str(tmp_path / "made")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ", predicted: " in done.stdout
    text = (tmp_path / "made" / f"{trainer}.yaml").read_text()
    assert f"trl {trainer} --config" in text


def test_the_readmes_virtual_accelerator_counts_bytes() -> None:
    scripts = [text for language, text in fences(README.read_text()) if language == "python"]
    (text,) = [text for text in scripts if "virtual.accelerator" in text]
    found: dict[str, Any] = {}
    exec(text, found)
    weights = (4096 * 4096 + 4096) * 4
    # Weights, gradients, two moments, and the square root that a foreach step makes of one.
    assert 5 * weights < found["trace"].peak_bytes < 6 * weights
