"""`penstock translate`: turns command lines of vLLM or text-generation-inference into penstock's.

Prints `penstock serve ...`, and a line for each flag without a counterpart; or runs the command at
once, as the all-in-one image does. `vllm_flags`, `vllm_environment` and `tgi_flags` have the rules.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NoReturn

from penstock_cli.arguments import parser_for
from penstock_cli.gpus import visible_gpus
from penstock_cli.translate.docker_run import ENGINES, DockerError
from penstock_cli.translate.drop_root import drop_root
from penstock_cli.translate.flag_rules import Loss
from penstock_cli.translate.translation import (
    TGI,
    VLLM,
    Peer,
    Translation,
    UnknownCommand,
    translate,
    translate_docker,
)
from penstock_common.shared_flags import USAGE_STATUS

_FORMS = (
    "vllm serve ..., python -m vllm.entrypoints.openai.api_server ..., "
    "text-generation-launcher ..., or docker run ... of an image of either"
)
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_WORDS_ON_A_LINE = 90


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("translate", "Turn a command line of vLLM or TGI into one of penstock.")
    parser.usage = "penstock translate [--run] [FLAGS OF penstock serve] -- COMMAND ..."
    parser.epilog = (
        f"COMMAND is {_FORMS}. Exit status 1 says that a flag is left out that would change "
        "answers. Other flags before `--` are added to those of penstock serve."
    )
    parser.add_argument(
        "--run", action="store_true", help="serve at once, and obey variables of TGI and vLLM"
    )
    parser.add_argument(
        "--drop-root",
        type=Path,
        metavar="DIR",
        help="with --run, if started as root: become the owner of DIR, where models are kept",
    )
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    args, added = parser.parse_known_args(arguments[:split])
    words = arguments[split + 1 :]
    try:
        if "--" not in arguments:
            raise UnknownCommand(
                "put -- before the command, as in: penstock translate -- vllm serve MODEL"
            )
        if len(words) == 1:
            # The command line is one quoted word.
            words = _split(words[0])
        result = read(words, os.environ, gpus=len(visible_gpus()), ambient=args.run)
    except (UnknownCommand, DockerError) as error:
        print(f"penstock translate: {error}", file=sys.stderr)
        return USAGE_STATUS
    result.serve += added
    _print_remarks(result)
    if args.run:
        return _run(result, args.drop_root)
    print(pretty(result))
    return 1 if result.refused else 0


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UnknownCommand(f"{text!r} is no command line ({error})") from None


def read(
    words: Sequence[str], environment: Mapping[str, str], *, gpus: int, ambient: bool
) -> Translation:
    """Translate a command line. If `ambient`, its server would also read our environment. Raise
    `UnknownCommand` or `DockerError` if the words are not the command of a known server.
    """
    given: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0] in ("env", "sudo", "exec") or _VARIABLE.match(rest[0])):
        name, equals, value = rest.pop(0).partition("=")
        if equals:
            given[name] = value
    if rest and PurePath(rest[0]).name in ENGINES:
        return translate_docker(rest[1:], {**environment, **given}, gpus)
    peer, flags = _recognize(rest)
    return translate(peer, flags, given, gpus, ambient=environment if ambient else {})


def _recognize(words: Sequence[str]) -> tuple[Peer, Sequence[str]]:
    program = PurePath(words[0]).name if words else ""
    if program == "vllm" and words[1:2] == ["serve"]:
        return VLLM, words[2:]
    if program.startswith("python") and list(words[1:3]) == [
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]:
        return VLLM, words[3:]
    if program == "text-generation-launcher":
        return TGI, words[1:]
    raise UnknownCommand(f"after -- give a command that is known: {_FORMS}")


def pretty(result: Translation) -> str:
    """Format the command, with one flag and its values on each line."""
    variables = [f"{name}={_quoted(value)}" for name, value in result.environment.items()]
    lines = [" ".join([*variables, "penstock", "serve"])]
    for word in result.arguments:
        text = _quoted(word)
        if (word.startswith("-") and lines[-1] != "  --") or len(lines[-1]) + len(
            text
        ) > _WORDS_ON_A_LINE:
            lines.append(f"  {text}")
        else:
            lines[-1] += f" {text}"
    return " \\\n".join(lines)


def _quoted(word: str) -> str:
    # Let the shell expand variables, such as $HF_TOKEN.
    if re.fullmatch(r"[\w@%+=:,./~-]*\$\{?\w+\}?[\w@%+=:,./-]*", word):
        return f'"{word}"'
    return word if re.fullmatch(r"~/[\w@%+=:,./-]*", word) else shlex.quote(word)


def _print_remarks(result: Translation) -> None:
    for remark in result.remarks:
        print(f"# {remark.subject}: {remark.loss.value}: {remark.text}", file=sys.stderr)


def _run(result: Translation, folder: Path | None) -> int:
    """Become `penstock serve`. If that is impossible, return the exit status."""
    if result.refused:
        names = ", ".join(r.subject for r in result.remarks if r.loss is Loss.REFUSED)
        print(f"penstock translate: not served, as answers would differ without {names}",
              file=sys.stderr)  # fmt: skip
    elif folder is None or _drop_root(folder):
        _become(result)
    return USAGE_STATUS


def _drop_root(folder: Path) -> bool:
    """Give up root; true if this process is no longer root."""
    try:
        problem = drop_root(folder)
    except OSError as error:
        print(f"penstock translate: cannot leave root for the owner of {folder} "
              f"({error.strerror}); start as another user, as with docker's --user",
              file=sys.stderr)  # fmt: skip
        return False
    if problem:
        print(f"penstock translate: {problem}", file=sys.stderr)
    return True


def _become(result: Translation) -> NoReturn:
    sys.stderr.flush()
    command = [sys.executable, "-m", "penstock_cli.main", "serve", *result.arguments]
    os.execve(sys.executable, command, {**os.environ, **result.environment})
