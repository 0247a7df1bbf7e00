"""A model's chat template: messages to the text of a prompt, by the rules that `transformers` renders templates with.

The rules: a sandbox that changes nothing, blocks trimmed on both sides, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves HTML alone, `{% generation %}` as a block without effect, the tokenizer's special
tokens as variables.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from common.errors import ConfigError, RequestError
from node.tokenizer import load_json

MAX_PROMPT_CHARACTERS = 64 * 1024 * 1024
"""That a template may make of one request."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """Made by `load_chat_template`. source: the template's text. tool_source: that for requests with tools.

    stop_strings: with which an answer in a chat ends, besides the end token: generation_config.json's.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        self.source = source
        self.tool_source = tool_source or source
        self.stop_strings = tuple(stop_strings)
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)
        self._tool_template = environment.from_string(tool_source) if tool_source is not None else self._template

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. variables: whatever else the template knows (`enable_thinking`, …). Raises RequestError."""
        template = self._tool_template if tools else self._template
        known = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        parts, size = [], 0
        try:
            for part in template.generate(known):
                parts.append(part)
                size += len(part)
                if size > MAX_PROMPT_CHARACTERS:
                    break
        except Exception as error:  # a template is a program: it fails with whatever Python raises
            raise RequestError(f"messages: the chat template does not take them: {error}", param="messages") from error
        if size > MAX_PROMPT_CHARACTERS:
            raise RequestError(f"messages: a prompt of more than {MAX_PROMPT_CHARACTERS} characters", param="messages")
        return "".join(parts)


def load_chat_template(model_path: str, file: str | None) -> ChatTemplate | None:
    """The template of `file`, else chat_template.jinja's, else tokenizer_config.json's; None when there is none.

    Raises ConfigError when the file cannot be read or is no template.
    """
    folder = Path(model_path)
    config = load_json(folder / "tokenizer_config.json")
    path = Path(file) if file is not None else folder / "chat_template.jinja"
    setting = f"--chat-template {file}" if file is not None else f"--model-path {model_path}"
    param = "chat_template" if file is not None else "model_path"
    try:
        if file is not None or path.is_file():
            default, for_tools = _named_templates(path.read_text(encoding="utf-8"))
        else:
            default, for_tools = _named_templates(config.get("chat_template"))
        if default is None:
            return None
        tokens, stops = _special_tokens(folder, config), _stop_strings(folder)
        return ChatTemplate(default, tokens, tool_source=for_tools, stop_strings=stops)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {error}", param=param) from error
    except jinja2.TemplateSyntaxError as error:
        message = f"{setting}: no chat template: line {error.lineno}: {error.message}"
        raise ConfigError(message, param=param) from error


def _named_templates(found: object) -> tuple[str | None, str | None]:
    """(the template, that for requests with tools) of what may be one, or a list of several by name."""
    match found:
        case str():
            return found, None
        case list():
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            return named.get("default"), named.get("tool_use")
        case _:
            return None, None


def _stop_strings(folder: Path) -> list[str]:
    found = load_json(folder / "generation_config.json").get("stop_strings")
    return [stop for stop in (found if isinstance(found, list) else [found]) if isinstance(stop, str) and stop]


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By the name that templates know them under; a token is a string, or an object with its `content`."""
    found = {**load_json(folder / "special_tokens_map.json"), **config}
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = found.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


# -- what templates may use --------------------------------------------------------------------------------------------


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks what the model says, for training, is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
