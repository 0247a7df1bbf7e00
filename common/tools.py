"""Tools of a chat request, and the calls of them that a model writes into its answer.

    Hermes, Qwen   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>   once for each call
    Nemotron 3     <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>   the same
    Nemotron       <TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>
    plain          [{"name": "f", "arguments": {…}}, …]   the whole answer, where the grammar forces a call on a model
                                                           whose chat template has no form for it

`common.constraints` makes the grammar of a forced call; this file reads calls out of a text as it comes.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Container
from typing import Any, NamedTuple

import msgspec

from common import tagged_calls
from common.errors import RequestError
from common.markers import length_of_beginning

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")


class ToolFormat(enum.StrEnum):
    """How a model writes a call."""

    HERMES = "hermes"
    TAGS = "tags"
    NEMOTRON = "nemotron"
    PLAIN = "plain"

    @property
    def markers(self) -> tuple[str, str]:
        """What stands around calls; empty where nothing does."""
        match self:
            case ToolFormat.HERMES | ToolFormat.TAGS:
                return "<tool_call>", "</tool_call>"
            case ToolFormat.NEMOTRON:
                return "<TOOLCALL>", "</TOOLCALL>"
            case ToolFormat.PLAIN:
                return "", ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. parameters: JSON schema of its arguments, which hold always if strict, else
    in calls that are forced."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat request says of tools. raw: as the client wrote them, for the chat template; empty when choice is
    none (the model is then not told of them). choice: none, auto or required. named: the one function to be called."""

    raw: list[dict[str, Any]] = []
    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))


NO_TOOLS = ToolRequest()


def read_tools(body: dict[str, Any]) -> ToolRequest:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat request. Raises RequestError that names the field."""
    raw, parallel = body.get("tools"), body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise _refused("parallel_tool_calls", "it must be true or false")
    if raw is not None and (not isinstance(raw, list) or len(raw) > MAX_TOOLS):
        raise _refused("tools", f"it must be a list of at most {MAX_TOOLS} tools")
    tools = tuple(_read_tool(f"tools[{i}]", item) for i, item in enumerate(raw or ()))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _refused(f"tools[{i}].function.name", f"{name} is the name of another tool too")
    choice, named = _read_choice(body.get("tool_choice"), names)
    if choice == "none":
        return NO_TOOLS
    return ToolRequest(raw=raw or [], tools=tools, choice=choice, named=named, parallel=parallel is not False)


def _read_choice(value: Any, names: list[str]) -> tuple[str, str | None]:
    """(none, auto or required; the function that must be called)."""
    if value is None:
        return ("auto" if names else "none"), None
    if value == "none" or (value == "auto" and not names):
        return "none", None
    if not names:
        raise _refused("tool_choice", "there are no tools to choose from")
    if isinstance(value, str) and value in _CHOICES:
        return value, None
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise _refused("tool_choice", 'it must be none, auto, required or {"type":"function","function":{"name":…}}')
    if function.get("name") not in names:
        raise _refused("tool_choice.function.name", "it must be the name of one of the tools")
    return "required", function["name"]


def _read_tool(where: str, value: Any) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise _refused(where, "it must be an object of type function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise _refused(f"{where}.function", "it must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refused(f"{where}.function.name", "it must be 1 to 64 of the characters a-z, A-Z, 0-9, _, -, .")
    if parameters is not None and not isinstance(parameters, dict):
        raise _refused(f"{where}.function.parameters", "it must be a JSON schema, an object")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise _refused(f"{where}.function.parameters.type", "it must be object, as arguments are")
    for field, kind in (("description", str), ("strict", bool)):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise _refused(f"{where}.function.{field}", f"it must be a {'string' if kind is str else 'boolean'}")
    schema = {"type": "object", **(parameters or {})}
    return Tool(name=name, parameters=schema, strict=function.get("strict") is True)


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}", param=param)


def tool_format(template: str | None) -> ToolFormat:
    """How the model of this chat template (its source) writes calls."""
    for form in (ToolFormat.HERMES, ToolFormat.NEMOTRON):
        if template is not None and form.markers[0] in template:
            return ToolFormat.TAGS if form is ToolFormat.HERMES and tagged_calls.OPEN in template else form
    return ToolFormat.PLAIN


def check_template(request: ToolRequest, template: str | None) -> None:
    """Raises RequestError where the model would not be told of its tools: a template that does not speak of them.

    A call that is forced needs no telling.
    """
    if request.choice == "auto" and (template is None or not re.search(r"\btools\b", template)):
        raise RequestError(
            "tools: the model's chat template knows none; only tool_choice required or a named function works with it",
            code="unsupported_parameter",
            param="tools",
        )


# -- calls in a text ---------------------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True):
    """index: its place among the calls of the answer. arguments: JSON, as the model wrote it."""

    index: int
    id: str
    name: str
    arguments: str


class ToolPiece(NamedTuple):
    """What a piece of text adds: content, and calls that are complete."""

    content: str
    calls: list[ToolCall]


class ToolSplitter:
    """Fed an answer's text piece by piece. rid: calls are named after it, so that the same text gets the same names.

    What is given out, put together, does not depend on where the text was cut. What looks like a call but is none
    (broken JSON, a function that is not among the tools, cut short) stays content. White space beside calls is dropped.
    """

    def __init__(self, form: ToolFormat, request: ToolRequest, rid: str) -> None:
        self._open, self._close = form.markers
        self._form = form
        self._parameters = {tool.name: tool.parameters for tool in request.callable}
        self._most = None if request.parallel else 1
        self._rid = rid
        self._inside = not self._open and request.is_forced
        self._gap = ""  # white space in front of the call that is being read
        self._searched = 0
        self._held = ""
        self.num_calls = 0

    def push(self, text: str) -> ToolPiece:
        return self._take(text, is_last=False)

    def finish(self) -> ToolPiece:
        return self._take("", is_last=True)

    def _take(self, text: str, *, is_last: bool) -> ToolPiece:
        self._held += text
        content, calls = "", list[ToolCall]()
        while True:
            inside = self._inside
            if inside:
                more, found = self._read_call(is_last)
                calls += found
            else:
                more = self._read_content(is_last)
            content += more
            if self._inside == inside:
                return ToolPiece(content, calls)

    def _read_content(self, is_last: bool) -> str:
        before, marker, after = self._held.partition(self._open) if self._open else (self._held, "", "")
        if marker:
            shown = before.rstrip()
            self._held, self._inside, self._searched, self._gap = after, True, 0, before[len(shown) :]
            return shown
        end = len(before) - (0 if is_last else length_of_beginning(before, self._open))
        shown = before if is_last and not self.num_calls else before[:end].rstrip()
        self._held = "" if is_last else before[len(shown) :]
        if self.num_calls and not shown.strip():
            return ""
        return shown

    def _read_call(self, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Content and calls of what stands inside markers, once the closing one is here."""
        at = self._held.find(self._close, self._searched) if self._close else -1
        if at < 0 and not is_last:
            self._searched = max(0, len(self._held) - len(self._close))
            return "", []
        body = self._held[:at] if at >= 0 else self._held
        found = self._calls_in(body)
        if found is None and at >= 0 and not is_last and self._is_cut(body):  # the marker is part of a string
            self._searched = at + len(self._close)
            return "", []
        self._inside = False
        end = at + len(self._close) if at >= 0 else len(self._held)
        text, self._held = self._gap + self._open + self._held[:end], self._held[end:]
        return (text, []) if found is None else ("", self._named(found))

    def _calls_in(self, body: str) -> list[tuple[str, str]] | None:
        if self._form is not ToolFormat.TAGS:
            return _read_calls(body, self._parameters.keys())
        call = tagged_calls.read_tagged_call(body, self._parameters)
        return None if call is None else [call]

    def _is_cut(self, body: str) -> bool:
        if self._form is not ToolFormat.TAGS:
            return _is_cut(body)
        return body.lstrip().startswith(tagged_calls.OPEN) and not body.rstrip().endswith(tagged_calls.CLOSE)

    def _named(self, found: list[tuple[str, str]]) -> list[ToolCall]:
        calls = []
        for name, arguments in found:
            if self._most is None or self.num_calls < self._most:
                calls.append(ToolCall(self.num_calls, _call_id(self._rid, self.num_calls), name, arguments))
                self.num_calls += 1
        return calls


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _read_calls(body: str, names: Container[str]) -> list[tuple[str, str]] | None:
    """(name, arguments) of each call; None when this is no call of a known function."""
    try:
        found = msgspec.json.decode(body, type=_Call | list[_Call])
        calls = [(call.name, _arguments(call.arguments)) for call in (found if isinstance(found, list) else [found])]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return calls if calls and all(name in names for name, _ in calls) else None


def _arguments(raw: msgspec.Raw) -> str:
    """The JSON object of the arguments; some models write it as a string. Raises DecodeError."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return text


def _is_cut(body: str) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return "truncated" in str(error)
    return False


def _call_id(rid: str, index: int) -> str:
    return "call_" + hashlib.blake2b(f"{rid}/{index}".encode(), digest_size=12).hexdigest()
