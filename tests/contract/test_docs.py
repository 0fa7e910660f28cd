"""Documents say what is true of the tree."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from contract import images_page, models_page

from penstock_common.shared_flags import SHARD_PORT

ROOT = Path(__file__).parents[2]


def test_no_page_says_a_name_twice_in_a_row():
    twice = re.compile(r"(`[^`]+`):? \1")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]
    assert [page.name for page in pages if twice.search(page.read_text())] == []


def test_every_dependency_has_its_reason():
    text = (ROOT / "docs" / "dependencies.md").read_text()
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    names = set(re.findall(r'"([a-z0-9-]+)[>=<]', project.partition("optional-dependencies]")[2]))
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == []


def test_links_between_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_that_pages_name_are_there():
    # Environments are in folders with a dot.
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    tracked = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"))
    named = {
        (page.name, path)
        for page in pages
        if page.name != "CHANGELOG.md"
        for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page.read_text())
    }
    assert named
    assert [
        (page, path)
        for page, path in sorted(named)
        if not any(f"/{t}".endswith(f"/{path}") for t in tracked)
    ] == []


def test_commands_that_pages_show_have_the_flags_that_they_are_shown_with():
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"))
    shown = [each for page in pages for each in _shown_flags(page.read_text("utf-8"))]
    assert len(shown) > 30
    there = {command: _flags_of(command) for command in {command for command, _ in shown}}
    assert [(command, flag) for command, flag in shown if flag not in there[command]] == []


def _shown_flags(text: str) -> Iterator[tuple[str, str]]:
    """Commands of penstock in a page's code, each with each of its flags. What stands behind `--`
    belongs to another command.
    """
    for block in re.findall(r"```.*?```|`[^`\n]+`|^    .*$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").strip("`").splitlines():
            command = re.match(r"(?:\$ )?(?:\w+=\S+ )*penstock ([a-z]+)\b([^#|;&]*)", line.strip())
            words = command[2].split() if command else []
            flags = itertools.takewhile(lambda word: word != "--", words)
            for flag in flags:
                name = re.match(r"--[a-z][a-z-]*", flag)
                if command and name:
                    yield command[1], name[0]


def test_no_flag_and_no_metric_has_a_word_that_the_glossary_leaves_to_others():
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    rows = [line.strip("|").split("|") for line in glossary.splitlines() if line.startswith("|")]
    # What follows a project's name is its word for something that has other names here; LoRA is the
    # field's word for the kind of adapters.
    theirs = {
        word.strip()
        for row in rows
        for word in row[2].split(",")
        if word.strip(" -") and ":" not in word and word.strip() not in ("elsewhere", "LoRA")
    }
    assert {"gateway", "iteration"} <= theirs
    ours = set().union(*map(_flags_of, ("serve", "shard", "router")))
    assert set(re.findall(r"--[a-z][a-z-]+", glossary)) <= ours
    ours |= set(re.findall(r"`(penstock_[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    words = {word: re.sub("[ -]", "[-_]", word.lower()) for word in theirs}
    assert [
        (word, name)
        for word, pattern in words.items()
        for name in sorted(ours)
        if re.search(rf"(^|[-_]){pattern}s?([-_]|$)", name)
    ] == []


@functools.cache
def _flags_of(command: str) -> frozenset[str]:
    """The flags of a command, of those of its own, and of the shards that it starts."""
    text = _help_of(command)
    parts = re.findall(r"^    ([a-z]+) ", text.partition("\n  COMMAND\n")[2], re.MULTILINE)
    texts = [text, *(_help_of(command, part) for part in parts)]
    if command == "serve":
        texts.append(_help_of("shard"))
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", "".join(texts)))


def _help_of(*command: str) -> str:
    words = [sys.executable, "-m", "penstock_cli.main", *command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_page_of_models_shows_what_becomes_of_each_family():
    page = models_page.PAGE.read_text()
    assert page == models_page.with_table(page), "in tests/: python -m contract.models_page"


def test_the_page_of_images_shows_how_many_tokens_one_takes():
    page = images_page.PAGE.read_text()
    assert page == images_page.with_table(page), "in tests/: python -m contract.images_page"


def test_ports_of_shards_are_those_of_the_command_and_of_the_images():
    image = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    (in_image,) = set(re.findall(r'"penstock", "shard", .*"--port", "(\d+)"', image))
    assert in_image in re.findall(r"^EXPOSE (\d+)$", image, re.MULTILINE)
    deployed = [*ROOT.glob("deploy/*.yaml"), *ROOT.glob("deploy/helm/**/*.*")]
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md"))
    for files, allowed in ((deployed, {in_image}), (pages, {in_image, str(SHARD_PORT)})):
        named = {
            (file.name, port)
            for file in files
            if file.suffix in (".md", ".yaml", ".tpl", ".txt")
            for port in re.findall(
                r"(?:[\w.]:|containerPort: |\bport:? )(\d0051)\b", file.read_text()
            )
        }
        assert {port for _, port in named} == allowed, sorted(named)
