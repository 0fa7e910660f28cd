"""Renders messages with the model's own jinja template, in a sandbox.

The text equals that of `transformers`, even if the answer continues the last message. A template is
untrusted code: it cannot reach Python's internals, and its exceptions become errors for the client.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

from penstock_router.errors import BadRequest, TemplateFailed
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.probes import probe
from penstock_router.text.template_fit.scenes import TOOL, with_image
from penstock_router.text.template_fit.thinking import fit_thinking
from penstock_router.text.template_fit.traits import TemplateTraits

# The last space shows whether the template strips trailing whitespace.
_CONTINUE_HERE = "\ue000continue-here\ue001 "

# SmolLM3 uses xml_tools.
_TOOL_VARIABLES = frozenset({"tools", "xml_tools"})

CHAT_TEMPLATE_FILE = "chat_template.jinja"
# The folder of further templates; a file's name is its template's name.
_MORE_TEMPLATES = "additional_chat_templates/"


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders the text inside `{% generation %}` tags, which matter only in training."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """The `dict` of templates: it lacks the attributes of Python's class, except `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The `namespace` of templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # A template may use namespace(self=...), so this method's own parameters have no names.
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store the name {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, but no model was trained on escaped text.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _variables(environment: jinja2.Environment, source: str) -> set[str]:
    return jinja2.meta.find_undeclared_variables(environment.parse(source))


# Jinja compiles templates to Python, which refuses some code that jinja accepts.
_UNCOMPILED = (
    jinja2.exceptions.TemplateError,
    SyntaxError,
    ValueError,
    RecursionError,
    MemoryError,
)


def _why(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        # Leave out the line number, which refers to generated code.
        return error.msg
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply"
    return str(error)


class TemplateUnusable(Exception):
    """Raised if a template or its configuration does not parse; the text says which and why."""


class ChatTemplate:
    """A model's compiled chat templates."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        # Template variables for special tokens, named as in tokenizer_config.json.
        self.special_tokens = dict(special_tokens)
        self.source = sources.get("default", "")
        self._sources = dict(sources)
        self._templates: dict[str, jinja2.Template] = {}
        self._traits: dict[bool, TemplateTraits] = {}
        self._takes_images: dict[tuple[str, bool, bool], bool] = {}
        # The variables that the tools template reads, and those among them that hold tools.
        self._variables: set[str] = set()
        self._tool_variables: set[str] = set()
        self._levels: dict[tuple[str, str], bool] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                if source == self.tools_source:
                    self._variables = _variables(environment, source)
                    self._tool_variables = self._variables & _TOOL_VARIABLES
            except _UNCOMPILED as error:
                raise TemplateUnusable(f"chat template {name!r}: {_why(error)}") from None

    @property
    def takes_tools(self) -> bool:
        """Tell whether the tools template reads tools."""
        return bool(self._tool_variables)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._templates)

    @property
    def tools_source(self) -> str:
        """The source of the template for requests with tools."""
        return self._sources.get("tool_use", self.source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt's text. An exception in the template becomes a `BadRequest`."""
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        variables = {
            **self.special_tokens,
            **dict.fromkeys(self._tool_variables, tools),
            **(kwargs or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _rendered(self._pick(tools), variables)
        return _cut_at_mark(text) if continue_final_message else text

    def thinking(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add this template's own variables, set to the thinking that the request wants."""
        return fit_thinking(kwargs, self._variables, self._takes_level)

    def _takes_level(self, name: str, level: str) -> bool:
        """Tell whether the template renders with this thinking level and, except for low, medium
        and high, has the level's name in its source.
        """
        if (name, level) not in self._levels:
            self._levels[name, level] = self._shows_level(name, level)
        return self._levels[name, level]

    def _shows_level(self, name: str, level: str) -> bool:
        try:
            self.render([{"role": "user", "content": "Hi"}], kwargs={name: level})
        except BadRequest:
            return False
        is_named = any(f"{quote}{level}{quote}" in self.tools_source for quote in "'\"")
        return is_named or level in ("low", "medium", "high")

    def traits(self, *, with_tools: bool) -> TemplateTraits:
        """Return the form of messages that the template expects; the template is probed once."""
        named = "tool_use" in self._templates
        with_tools = with_tools and named
        if with_tools not in self._traits:
            source = self.tools_source if with_tools else self.source
            ways = (with_tools,) if named or not self.takes_tools else (False, True)
            self._traits[with_tools] = probe(self, source, ways)
        return self._traits[with_tools]

    def takes_images(self, role: str, anchor: str, *, with_tools: bool) -> bool:
        """Tell whether the template writes `anchor` for an image in messages of this role. The
        result is cached.
        """
        is_result, with_tools = role == "tool", with_tools and "tool_use" in self._templates
        key = anchor, is_result, with_tools
        if key not in self._takes_images:
            messages = fit(with_image(is_result=is_result), self.traits(with_tools=with_tools))
            try:
                text = self.render(messages, tools=[TOOL] if with_tools else None)
            except BadRequest:
                text = ""
            self._takes_images[key] = anchor in text
        return self._takes_images[key]

    def _pick(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise BadRequest(
            f"the model has chat templates named {', '.join(sorted(self._templates))} and no "
            "default; start the router with --chat-template",
            param="messages",
        )


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        text = template.render(variables)
    except jinja2.exceptions.TemplateError as error:
        text = f"the chat template refused the messages: {error}"
        raise TemplateFailed(text, param="messages") from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        # For example, the template adds a string to a missing value.
        text = f"the chat template cannot render these messages: {error}"
        raise TemplateFailed(text, param="messages") from None
    except (ArithmeticError, AssertionError, LookupError, NameError, RuntimeError):
        text = "the chat template cannot render these messages"
        raise TemplateFailed(text, param="messages") from None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X}"
        raise TemplateFailed(
            f"chat_template: it makes {character}, half of a surrogate pair, which is no character",
            param="chat_template",
        ) from None
    return text


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and content and "text" in content[-1]:
        *before, last = content
        return {**message, "content": [*before, {**last, "text": last["text"] + _CONTINUE_HERE}]}
    if not isinstance(content, str):
        text = "continue_final_message: the last message has no content to continue"
        raise BadRequest(text, param="continue_final_message")
    return {**message, "content": content + _CONTINUE_HERE}


def _cut_at_mark(text: str) -> str:
    """Return the text before the mark; after it, the template only ends the last message."""
    head, mark, tail = text.rpartition(_CONTINUE_HERE.strip())
    if not mark:
        raise BadRequest(
            "continue_final_message: the chat template does not show the last message",
            param="continue_final_message",
        )
    # A template that strips the mark's space would also strip the message's own.
    return head if tail.startswith(" ") else head.rstrip()


# ---- Where the template comes from -------------------------------------------------------------


def with_template(files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    """Replace all templates among a model's files with this one."""
    others = {name: data for name, data in files.items() if not name.startswith(_MORE_TEMPLATES)}
    return {**others, CHAT_TEMPLATE_FILE: source.encode()}


def load_chat_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """Load the model's templates; None if it has none.

    The default template is in `CHAT_TEMPLATE_FILE`, or else in tokenizer_config.json: a string or a
    list of named templates. Files in `_MORE_TEMPLATES` add further named templates.
    """
    config = _decoded(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # transformers reads this file too if tokenizer_config.json has the older form.
        config |= _decoded(files, "special_tokens_map.json")
    special_tokens = _special_tokens(config)
    if CHAT_TEMPLATE_FILE in files:
        sources = {"default": files[CHAT_TEMPLATE_FILE].decode("utf-8", "replace")}
    else:
        sources = _configured_sources(config.get("chat_template"))
    for name, data in files.items():
        if name.startswith(_MORE_TEMPLATES):
            named = name.removeprefix(_MORE_TEMPLATES).removesuffix(".jinja")
            sources[named] = data.decode("utf-8", "replace")
    return ChatTemplate(sources, special_tokens) if sources else None


def _decoded(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    data = files.get(name)
    if not data:
        return {}
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise TemplateUnusable(f"{name} is not valid JSON") from None
    return value if isinstance(value, dict) else {}


def _configured_sources(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    if isinstance(value, list):
        try:
            return {str(item["name"]): str(item["template"]) for item in value}
        except (KeyError, TypeError):
            text = "tokenizer_config.json: chat_template is no list of names and templates"
            raise TemplateUnusable(text) from None
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and others. In the file each is a string or an object."""
    tokens: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **config}
    for name, value in entries.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
