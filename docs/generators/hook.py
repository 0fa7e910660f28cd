"""What mkdocs does beyond its configuration: pages that are made, and those that live elsewhere.

The references are made from the router's routes, the proto and the commands' help. Documents that
stand outside of docs/ become pages, with their links put right; a link to a file that is no page
(source code, say) loses its link and keeps its words. Drawings are put into their pages, so that
they take the colours of the page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import command_reference
import grpc_reference
import http_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = "docs"
MADE = {
    "command-line.md": command_reference.page,
    "http-reference.md": http_reference.page,
    "grpc-reference.md": grpc_reference.page,
}
# In the repository, and in the site.
ELSEWHERE = {
    "benchmarks/peers.md": "peers.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "containers.md",
}
# No pages themselves: others say what they say.
SHOWN_BY = {
    "README.md": "index.md",
    "proto/penstock_proto/shard.proto": "grpc-reference.md",
}
PLOTS = "benchmarks/plots"

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_DRAWING = re.compile(r"^!\[([^\]]*)\]\((images/[\w-]+\.svg)\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages and pictures that are not in docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for plot in sorted((ROOT / PLOTS).glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    folder = posixpath.dirname(_repository_path(uri))

    def link(match: re.Match[str]) -> str:
        target = _site_target(folder, match[3])
        if target is None:
            return match[2]
        return f"{match[1]}[{match[2]}]({target})"

    return _DRAWING.sub(_drawing, _LINK.sub(link, markdown))


def _repository_path(uri: str) -> str:
    for source, page in ELSEWHERE.items():
        if page == uri:
            return source
    return f"{DOCS}/{uri}"


def _site_target(folder: str, target: str) -> str | None:
    """A link as it is in the site, all of whose pages are in one folder; None: to no page."""
    if re.match(r"[a-z]+:|#", target):
        return target
    path, mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    page = {**ELSEWHERE, **SHOWN_BY}.get(path)
    if page is None and path.startswith(f"{PLOTS}/"):
        page = path.removeprefix("benchmarks/")
    if page is None and path.startswith(f"{DOCS}/"):
        # Also one that is not there: mkdocs then says so.
        page = path.removeprefix(f"{DOCS}/")
    if page is None and (ROOT / path).exists():
        return None
    return f"{page or target}{mark}{anchor}"


def _drawing(match: re.Match[str]) -> str:
    svg = (ROOT / DOCS / match[2]).read_text()
    # One block of HTML to Markdown.
    lines = [line for line in svg.splitlines() if line.strip()]
    return "\n".join(['<figure class="drawing">', *lines, "</figure>"])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.watch += [str(ROOT / source) for source in ELSEWHERE]
    return config
