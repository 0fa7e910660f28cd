"""The parser of Dockerfiles refuses what it does not know, and reads what it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.dockerfile import Copy, DockerfileError, parse
from integration.dockerfile_rules import images, problems

EXAMPLE = """\
# A comment.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ENV PATH=/opt/app/bin:$PATH
RUN first && \\
    second
COPY a b /src/

FROM ${BASE} AS run
ENV HOME=/tmp
ENV PATH=$HOME/bin:${PATH}
COPY --from=build /opt/app /opt/app
EXPOSE 80
HEALTHCHECK --interval=5s CMD ["app", "health"]
ENTRYPOINT ["app"]
CMD ["--port", "80"]

FROM run AS debug
USER 1000
ENTRYPOINT ["sh"]
"""


def test_stages_know_what_they_are_built_on() -> None:
    file = parse(EXAMPLE)
    assert [(stage.name, stage.base) for stage in file.stages] == [
        ("build", "python:3.12-slim"),
        ("run", "python:3.12-slim"),
        ("debug", "run"),
    ]


def test_an_image_is_what_its_stage_says() -> None:
    image = parse(EXAMPLE).image("run", "/bin")
    assert image.env == {"PATH": "/tmp/bin:/bin", "HOME": "/tmp"}
    assert (image.entrypoint, image.command) == (("app",), ("--port", "80"))
    assert (image.healthcheck, image.health_options) == (("app", "health"), {"interval": "5s"})
    assert (image.ports, image.user) == ((80,), "")


def test_a_stage_inherits_and_its_entry_point_voids_the_command() -> None:
    image = parse(EXAMPLE).image("debug", "/bin")
    assert (image.entrypoint, image.command, image.user) == (("sh",), (), "1000")
    assert image.healthcheck == ("app", "health")


def test_a_line_goes_on_after_a_backslash() -> None:
    (run,) = (step for step in parse(EXAMPLE).steps("build") if step.keyword == "RUN")
    assert run.text.split() == ["first", "&&", "second"]


def test_copies_say_where_from() -> None:
    file = parse(EXAMPLE)
    assert file.copies("build") == [Copy(("a", "b"), "/src/", None)]
    assert file.copies("run") == [Copy(("/opt/app",), "/opt/app", "build")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no FROM"),
        ("RUN x", "before the first FROM"),
        ("FROM a", "must be IMAGE AS NAME"),
        ("FROM ${BASE} AS a", "BASE is not set"),
        ("FROM a AS a\nADD x y", "not known here"),
        ("FROM a AS a\nONBUILD RUN x", "not known here"),
        ("FROM a AS a\nRUN <<EOF", "here-documents"),
        ("FROM a AS a\nRUN x \\", "backslash"),
        ("FROM a AS a\nRUN", "empty"),
        ("FROM a AS a\nENTRYPOINT penstock router", "exec form"),
        ("FROM a AS a\nCMD [1]", "list of strings"),
        ("FROM a AS a\nHEALTHCHECK NONE", "must be"),
        ("FROM a AS a\nENV A", "pairs"),
        ("FROM a AS a\nENV A=$B", "B is not set"),
        ("FROM a AS a\nCOPY --chmod=755 a b", "must be"),
        ("ARG A\nFROM a AS a", "NAME=DEFAULT"),
    ],
)
def test_what_is_not_known_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DockerfileError, match=problem):
        _read_everything(text)


def _read_everything(text: str) -> None:
    file = parse(text)
    for target in file.targets:
        file.image(target, "/bin")
        file.copies(target)


# ---- what ours keep to ------------------------------------------------------------------------

DOCKERFILES = [
    path
    for path in sorted((Path(__file__).parents[2] / "deploy").glob("Dockerfile*"))
    if not path.name.endswith(".dockerignore")
]
GOOD = """\
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint constraints.txt '.[router]'

FROM python:3.12-slim AS run
LABEL org.opencontainers.image.title="a" org.opencontainers.image.description="b" \\
    org.opencontainers.image.licenses="c"
COPY --from=build /opt/app /opt/app
USER 10001:10001
HEALTHCHECK CMD ["penstock", "health"]
ENTRYPOINT ["penstock", "router"]
"""


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_to_the_rules(path: Path) -> None:
    file = parse(path.read_text())
    assert problems(file) == []
    assert images(file), "there is something to run"


def test_what_is_compiled_on_a_newer_system_than_it_runs_on_is_found() -> None:
    """It would not load: `version GLIBC_2.38 not found`."""
    build, run = "python:3.12-slim AS build", "python:3.12-slim AS run"

    def found(built_on: str, runs_on: str) -> list[str]:
        text = GOOD.replace(build, f"{built_on} AS build").replace(run, f"{runs_on} AS run")
        return problems(parse(text))

    old, new = "python:3.12-slim-bookworm", "python:3.12-slim-trixie"
    cuda = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
    assert found(cuda, new) == found(old, new) == found(old, old) == []
    assert found(cuda, old) == ["run: glibc is older than in build, from which it copies"]


def test_nothing_is_wrong_with_a_good_dockerfile() -> None:
    assert problems(parse(GOOD)) == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("python:3.12-slim AS run", "python:latest AS run", "minor version"),
        ("python:3.12-slim AS run", "python AS run", "minor version"),
        ("python:3.12-slim AS run", "python:3 AS run", "minor version"),
        ("USER 10001:10001", "USER 0", "root"),
        ("USER 10001:10001", "USER penstock", "root"),
        ("USER 10001:10001\n", "", "root"),
        ('HEALTHCHECK CMD ["penstock", "health"]\n', "", "HEALTHCHECK"),
        (' org.opencontainers.image.description="b"', "", "description"),
        ("--no-install-recommends ", "", "recommends"),
        (" && rm -rf /var/lib/apt/lists/*", "", "lists"),
        ("RUN apt-get update &&", "RUN", "update"),
        (" --constraint constraints.txt", "", "constraints"),
        ("RUN pip", "RUN curl https://x.org/x.sh | sh && pip", "package manager"),
        ("RUN pip", "ARG HF_TOKEN=\nRUN pip", "readable"),
        ("USER 1", "ENV PENSTOCK_API_KEY=x\nUSER 1", "readable"),
        ("COPY --from=build", "COPY --from=other", "no stage"),
        ("USER 1", "COPY router /router\nUSER 1", "slim"),
    ],
)
def test_a_dockerfile_against_the_rules_is_found(good: str, bad: str, problem: str) -> None:
    assert good in GOOD
    (found,) = problems(parse(GOOD.replace(good, bad)))
    assert problem in found
