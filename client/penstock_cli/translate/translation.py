"""Translates another server's flags and variables to arguments of `penstock serve`."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock_cli.translate import tgi_flags, vllm_environment, vllm_flags
from penstock_cli.translate.docker_run import DockerError, DockerRun, is_path, parse_docker_run
from penstock_cli.translate.flag_rules import (
    Loss,
    NotTranslatable,
    Part,
    Rule,
    Table,
    Takes,
    rule_of,
)
from penstock_common.shared_flags import model_name

_OFF = frozenset({"0", "false", "f", "n", "no", "off", ""})
_INVERSES = {"enable": "disable", "disable": "enable"}
_EVERYWHERE = "0.0.0.0"


class UnknownCommand(Exception):
    """The command line is not a known server's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server other than penstock: its flags and defaults."""

    name: str
    version: str
    flags: Table
    short: Mapping[str, str]
    environment: Table
    defaults: Mapping[str, str]
    flags_are_variables: bool
    # True if --disable-x switches --enable-x off, and the reverse.
    has_inverses: bool
    # The value of --metrics-names for this server's metrics.
    metrics_names: str
    # Variables that the server's image sets; below, its folder for models.
    image_environment: Mapping[str, str]
    image_home: str


VLLM = Peer(
    name="vLLM",
    version=vllm_flags.VERSION,
    flags=vllm_flags.FLAGS,
    short=vllm_flags.SHORT,
    environment=vllm_environment.ENVIRONMENT,
    defaults={"model": "Qwen/Qwen3-0.6B", "host": _EVERYWHERE},
    flags_are_variables=False,
    has_inverses=True,
    metrics_names="vllm",
    image_environment={},
    image_home="/root/.cache/huggingface",
)
TGI = Peer(
    name="TGI",
    version=tgi_flags.VERSION,
    flags=tgi_flags.FLAGS,
    short=tgi_flags.SHORT,
    environment=tgi_flags.ENVIRONMENT,
    defaults={"model-id": "bigscience/bloom-560m", "hostname": _EVERYWHERE, "port": "3000"},
    flags_are_variables=True,
    has_inverses=False,
    metrics_names="tgi",
    image_environment={"PORT": "80"},
    image_home="/data",
)


@dataclass(frozen=True, slots=True)
class Remark:
    subject: str
    loss: Loss
    text: str


@dataclass(slots=True)
class Translation:
    model: str = ""
    copies: int = 1
    # GPUs of each shard.
    devices: int = 1
    serve: list[str] = field(default_factory=list)
    shard: list[str] = field(default_factory=list)
    router: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        copies = ["--shards", str(self.copies)] if self.copies > 1 else []
        after = ["--", *self.router] if self.router else []
        devices = ["--tensor-parallel-size", str(self.devices)] if self.devices > 1 else []
        return [self.model, *self.serve, *copies, *devices, *self.shard, *after]

    @property
    def refused(self) -> bool:
        return any(remark.loss is Loss.REFUSED for remark in self.remarks)

    def remark(self, subject: str, loss: Loss, text: str) -> None:
        self.remarks.append(Remark(subject, loss, text))


@dataclass(frozen=True, slots=True)
class Given:
    """A flag that was given. `subject`: its name as the user wrote it."""

    name: str
    subject: str
    values: tuple[str, ...] = ()
    negated: bool = False


def translate(
    peer: Peer,
    words: Sequence[str],
    variables: Mapping[str, str],
    gpus: int,
    *,
    ambient: Mapping[str, str] | None = None,
) -> Translation:
    """Translate the words after a server's name.

    `variables` were given with the command. `ambient` is the rest of the environment: it stays set,
    so only variables that lose their effect are reported.
    """
    # Keep existing dashboards and autoscalers working.
    result = Translation(router=["--metrics-names", peer.metrics_names])
    around = {name: value for name, value in (ambient or {}).items() if name not in variables}
    for given in _flags(peer, words, {**around, **variables}, gpus, result).values():
        _apply(peer.flags[given.name], given, result)
    for name, value in {**around, **variables}.items():
        rule = rule_of(name, peer.environment)
        if rule is not None and not value and rule.to != name:
            # Compose files pass unset variables on as empty ones.
            continue
        if rule is not None and not (name in around and _goes_without_saying(rule, name)):
            _apply(rule, Given(name, name, (value,)), result)
        elif rule is None and name in variables and not _is_flag(peer, name):
            result.environment[name] = value
    is_named = "--served-model-name" in result.shard
    if result.model and not is_named and model_name(result.model) != result.model:
        # The other server's clients ask for a model by its path.
        result.shard += ["--served-model-name", result.model]
    return result


def _flags(
    peer: Peer, words: Sequence[str], variables: Mapping[str, str], gpus: int, result: Translation
) -> dict[str, Given]:
    """Return flags in effect, by name: from arguments, variables, and defaults."""
    flags = {name: Given(name, f"--{name}", (value,)) for name, value in peer.defaults.items()}
    if peer.flags_are_variables:
        flags |= {given.name: given for given in _flags_of(peer, variables)}
    for given in _read_flags(peer, words, result):
        before = flags.get(given.name)
        if before is not None and peer.flags[given.name].repeats:
            given = replace(given, values=before.values + given.values)
        flags[given.name] = given
    _mend(peer, flags, gpus)
    return flags


def _goes_without_saying(rule: Rule, name: str) -> bool:
    """True if an ambient variable needs no remark: it has the same name here, or no effect."""
    return rule.to == name or (rule.loss is Loss.NONE and bool(rule.why))


def translate_docker(words: Sequence[str], ambient: Mapping[str, str], gpus: int) -> Translation:
    """Return a command for the host itself."""
    run = parse_docker_run(words, ambient)
    peer = _peer_of_image(run.image)
    flags = run.arguments[2:] if run.arguments[:2] == ["vllm", "serve"] else run.arguments
    if flags[:1] == ["text-generation-launcher"]:
        flags = flags[1:]
    variables = {**peer.image_environment, **run.environment}
    result = translate(peer, [run.host_path(word) for word in flags], variables, gpus)
    _publish(run, result)
    if home := run.mounts.get(peer.image_home):
        if is_path(home):
            result.environment.setdefault("HF_HOME", home)
        else:
            result.remark(f"volume {home}", Loss.LOST, "is docker's; models are kept below HF_HOME")
    if gpus_chosen := _chosen_gpus(run.gpus):
        result.environment.setdefault("CUDA_VISIBLE_DEVICES", gpus_chosen)
    if run.others:
        result.remark(
            " ".join(dict.fromkeys(run.others)),
            Loss.NONE,
            "concerns the container; to keep it, change nothing but the image (deploy/README.md)",
        )
    return result


def _peer_of_image(image: str) -> Peer:
    if "text-generation-inference" in image:
        return TGI
    if "vllm" in image:
        return VLLM
    raise DockerError(f"{image} is no image of vLLM or text-generation-inference")


def _publish(run: DockerRun, result: Translation) -> None:
    if "--port" not in result.serve:
        result.serve += ["--port", "8000"]
    place = result.serve.index("--port") + 1
    address, result.serve[place] = run.published(result.serve[place])
    if address:
        result.serve[result.serve.index("--host") + 1] = address


def _chosen_gpus(text: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for docker's --gpus; "" for all GPUs."""
    text = text.strip("\"'")
    if text.isdigit():
        return ",".join(map(str, range(int(text))))
    return text.removeprefix("device=") if text.startswith("device=") else ""


# ---- reading ------------------------------------------------------------------------------------


def _read_flags(peer: Peer, words: Sequence[str], result: Translation) -> Iterator[Given]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            model = next(name for name, rule in peer.flags.items() if rule.part is Part.MODEL)
            yield Given(model, word, (word,))
            continue
        name, negated, attached = _name(peer, word)
        rule = peer.flags.get(name)
        if rule is None:
            result.remark(word, Loss.REFUSED, f"is no flag of {peer.name} {peer.version}")
            while rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        subject = word.partition("=")[0]
        yield Given(name, subject, _values(rule.takes, attached, rest), negated)


def _name(peer: Peer, word: str) -> tuple[str, bool, str | None]:
    """Return the flag's name, true if the flag is switched off, and a value in the same word, if
    any.
    """
    flag, equals, value = word.partition("=")
    attached = value if equals else None
    # A part after a dot, as in --compilation-config.mode, is a key of an object.
    flag = flag.partition(".")[0]
    if not flag.startswith("--"):
        if flag in peer.short:
            return peer.short[flag], False, attached
        # For example -O3 or -p80.
        return peer.short.get(flag[:2], flag), False, flag[2:] or attached
    name = flag[2:].replace("_", "-")
    if name.startswith("no-") and name[3:] in peer.flags:
        return name[3:], True, attached
    if name not in peer.flags and (inverse := _inverse(peer, name)):
        return inverse, True, attached
    return name, False, attached


def _inverse(peer: Peer, name: str) -> str | None:
    """Return the flag that this one switches off."""
    word, _, rest = name.partition("-")
    if not peer.has_inverses or word not in _INVERSES:
        return None
    inverse = f"{_INVERSES[word]}-{rest}"
    rule = peer.flags.get(inverse)
    return inverse if rule is not None and rule.takes is Takes.NOTHING else None


def _values(takes: Takes, attached: str | None, rest: list[str]) -> tuple[str, ...]:
    if attached is not None:
        return (attached,)
    most = {Takes.NOTHING: 0, Takes.VALUES: math.inf}.get(takes, 1)
    values: list[str] = []
    while rest and len(values) < most:
        if rest[0].startswith("-") and takes is not Takes.VALUE:
            break
        values.append(rest.pop(0))
    return tuple(values)


def _flags_of(peer: Peer, variables: Mapping[str, str]) -> Iterator[Given]:
    for name, rule in peer.flags.items():
        variable = _variable(name)
        if not variables.get(variable) or not _is_flag(peer, variable):
            continue
        value = variables[variable]
        if rule.takes is Takes.NOTHING:
            yield Given(name, variable, negated=value.lower() in _OFF)
        else:
            yield Given(name, variable, (value,))


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


def _is_flag(peer: Peer, variable: str) -> bool:
    # TGI's --env is its only flag without a variable.
    name = variable.lower().replace("_", "-")
    return peer.flags_are_variables and name in peer.flags and name != "env"


def _mend(peer: Peer, flags: dict[str, Given], gpus: int) -> None:
    """Adjust flags whose meaning depends on other flags, or on how they were given."""
    if peer is not TGI:
        return
    host = flags["hostname"]
    if host.subject == "HOSTNAME" and not _is_address(host.values[0]):
        # Every container has a HOSTNAME; TGI then listens on all addresses.
        flags["hostname"] = replace(host, values=(_EVERYWHERE,))
    if "sharded" in flags and flags["sharded"].values == ("false",):
        flags.pop("num-shard", None)
    elif "num-shard" not in flags and gpus > 1:
        flags["num-shard"] = Given("num-shard", "--num-shard", (str(gpus),))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# ---- applying ------------------------------------------------------------------------------------


def _apply(rule: Rule, given: Given, result: Translation) -> None:
    value = given.values[0] if given.values else ""
    if rule.why:
        asks_for_nothing = given.negated or value.lower() in rule.harmless
        if not (asks_for_nothing and rule.loss is not Loss.NONE):
            result.remark(given.subject, rule.loss, rule.why)
        return
    # A variable's value may be empty: CUDA_VISIBLE_DEVICES="" means no GPU.
    empty = not given.values if rule.part is Part.ENVIRONMENT else not any(given.values)
    if rule.takes in (Takes.VALUE, Takes.VALUES) and empty:
        result.remark(given.subject, Loss.REFUSED, "has no value")
        return
    try:
        words = _words(rule, given)
    except NotTranslatable as error:
        result.remark(given.subject, error.loss, str(error))
    except (ValueError, OverflowError):
        result.remark(given.subject, Loss.REFUSED, f"{value!r} is no value for it")
    else:
        if words is not None:
            _place(rule, given, words, result)


def _words(rule: Rule, given: Given) -> list[str] | None:
    """Return the words of our flag; None if it is left out."""
    flag = rule.to.split()
    if rule.takes is Takes.NOTHING:
        if not flag[0].startswith("--[no-]"):
            return None if given.negated else flag
        return ["--" + ("no-" if given.negated else "") + flag[0].removeprefix("--[no-]")]
    parts = given.values
    if rule.separator:
        parts = tuple(part for value in parts for part in value.split(rule.separator) if part)
    values = [rule.convert(part) for part in parts]
    if None in values:
        return None
    if rule.joins:
        return [*flag, ",".join(map(str, values))]
    if rule.repeats:
        return [word for value in values for word in (*flag, str(value))]
    return [*flag, *(value for value in values if value)]


def _place(rule: Rule, given: Given, words: list[str], result: Translation) -> None:
    if rule.part is Part.MODEL:
        result.model = words[1]
    elif rule.part is Part.COPIES:
        result.copies *= int(words[1])
    elif rule.part is Part.DEVICES:
        result.devices *= int(words[1])
    elif rule.part is Part.ENVIRONMENT:
        result.environment[rule.to] = words[1] if len(words) > 1 else ""
        if len(words) > 2:
            why = "takes one here; --api-keys-file takes more"
            result.remark(given.subject, Loss.BY_HAND, why)
    elif rule.part is Part.SERVE:
        result.serve += words
    else:
        if rule.part is not Part.ROUTER:
            result.shard += words
        if rule.part is not Part.SHARD:
            result.router += words
