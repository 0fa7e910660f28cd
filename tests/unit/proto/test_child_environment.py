"""The environment variables that a child process gets."""

from __future__ import annotations

import os

import pytest

from penstock_common.child_environment import HUB, TRACES, child_environment, reduce_environment

NEEDED_BY_ALL = {
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONSAFEPATH"),
    *("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG"),
    *("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR"),
    *(
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
        "PENSTOCK_CACHE",
        "PENSTOCK_LOAD_CACHE",
        "PENSTOCK_STATE",
        "PENSTOCK_TRUSTED_DIRECTORIES",
        "CC",
    ),
}
SECRET = {
    *("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "HTTPS_PROXY", "https_proxy", "AWS_SECRET_ACCESS_KEY"),
    *("SLURM_JWT", "KUBECONFIG", "DATABASE_URL", "GITHUB_TOKEN", "PGPASSWORD"),
}


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED_BY_ALL | SECRET:
        monkeypatch.setenv(name, f"the value of {name}")


def test_a_child_gets_what_libraries_need_and_no_secret() -> None:
    found = child_environment()
    assert found.keys() >= NEEDED_BY_ALL
    assert not found.keys() & SECRET
    assert found["TZ"] == "the value of TZ"


@pytest.mark.parametrize(
    ("needed", "secrets"),
    [
        (("PENSTOCK_API_KEY",), {"PENSTOCK_API_KEY"}),
        (("PENSTOCK_",), {"PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY"}),
        (HUB, {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "https_proxy"}),
        (TRACES, {"OTEL_EXPORTER_OTLP_HEADERS", "HTTPS_PROXY", "https_proxy"}),
        # Nobody gets variables whose names only begin with the name of one that is needed.
        (("PENSTOCK",), set()),
    ],
)
def test_it_gets_those_too_that_are_named(needed: tuple[str, ...], secrets: set[str]) -> None:
    assert child_environment(*needed).keys() & SECRET == secrets


def test_a_reduced_environment_is_what_a_child_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(os.environ)
    monkeypatch.setattr("os.environ", environment)
    expected = child_environment(*TRACES)
    reduce_environment(*TRACES)
    assert environment == expected
