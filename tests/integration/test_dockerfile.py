"""The parser of Dockerfiles refuses what it does not know, and reads what it does."""

from __future__ import annotations

import pytest
from integration.dockerfile import Copy, DockerfileError, parse

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
