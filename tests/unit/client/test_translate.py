"""Command lines of vLLM and TGI become penstock's: every flag of both, and what is lost is said."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from penstock_cli.serve.serve import _parser as serve_parser
from penstock_cli.translate import (
    flag_rules,
    tgi_flags,
    translate,
    translation,
    vllm_environment,
    vllm_flags,
)
from penstock_cli.translate.docker_run import DockerError
from penstock_cli.translate.flag_rules import Loss, Part, Rule, Takes
from penstock_cli.translate.translation import TGI, VLLM, Peer, Translation, UnknownCommand
from penstock_router.cli import parse_config as parse_router
from penstock_shard.cli import parse_config as parse_shard

PEERS = Path(__file__).parent / "peers"
# What dashboards and scalers of theirs look for.
OF_TGI = "-- --metrics-names tgi"

# Values that each flag with a counterpart takes there, where "7" is none.
VALUES = {
    "dtype": "bfloat16",
    "tool-call-parser": "llama3_json",
    "reasoning-parser": "qwen3",
    "load-format": "dummy",
    "kv-cache-dtype": "fp8",
    "quantization": "fp8",
    "quantize": "fp8",
    "HF_MODEL_QUANTIZE": "fp8",
    "max-model-len": "4k",
    "attention-backend": "TORCH_SDPA",
    "block-size": "32",
    "gpu-memory-utilization": "0.5",
    "device-memory-utilization": "0.5",
    "cuda-memory-fraction": "0.5",
    "uvicorn-log-level": "trace",
    "log-level": "INFO",
    "cuda-graphs": "0",
    "max-num-batched-tokens": "2k",
    "otlp-endpoint": "http://127.0.0.1:4318",
    "otlp-traces-endpoint": "http://127.0.0.1:4318",
    "LOG_LEVEL": "warn",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CPU_OMP_THREADS_BIND": "0-3,6",
    "PREFIX_CACHING": "0",
    "cors-allow-origin": "https://a.example",
    "allowed-origins": '["https://a.example"]',
    "kv-offloading-size": "1.5",
    "lora-modules": '{"name": "mine", "path": "/adapters/mine"}',
    "lora-adapters": "mine=/adapters/mine",
    "max-loras": "16",
    "speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}',
    "allowed-local-media-path": str(PEERS),
    "allowed-media-domains": "images.example.com",
    "limit-mm-per-prompt": '{"image": 4}',
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}


def listed(name: str) -> list[list[str]]:
    lines = (PEERS / f"{name}.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def read(
    command: str, around: Mapping[str, str] | None = None, *, gpus: int = 0, ambient: bool = False
) -> Translation:
    return translate.read(shlex.split(command), around or {}, gpus=gpus, ambient=ambient)


def of(result: Translation, subject: str) -> tuple[Loss, str]:
    (found,) = (r for r in result.remarks if r.subject == subject)
    return found.loss, found.text


def check_parses(result: Translation) -> None:
    """Check that our own parsers take the translation, each its part."""
    arguments = result.arguments[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    _, shard = serve_parser().parse_known_args(arguments[:split])
    parse_shard(["--model", result.model, *shard])
    parse_router(["--shards", "127.0.0.1:1", *arguments[split + 1 :]])


# ---- the tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [VLLM, TGI], ids=lambda peer: peer.name)
def test_every_flag_has_a_rule_that_knows_what_it_takes(peer: Peer) -> None:
    words = listed(f"{peer.name.lower()}_flags")
    names = {word[0].rstrip("!+?"): word[0] for word in words}
    assert {name: name + rule.takes.value for name, rule in peer.flags.items()} == names
    others = {other: word[0].rstrip("!+?") for word in words for other in word[1:]}
    short = {other: name for other, name in others.items() if not other.startswith("--")}
    # -O is what FlexibleArgumentParser adds for --optimization-level.
    assert short == {k: v for k, v in peer.short.items() if k != "-O"}


def test_every_flag_that_switches_another_off_is_read_as_that() -> None:
    inverses = {
        inverse: word[0].rstrip("!")
        for word in listed("vllm_flags")
        for inverse in word[1:]
        if inverse.startswith("--")
    }
    assert len(inverses) > 40
    for inverse, name in inverses.items():
        (given,) = translation._read_flags(VLLM, [inverse], Translation())
        assert (given.name, given.negated, given.subject) == (name, True, inverse)


def test_one_that_is_no_flags_inverse_is_unknown() -> None:
    for command in (
        "vllm serve m --disable-port",
        "vllm serve m --enable-what",
        "text-generation-launcher --enable-custom-kernels",
    ):
        assert read(command).refused


@pytest.mark.parametrize("peer", [VLLM, TGI], ids=lambda peer: peer.name)
def test_every_variable_has_a_rule(peer: Peer) -> None:
    names = {word[0] for word in listed(f"{peer.name.lower()}_environment")}
    assert [name for name in names if flag_rules.rule_of(name, peer.environment) is None] == []
    for name in set(peer.environment) - set(flag_rules.HUB):
        assert fnmatch.filter(names, name), f"{name} fits none"


def test_a_variable_of_a_family_has_its_rule_and_one_with_a_rule_of_its_own_keeps_that() -> None:
    families = {"A_*": Rule(why="all of A"), "A_B_*": Rule(why="of no use"), "A_C": Rule(to="c")}
    assert flag_rules.rule_of("A_B_D", families) == Rule(why="all of A")
    assert flag_rules.rule_of("A_C", families) == Rule(to="c")
    assert flag_rules.rule_of("B_A_C", families) is None
    result = read("env VLLM_ROCM_USE_WHAT_IS_NEW=1 vllm serve m")
    assert of(result, "VLLM_ROCM_USE_WHAT_IS_NEW")[0] is Loss.NONE


def rules() -> Iterator[tuple[Peer, str, Rule]]:
    for peer in (VLLM, TGI):
        for table in (peer.flags, peer.environment):
            yield from ((peer, name, rule) for name, rule in table.items())


def test_a_rule_names_a_flag_or_says_why_there_is_none() -> None:
    for _, name, rule in rules():
        assert bool(rule.to) != bool(rule.why), name
        if rule.why:
            # A line: it is shown behind the flag's name.
            assert "\n" not in rule.why


@pytest.mark.parametrize(
    ("peer", "name", "rule"),
    [
        pytest.param(*found, id=f"{found[0].name}-{found[1]}")
        for found in rules()
        if found[2].to and found[2].part not in (Part.ENVIRONMENT, Part.MODEL)
    ],
)
def test_what_a_flag_becomes_is_taken_by_our_parsers(peer: Peer, name: str, rule: Rule) -> None:
    value = VALUES.get(name, "7")
    if name in peer.flags:
        words = [f"--{name}"] if rule.takes is Takes.NOTHING else [f"--{name}", value]
        result = translation.translate(peer, words, {}, gpus=0)
    else:
        result = translation.translate(peer, [], {name: value}, gpus=0)
    assert [r for r in result.remarks if r.loss is not Loss.NONE] == []
    assert rule.to.split()[0].replace("[no-]", "") in result.arguments
    check_parses(result)


@pytest.mark.parametrize("peer", [VLLM, TGI], ids=lambda peer: peer.name)
def test_each_flag_without_a_counterpart_gets_a_line_of_its_own(peer: Peer) -> None:
    for name, rule in peer.flags.items():
        if rule.why:
            words = [f"--{name}"] if rule.takes is Takes.NOTHING else [f"--{name}", "other"]
            result = translation.translate(peer, words, {}, gpus=0)
            assert of(result, f"--{name}") == (rule.loss, rule.why)
            assert result.refused == (rule.loss is Loss.REFUSED)


# ---- how flags are written -------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --max-model-len 4000 --tensor-parallel-size 2",
        "vllm serve --max_model_len=4k --model m -tp 2",
        "vllm serve m --max-model-len 9 --max-model-len=4000 -tp=2",
        "python3 -m vllm.entrypoints.openai.api_server --model m -tp 2 --max-model-len 4.0k",
        "sudo CUDA_HOME=/x /opt/bin/vllm serve m -tp 2 --max-model-len 4000",
    ],
)
def test_a_flag_may_be_written_in_several_ways(command: str) -> None:
    result = read(command)
    assert (result.model, result.copies, result.devices) == ("m", 1, 2)
    assert result.shard == ["--max-model-len", "4000"]
    assert not result.refused


def test_values_go_to_whom_they_are_for() -> None:
    result = read(
        "vllm serve m --served-model-name a b --port 80 --api-server-count 2 --dtype half "
        "--ssl-certfile c --max-num-queued-reqs 3 --api-key k --trust-remote-code"
    )
    assert result.arguments == shlex.split(
        "m --host 0.0.0.0 --port 80 --workers 2 --tls-cert-file c --served-model-name a b "
        "--dtype float16 --trust-remote-code -- --metrics-names vllm --max-queued-requests 3"
    )
    # On a command line everybody on the machine would see it.
    assert result.environment == {"PENSTOCK_API_KEY": "k"}


@pytest.mark.parametrize(
    ("flag", "parsers"),
    [
        ("--tool-call-parser", vllm_flags._TOOL_PARSERS),
        ("--reasoning-parser", vllm_flags._REASONING_PARSERS),
    ],
)
def test_every_parser_of_answers_that_has_a_counterpart_is_one_of_ours(
    flag: str, parsers: Mapping[str, str | None]
) -> None:
    for theirs, ours in parsers.items():
        result = read(f"vllm serve m --enable-auto-tool-choice {flag} {theirs}")
        assert result.router[-2:] == ([flag, ours] if ours else ["--metrics-names", "vllm"])
        assert not result.refused
        check_parses(result)
    result = read(f"vllm serve m {flag} of_its_own")
    assert of(result, flag)[0] in (Loss.LOST, Loss.REFUSED)


def test_every_parser_of_answers_has_a_counterpart_but_a_few() -> None:
    known = {"tool": vllm_flags._TOOL_PARSERS, "reasoning": vllm_flags._REASONING_PARSERS}
    theirs: dict[str, set[str]] = {"tool": set(), "reasoning": set()}
    for kind, name in listed("vllm_parsers"):
        theirs[kind].add(name)
    assert all(table.keys() <= theirs[kind] for kind, table in known.items())
    assert theirs["tool"] - known["tool"].keys() == {"beam", "inkling", "plamo3"}
    assert theirs["reasoning"] - known["reasoning"].keys() == {
        *("beam", "inkling", "k2_horizon", "plamo3"),
    }


@pytest.mark.parametrize("theirs", vllm_flags._BACKENDS)
def test_every_attention_backend_that_has_a_counterpart_is_one_of_ours(theirs: str) -> None:
    result = read(f"vllm serve m --attention-backend {theirs.upper()}")
    assert result.shard == ["--attention-backend", vllm_flags._BACKENDS[theirs]]
    check_parses(result)


def test_what_has_a_counterpart_that_needs_more_is_said_to_be_done_by_hand() -> None:
    roles = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'
    result = read(f"vllm serve m --kv-transfer-config '{roles}'")
    loss, text = of(result, "--kv-transfer-config")
    assert loss is Loss.BY_HAND
    for flag in ("--kv-peers", "--kv-host-bytes", "--role prefill"):
        assert flag in text


@pytest.mark.parametrize("peer", [VLLM, TGI], ids=lambda peer: peer.name)
def test_what_has_no_counterpart_has_no_flag_to_give(peer: Peer) -> None:
    rules = {**peer.flags, **peer.environment}
    lost = {name: rule.why for name, rule in rules.items() if rule.loss is Loss.LOST}
    assert [name for name, why in lost.items() if re.search(r"\bgive\b.* --", why)] == []


def test_vllms_triton_backend_is_ours() -> None:
    result = read("vllm serve m --attention-backend TRITON_ATTN")
    assert result.shard == ["--attention-backend", "triton"]
    assert result.remarks == []


def test_what_is_switched_off_is_left_out_or_switched_off_here() -> None:
    switched = "--no-trust-remote-code --no-enable-prefix-caching --no-enable-lora"
    for written in (switched, switched.replace("--no-enable", "--disable")):
        result = read(f"vllm serve m {written}")
        assert result.shard == ["--no-enable-prefix-caching"]
        assert result.remarks == []


def test_a_flag_that_may_be_repeated_keeps_all_its_values() -> None:
    result = read("text-generation-launcher --cors-allow-origin https://a --cors-allow-origin '*'")
    assert result.router[2:] == ["--cors-origin", "https://a", "--cors-origin", "*"]


def test_a_collectors_port_for_grpc_is_not_taken_for_that_of_http() -> None:
    result = read("vllm serve m --otlp-traces-endpoint grpc://collector:4317")
    assert of(result, "--otlp-traces-endpoint")[0] is Loss.BY_HAND
    assert "--otlp-endpoint" not in result.arguments


@pytest.mark.parametrize("flag", ["-O3", "-cc.mode=3", "--compilation-config.mode 3", "-O 3"])
def test_short_names_and_keys_of_objects_are_known(flag: str) -> None:
    result = read(f"vllm serve m {flag} --max-num-seqs 9")
    assert [remark.loss for remark in result.remarks] == [Loss.NONE]
    assert result.shard == ["--max-num-seqs", "9"]


@pytest.mark.parametrize(
    ("command", "subject", "text"),
    [
        ("vllm serve m --maxmodel-len 4 5 --port 9", "--maxmodel-len", "no flag of vLLM 0.33"),
        ("text-generation-launcher --foo", "--foo", "no flag of TGI 3.3"),
        ("vllm serve m --max-num-batched-tokens many", "--max-num-batched-tokens", "'many'"),
        ("vllm serve m --block-size x", "--block-size", "'x' is no value"),
        ("vllm serve m --dtype", "--dtype", "no value"),
        ("vllm serve m --chat-template {{x}}", "--chat-template", "into a file"),
        ("vllm serve m --reasoning-parser inkling", "--reasoning-parser", "is not told from"),
        ("QUANTIZE=eetq text-generation-launcher", "QUANTIZE", "not served; give"),
        ("vllm serve m -tp two", "-tp", "'two' is no value"),
        ("vllm serve m -tp 1.5", "-tp", "'1.5' is no value"),
        ("NUM_SHARD=all text-generation-launcher", "NUM_SHARD", "'all' is no value"),
        ("vllm serve m --max-model-len 4000.5", "--max-model-len", "'4000.5' is no value"),
        ("text-generation-launcher --model-id ''", "--model-id", "has no value"),
        # The model may be in it.
        ("vllm serve --config config.yaml", "--config", "files of flags are not read"),
        ("vllm serve m --pooler-config '{}x'", "--pooler-config", "as the model's modules.json"),
    ],
)
def test_what_would_change_answers_is_refused(command: str, subject: str, text: str) -> None:
    result = read(command)
    assert result.refused
    assert text in of(result, subject)[1]


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --seed 0 --logprobs-mode raw_logprobs --generation-config auto",
        "vllm serve m --tokenizer-mode slow --max-model-len auto --load-format auto",
        "text-generation-launcher --max-best-of 2 --max-stop-sequences 4 --speculate 0",
    ],
)
def test_a_value_that_asks_for_nothing_is_no_loss(command: str) -> None:
    assert read(command).remarks == []


def test_embeddings_are_not_pooled_in_another_way_than_the_model_says() -> None:
    # vLLM, too, asks the model first.
    result = read("vllm serve m --runner pooling --convert embed")
    assert "--embeddings" not in result.shard
    assert of(result, "--convert")[0] is Loss.LOST


def test_drafts_from_a_sequences_own_tokens_are_kept_and_those_of_models_are_not() -> None:
    ngrams = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    assert "--speculative-tokens 5" in shlex.join(
        read(f"vllm serve m --speculative-config '{ngrams}'").arguments
    )
    for settings in ('{"method": "eagle3", "num_speculative_tokens": 3}', '{"method": "ngram"}'):
        result = read(f"vllm serve m --speculative-config '{settings}'")
        assert of(result, "--speculative-config")[0] is Loss.LOST
    result = read("text-generation-launcher --speculate 3")
    assert "--speculative-tokens 3" in shlex.join(result.arguments)


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ('{"image": 4, "video": 0}', "4"),
        ('{"image": {"count": 5, "width": 100}}', "5"),
        ('{"video": 1}', None),
    ],
)
def test_limits_of_images_are_kept(limit: str, most: str | None) -> None:
    result = read(f"vllm serve m --limit-mm-per-prompt '{limit}'")
    assert result.router[2:] == (["--max-images", most] if most else [])
    assert result.remarks == []
    assert read("vllm serve m --limit-mm-per-prompt.image 4").router[2:] == ["--max-images", "4"]


def test_a_server_of_text_alone_stays_one() -> None:
    result = read("vllm serve m --language-model-only")
    assert result.shard == ["--image-cache-bytes", "0"]
    loss, text = of(
        read("vllm serve m --limit-mm-per-prompt.image 0"), "--limit-mm-per-prompt.image"
    )
    assert (loss, "--image-cache-bytes 0" in text) == (Loss.BY_HAND, True)


def test_domains_of_images_become_one_list() -> None:
    result = read("vllm serve m --allowed-media-domains a.example b.example --port 9")
    assert result.router[2:] == ["--allowed-media-domains", "a.example,b.example"]
    check_parses(result)


# ---- TGI -------------------------------------------------------------------------------------


def test_tgis_flags_are_variables_too_and_the_command_line_goes_first() -> None:
    variables = "MODEL_ID=a PORT=81 MAX_TOTAL_TOKENS=100 TRUST_REMOTE_CODE=true JSON_OUTPUT=false"
    result = read(f"{variables} ENV=prod text-generation-launcher --port 82")
    assert result.arguments == shlex.split(
        f"a --host 0.0.0.0 --port 82 --trust-remote-code --max-model-len 100 {OF_TGI}"
    )


def test_a_variable_that_is_empty_asks_for_nothing() -> None:
    # As compose files pass on what may be set: `MODEL_ID: ${MODEL_ID:-}`.
    result = read("MODEL_ID= QUANTIZE= API_KEY= CUDA_VISIBLE_DEVICES= text-generation-launcher")
    assert result.model == "bigscience/bloom-560m"
    assert result.remarks == []
    assert result.environment == {"CUDA_VISIBLE_DEVICES": ""}
    result = read("VLLM_API_KEY= VLLM_LOGGING_LEVEL= VLLM_USE_MODELSCOPE= vllm serve m")
    assert (result.environment, result.remarks) == ({}, [])


def test_the_environment_around_counts_only_where_it_is_run() -> None:
    around = {"MODEL_ID": "a", "PORT": "81", "HOSTNAME": "0f3c", "VLLM_API_KEY": "k", "HOME": "/"}
    result = read("text-generation-launcher", around, ambient=True)
    assert result.arguments == shlex.split(f"a --host 0.0.0.0 --port 81 {OF_TGI}")
    assert read("text-generation-launcher", around).model == "bigscience/bloom-560m"
    assert read("vllm serve m", around, ambient=True).environment == {"PENSTOCK_API_KEY": "k"}


def test_what_merely_is_there_is_not_spoken_of_unless_something_is_lost() -> None:
    around = {"LD_LIBRARY_PATH": "/x", "HF_TOKEN": "t", "S3_ENDPOINT_URL": "u", "MAX_JOBS": "4"}
    result = read("vllm serve m", around, ambient=True)
    assert [remark.subject for remark in result.remarks] == ["S3_ENDPOINT_URL"]
    assert result.environment == {}


@pytest.mark.parametrize(
    ("command", "gpus", "copies", "devices"),
    [
        ("text-generation-launcher", 0, 1, 1),
        ("text-generation-launcher", 4, 1, 4),
        ("text-generation-launcher --num-shard 2", 4, 1, 2),
        ("text-generation-launcher --num-shard 2 --sharded false", 4, 1, 1),
        ("vllm serve m", 4, 1, 1),
        ("vllm serve m -tp 2 -pp 2", 4, 1, 4),
        ("vllm serve m -tp 2 -dp 3", 8, 3, 2),
    ],
)
def test_a_model_is_split_over_as_many_gpus_and_copied_as_often(
    command: str, gpus: int, copies: int, devices: int
) -> None:
    result = read(command, gpus=gpus)
    assert (result.copies, result.devices) == (copies, devices)
    flag = ["--tensor-parallel-size", str(devices)] if devices > 1 else []
    assert flag == [word for word in flag if word in result.arguments]
    check_parses(result)


# ---- docker ----------------------------------------------------------------------------------


def test_tgis_snippet_becomes_a_command_on_the_host() -> None:
    result = read(
        "docker run --gpus all --shm-size 1g -p 8080:80 -v $volume:/data "
        "ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id $model"
    )
    assert translate.pretty(result) == (
        'HF_HOME="$volume" penstock serve "$model" \\\n  --host 0.0.0.0 \\\n  --port 8080 \\\n'
        "  -- --metrics-names tgi"
    )
    assert of(result, "--shm-size")[0] is Loss.NONE


def test_vllms_snippet_becomes_a_command_on_the_host() -> None:
    result = read(
        "docker run --runtime nvidia --gpus '\"device=1,2\"' --rm -itd --name x --ipc=host "
        "-v ~/.cache/huggingface:/root/.cache/huggingface --env HF_TOKEN -e VLLM_API_KEY=k "
        "-p 127.0.0.1:9000:8000 vllm/vllm-openai:v0.33.0 --model m --max-model-len 4K",
        {"HF_TOKEN": "t"},
    )
    assert result.arguments == shlex.split(
        "m --host 127.0.0.1 --port 9000 --max-model-len 4096 -- --metrics-names vllm"
    )
    assert result.environment == {
        "HF_TOKEN": "t",
        "PENSTOCK_API_KEY": "k",
        "HF_HOME": "~/.cache/huggingface",
        "CUDA_VISIBLE_DEVICES": "1,2",
    }


def test_paths_of_the_container_become_those_of_the_host() -> None:
    result = read(
        "docker run -p80:80 --mount type=bind,source=/srv/m,target=/models -e MODEL_ID=x "
        "-v tgi:/data text-generation-inference --model-id /models/llama"
    )
    assert result.model == "/srv/m/llama"
    assert of(result, "volume tgi")[0] is Loss.LOST


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("docker run -d", "names no image"),
        ("docker run -p", "-p has no value"),
        ("docker build .", "only `docker run`"),
        ("docker run nginx", "no image of vLLM"),
        ("docker run --entrypoint bash vllm/vllm-openai", "--entrypoint cannot"),
        ("ls -l", "a command that is known"),
        ("", "a command that is known"),
        ("vllm bench", "a command that is known"),
    ],
)
def test_what_is_no_such_command_is_refused_in_a_line(
    command: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((DockerError, UnknownCommand), match=problem):
        read(command)
    assert translate.main(["--", *shlex.split(command)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("typed", ["vllm serve X", "--run vllm serve X", ""])
def test_a_command_without_dashes_before_it_is_told_where_they_go(typed: str, capsys) -> None:
    assert translate.main(shlex.split(typed)) == 2
    assert capsys.readouterr().err == (
        "penstock translate: put -- before the command, as in: "
        "penstock translate -- vllm serve MODEL\n"
    )


def test_a_quote_that_is_not_closed_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert translate.main(["--", "vllm serve 'm"]) == 2
    assert capsys.readouterr().err.endswith("is no command line (No closing quotation)\n")


def test_an_address_of_ipv6_is_listened_on_without_its_brackets() -> None:
    result = read("docker run -p [::1]:9000:8000 vllm/vllm-openai m")
    assert result.serve == ["--host", "::1", "--port", "9000"]


def test_adapters_keep_their_names_and_places() -> None:
    second = shlex.quote('{"name": "chat", "path": "org/chat-lora"}')
    command = f"vllm serve m --enable-lora --lora-modules sql=/lora/sql {second} --max-loras 4"
    result = read(command)
    loras = ["--enable-lora", "--lora", "sql=/lora/sql", "--lora", "chat=org/chat-lora"]
    assert result.shard == loras
    assert result.remarks == []
    result = read("text-generation-launcher --model-id m --lora-adapters org/a,b=/lora/b")
    assert result.shard == ["--lora", "org/a=org/a", "--lora", "b=/lora/b"]
    result = read("text-generation-launcher --model-id m --lora-adapters org/a@main")
    assert result.shard == []
    assert result.remarks[0].loss is Loss.LOST


# ---- the command -----------------------------------------------------------------------------


def test_the_command_goes_to_stdout_and_what_is_lost_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "visible_gpus", lambda: [])
    command = "vllm serve 'my model' --lora-dtype half --max-num-queued-reqs 3 --max-num-seqs 5"
    assert translate.main(["--shard-port", "7000", "--", command]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "penstock serve 'my model' \\\n  --host 0.0.0.0 \\\n  --shard-port 7000 \\\n"
        "  --max-num-seqs 5 \\\n  -- --metrics-names vllm \\\n  --max-queued-requests 3\n"
    )
    assert re.fullmatch(r"# --lora-dtype: no counterpart: .*\n", printed.err)


def test_the_examples_of_the_migration_page_are_true(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "visible_gpus", lambda: [])
    page = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
    examples = re.findall(r"```console\n\$ penstock translate (.*)\n((?s:.*?))```", page)
    assert len(examples) == 2
    for command, output in examples:
        translate.main(shlex.split(command))
        printed = capsys.readouterr()
        assert output == printed.out + printed.err


def test_a_refusal_is_told_by_the_exit_status_and_keeps_run_from_serving(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "vllm serve m --hf-overrides x"
    assert translate.main(["--", command]) == 1
    assert "penstock serve m" in capsys.readouterr().out
    assert translate.main(["--run", "--", command]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "differ without --hf-overrides" in printed.err) == ("", True)


def test_no_bound_of_log_probabilities_is_none_here() -> None:
    result = read("vllm serve m --max-logprobs -1")
    assert "--max-logprobs -1" in " ".join(result.arguments)
    check_parses(result)


def test_a_path_stays_the_name_that_clients_ask_for() -> None:
    assert read("vllm serve /models/a").shard[-2:] == ["--served-model-name", "/models/a"]
    assert "/models/a" not in read("vllm serve /models/a --served-model-name a").shard
    assert "--served-model-name" not in read("vllm serve org/a").shard


def test_the_bounds_of_memory_and_of_bodies_are_kept() -> None:
    result = read("VLLM_HTTP_MAX_REQUEST_BODY_SIZE=99 vllm serve m --kv-offloading-size 0.5")
    assert result.shard == ["--kv-host-bytes", "512M"]
    assert result.router[2:] == ["--max-body-bytes", "99"]
    result = read("VLLM_HTTP_MAX_REQUEST_BODY_SIZE=0 vllm serve m --kv-offloading-size 0")
    assert (result.shard, result.router[2:]) == ([], [])
    assert of(result, "VLLM_HTTP_MAX_REQUEST_BODY_SIZE")[0] is Loss.LOST


def test_threads_and_sizes_are_read_as_vllm_reads_them() -> None:
    assert vllm_environment._threads("0-31|32-63") == "32"
    assert vllm_environment._threads("auto") is None
    assert vllm_environment._gibibytes("40") == "40G"
    assert [flag_rules.readable_int(text) for text in ("8", "1k", "1K", "25.6k", "2M")] == [
        *("8", "1000", "1024", "25600", "2097152")
    ]
    assert tgi_flags._batched_tokens("50") == "256"
