"""Folders as the families of hybrid models ship them: tokenizer, chat template and end tokens, as transformers reads
them, and through a node.

The vocabularies are tiny, the templates our own; what is theirs is the form: which files, which parts of a tokenizer in
which order, where special tokens lie, what a template is written with.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, GenerationConfig

from common.config import Role
from common.constraints import Thought, constraints
from common.reasoning import opens_thinking
from common.tools import ToolFormat, read_tools, tool_format
from engine.grammar import compile_grammar, load_tokens
from node.chat_template import load_chat_template
from node.tokenizer import ByteLevelDetokenizer, load_eos_token_ids, load_tokenizer
from tests.node.conftest import FakeNode, fake_node, node_config

# Qwen: what is last said is found from the end, thoughts of earlier turns are dropped, results of tools are a user's.
QWEN_CHAT = """\
{%- set state = namespace(last_query=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if state.searching and message.role == 'user' and message.content is string %}
        {%- set state.searching = false %}
        {%- set state.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall one in <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > state.last_query %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or said %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Granite: text is collected in variables, JSON is indented, a default system message, documents as a variable.
GRANITE_CHAT = """\
{%- set told = 'Functions, one a line, inside <tools></tools>:\\n<tools>' %}
{%- set fallback = 'You are a helpful assistant.' %}
{%- set system = namespace(text='') %}
{%- if tools %}
    {%- for tool in tools %}{%- set told = told + '\\n' + (tool | tojson) %}{%- endfor %}
    {%- set system.text = told ~ '\\n</tools>' ~ (tools | tojson(indent=4) | length) %}
{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {%- set system.text = system.text + '\\n' + (document | tojson(indent=2)) %}
    {%- endfor %}
{%- endif %}
{%- if messages[0].role != 'system' %}
    {{- '<|start_of_role|>system<|end_of_role|>' + fallback + system.text + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = namespace(value='') %}
    {%- if message.content is string %}
        {%- set content.value = message.content %}
    {%- elif message.content is iterable %}
        {%- for entry in message.content if entry.type == 'text' %}
            {%- set content.value = content.value + entry.text %}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == 'system' %}
        {{- '<|start_of_role|>system<|end_of_role|>' + content.value + system.text + '<|end_of_text|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|start_of_role|>user<|end_of_role|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content.value + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end_of_text|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.value }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""

# Falcon: begins with the begin token, one loop with filters.
FALCON_CHAT = """\
{{ bos_token }}
{%- if tools %}
{{ '<|im_start|>system\\nTools: ' }}{{ tools | map(attribute='function') | list | tojson }}{{ '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages -%}
<|im_start|>{{ message['role'] | lower }}
{{ message['content'] | trim }}
{%- for call in message.tool_calls | default([], true) %}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Nemotron 3: macros over mappings, calls as tags, a switch for thoughts, earlier thoughts cut.
NEMOTRON_CHAT = """\
{% macro others(values, known) %}
    {%- if values is mapping %}
        {%- for key in values if key not in known %}
            {%- set value = values[key] %}
            {{- '\\n<' ~ key ~ '>' ~ (value | tojson | safe if value is mapping or value is iterable and value is not
                string else value | string) ~ '</' ~ key ~ '>' }}
        {%- endfor %}
    {%- endif %}
{% endmacro %}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}
{%- set truncate = truncate_history_thinking if truncate_history_thinking is defined else true %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- set loop_messages = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|im_start|>system\\n' }}{{- messages[0]['content'] if messages[0]['role'] == 'system' else '' }}
{%- if tools is iterable and tools | length > 0 %}
    {{- '\\n\\n<tools>' }}
    {%- for tool in tools %}
        {%- set tool = tool.function if tool.function is defined else tool %}
        {{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
        {%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined %}
            {%- for name, fields in tool.parameters.properties | items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {{- others(fields, ['name']) }}{{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- others(tool, ['name', 'parameters']) }}{{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call><function=f><parameter=p>v</parameter></function></tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content | default('', true) %}
        {%- if message.reasoning_content is defined and message.reasoning_content is string %}
            {%- set content = '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' ~ content %}
        {%- elif '</think>' not in content %}
            {%- set content = '<think></think>' ~ content %}
        {%- endif %}
        {%- if truncate and loop.index0 < ns.last_user %}
            {%- set content = '<think></think>' ~ content.split('</think>')[-1].strip() %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' ~ content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' ~ name ~ '>\\n' }}
                {{- value | tojson | safe if value is mapping or value is sequence and value is not string else value }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' ~ ('<think>\\n' if enable_thinking else '<think></think>') }}
{%- endif %}
"""

WORDS = r"(?i:'s|'t|'re|'ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    QWEN_CHAT,
    GRANITE_CHAT,
    FALCON_CHAT,
    NEMOTRON_CHAT,
    "How many apples has Tom? Tom has 1234 apples.",
    "naïve €5 日本語",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """tokens: special ones in the order of their numbers, before the others or behind them. plain: added ones that are
    text of an answer. eos: names. inline: the template is in tokenizer_config.json. thinks: it opens a thought."""

    tokenizer_class: str
    chat: str
    tokens: tuple[str, ...]
    plain: tuple[str, ...]
    first: bool
    eos: tuple[str, ...]
    bos: str | None
    inline: bool
    thinks: bool
    calls: ToolFormat = ToolFormat.HERMES


FAMILIES = {
    "qwen3_next": Family(
        tokenizer_class="Qwen2Tokenizer",
        chat=QWEN_CHAT,
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        first=False,
        eos=("<|im_end|>", "<|endoftext|>"),
        bos=None,
        inline=True,
        thinks=False,
    ),
    "granitemoehybrid": Family(
        tokenizer_class="GPT2Tokenizer",
        chat=GRANITE_CHAT,
        tokens=("<|pad|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<tool_call>", "</tool_call>"),
        plain=(),
        first=False,
        eos=("<|end_of_text|>",),
        bos="<|end_of_text|>",
        inline=False,
        thinks=False,
    ),
    "falcon_h1": Family(
        tokenizer_class="PreTrainedTokenizerFast",
        chat=FALCON_CHAT,
        tokens=("<|pad|>", ">>ABSTRACT<<", "<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>", "<a 日>"),
        first=True,
        eos=("<|endoftext|>", "<|im_end|>"),
        bos="<|begin_of_text|>",
        inline=False,
        thinks=False,
    ),
    "nemotron_h": Family(
        tokenizer_class="PreTrainedTokenizerFast",
        chat=NEMOTRON_CHAT,
        tokens=("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<SPECIAL_7>"),
        plain=(),
        first=True,
        eos=("</s>", "<|im_end|>"),
        bos="<s>",
        inline=False,
        thinks=True,
        calls=ToolFormat.TAGS,
    ),
}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def parts_of(name: str, tokenizer: Tokenizer) -> None:
    """What stands around the vocabulary, as the family has it."""
    tokenizer.decoder = decoders.ByteLevel()
    by_words = [pre.Split(Regex(WORDS), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    match name:
        case "qwen3_next":
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = pre.Sequence(by_words)
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        case "granitemoehybrid":
            tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
            tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
        case "falcon_h1":
            punctuation, digits = pre.Punctuation("contiguous"), pre.Digits(individual_digits=True)
            tokenizer.pre_tokenizer = pre.Sequence([punctuation, pre.ByteLevel(add_prefix_space=False), digits])
        case "nemotron_h":
            tokenizer.pre_tokenizer = pre.Sequence(by_words)


def make_tokenizer(name: str) -> Tokenizer:
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "nemotron_h"))
    parts_of(name, tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        min_frequency=1,
        special_tokens=list(family.tokens) if family.first else [],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in family.tokens])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    if name == "nemotron_h":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def write_folder(name: str, folder: Path) -> Path:
    family, tokenizer = FAMILIES[name], make_tokenizer(name)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id): {"content": token.content, "special": token.special, "normalized": token.normalized}
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    settings: dict[str, Any] = {
        "tokenizer_class": family.tokenizer_class,
        "added_tokens_decoder": added,
        "bos_token": family.bos,
        "eos_token": family.eos[0],
        "unk_token": family.tokens[0],
        "pad_token": family.tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    ids = [tokenizer.token_to_id(token) for token in family.eos]
    if family.inline:
        settings["chat_template"] = family.chat
    else:
        (folder / "chat_template.jinja").write_text(family.chat)
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": settings,
        "config.json": {"model_type": name, "eos_token_id": ids[0], "vocab_size": tokenizer.get_vocab_size() + 40},
        "generation_config.json": {"eos_token_id": ids if len(ids) > 1 else ids[0], "do_sample": True},
    }
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(write_folder(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


# -- tokens ------------------------------------------------------------------------------------------------------------

TEXT = "Tom's 1234 apples: nai\u0308ve naïve\t€5 日本語 <a 日> 👍🏽\n\n<think>é</think> <tool_call>{} >>ABSTRACT<< x "


@EVERY_FAMILY
def test_prompts_and_answers_as_transformers(name: str, folders: dict[str, str]) -> None:
    found, reference = load_tokenizer(folders[name]), AutoTokenizer.from_pretrained(folders[name])
    text = TEXT + "".join(FAMILIES[name].tokens)
    for special in (True, False):
        ids = found.encode(text, special_tokens=special)
        assert ids == found.encode_long(text, special_tokens=special)
        assert ids == reference(text, add_special_tokens=special).input_ids
        for skips in (True, False):
            assert found.decode(ids, skips) == reference.decode(ids, skip_special_tokens=skips)
    assert len(text.encode()) <= found.longest_token_bytes * len(ids)
    assert (found.special_tokens, found.tag_tokens) == (set(FAMILIES[name].tokens), set(FAMILIES[name].plain))


@EVERY_FAMILY
def test_answers_come_as_whole_characters(name: str, folders: dict[str, str]) -> None:
    tokenizer = load_tokenizer(folders[name])
    ids, shown = tokenizer.encode(TEXT, special_tokens=False), ""
    whole = tokenizer.decode(ids, False)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert "\ufffd" not in shown and whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


@EVERY_FAMILY
@pytest.mark.parametrize("seed", range(3))
def test_any_tokens_in_any_pieces_give_the_text_of_the_whole(name: str, seed: int, folders: dict[str, str]) -> None:
    """Ids too that the model has and the tokenizer has not: embeddings are padded."""
    tokenizer, rng = load_tokenizer(folders[name]), random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 40) for _ in range(300)]
    for skips in (True, False):
        detokenizer, shown, rest = tokenizer.detokenizer(skip_special_tokens=skips), "", list(ids)
        while rest:
            size = rng.randrange(1, 5)
            shown += detokenizer.push(rest[:size])
            rest = rest[size:]
        assert shown + detokenizer.finish() == tokenizer.decode(ids, skips)


@EVERY_FAMILY
def test_markers_of_calls_and_thoughts_are_single_tokens(name: str, folders: dict[str, str]) -> None:
    tokenizer, family = load_tokenizer(folders[name]), FAMILIES[name]
    for marker in (*family.tokens, *family.plain):
        (token_id,) = tokenizer.encode(marker, special_tokens=False)
        assert tokenizer.token_text(token_id) == tokenizer.piece(token_id).decode() == marker
        is_shown = tokenizer.detokenizer(skip_special_tokens=True).push([token_id]) == marker
        assert is_shown == (marker in family.plain)


@EVERY_FAMILY
def test_every_end_token_ends_an_answer(name: str, folders: dict[str, str]) -> None:
    expected = GenerationConfig.from_pretrained(folders[name]).eos_token_id
    expected = expected if isinstance(expected, list) else [expected]
    found = load_eos_token_ids(folders[name])
    assert found == set(expected) and len(found) == len(FAMILIES[name].eos)
    assert {load_tokenizer(folders[name]).token_text(i) for i in found} == set(FAMILIES[name].eos)


@EVERY_FAMILY
@pytest.mark.parametrize("thought", Thought)
def test_forced_calls_are_written_in_the_familys_tokens(name: str, thought: Thought, folders: dict[str, str]) -> None:
    """Behind a thought or without one, with markers as special, added or plain tokens; then any end token."""
    tokenizer, eos_ids = load_tokenizer(folders[name]), load_eos_token_ids(folders[name])
    size = tokenizer.vocab_size + 40
    tools = read_tools({"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False})
    form = FAMILIES[name].calls
    fields = constraints(None, tools, form, thought, tokenizer.special_tokens, tokenizer.tag_tokens)
    grammar = LLMatcher.grammar_from_lark(fields["ebnf"])
    matcher = compile_grammar(load_tokens(folders[name], size, eos_ids), grammar)

    def allowed() -> set[int]:
        mask = matcher.compute_bitmask()
        return {i for i in range(size) if mask[i // 8] >> i % 8 & 1}

    begin = {Thought.NONE: "", Thought.POSSIBLE: "<think>é日</think>\n", Thought.OPEN: "é日\n</think>\n\n"}[thought]
    for token_id in tokenizer.encode(begin + CALL_TEXTS[form], special_tokens=False):
        assert token_id in allowed() and not eos_ids & allowed()
        matcher.consume_tokens([token_id])
    assert matcher.is_stopped() or allowed() == eos_ids


# -- chats -------------------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}, "b": {"type": "array"}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "<é> & 'x'", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"a": 1, "b": [2, "ü"], "c": {"d": None}, "e": "text", "f": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " Hello?\n"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\n2", "reasoning_content": "One and one."},
        {"role": "user", "content": "And {{ 7 * 7 }} 日本?"},
    ],
    "calls": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], "reasoning_content": "\nI add.\n"},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "<3>", "tool_call_id": "c1"},
    ],
    "last_assistant": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [CALL]}],
}


@EVERY_FAMILY
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chats_as_transformers(name: str, chat: str, generate: bool, folders: dict[str, str]) -> None:
    reference, tokenizer = AutoTokenizer.from_pretrained(folders[name]), load_tokenizer(folders[name])
    template = load_chat_template(folders[name], None)
    assert template is not None
    documents = [{"doc_id": 1, "text": "é"}]
    for tools in (None, TOOLS):
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"documents": documents}):
            expected = reference.apply_chat_template(
                CHATS[chat], tools=tools, add_generation_prompt=generate, tokenize=False, **variables
            )
            found = template.render(CHATS[chat], tools=tools, add_generation_prompt=generate, variables=variables)
            assert found == expected and len(found) > 20
            assert opens_thinking(found) == (
                generate and FAMILIES[name].thinks and variables.get("enable_thinking") is not False
            )
            assert (
                tokenizer.encode(found, special_tokens=False) == reference(expected, add_special_tokens=False).input_ids
            )
    assert tool_format(template.tool_source) is FAMILIES[name].calls


# -- through a node ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def node(
    request: pytest.FixtureRequest, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, FakeNode]]:
    """Its rank says the prompt again, up to the first end token."""
    log = tmp_path_factory.mktemp("node") / "log"
    with fake_node(node_config(folders[request.param], Role.UNIFIED), log) as running:
        yield request.param, running


CALL_TEXTS = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    ToolFormat.TAGS: "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(node: FakeNode, system: str, **fields: Any) -> dict[str, Any]:
    """The only choice of an answer that says the system message again."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    response = node.post({"messages": messages, "max_tokens": 60} | fields, "/v1/chat/completions")
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def streamed(node: FakeNode, system: str, **fields: Any) -> list[dict[str, Any]]:
    """Its choices in the pieces of a stream."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 60, "stream": True} | fields
    lines = node.post(body, "/v1/chat/completions").text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [choice for line in lines[:-2] for choice in json.loads(line.removeprefix("data: "))["choices"]]


def test_prompts_of_a_node_are_those_of_transformers(node: tuple[str, FakeNode], folders: dict[str, str]) -> None:
    name, running = node
    reference = AutoTokenizer.from_pretrained(folders[name])
    for chat in ("one", "turns", "calls"):
        for tools in ({}, {"tools": TOOLS}):
            for variables in ({}, {"enable_thinking": False}):
                body = {"messages": CHATS[chat], "chat_template_kwargs": variables} | tools
                expected = reference.apply_chat_template(CHATS[chat], add_generation_prompt=True, **tools, **variables)
                assert running.post(body, "/tokenize").json()["tokens"] == expected["input_ids"]
    expected = reference("Tom's naïve", add_special_tokens=True).input_ids
    assert running.post({"prompt": "Tom's naïve"}, "/tokenize").json()["tokens"] == expected


def test_a_chat_ends_with_an_end_token_and_has_no_special_ones(
    node: tuple[str, FakeNode], folders: dict[str, str]
) -> None:
    name, running = node
    choice = ask(running, "é日 👍🏽 <b>", **QUIET)
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] in load_eos_token_ids(folders[name])
    content = choice["message"]["content"]
    assert "é日 👍🏽 <b>" in content and not any(token in content for token in FAMILIES[name].tokens)
    pieces = streamed(running, "é日 👍🏽 <b>", **QUIET)
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == content and len(pieces) > 5
    assert pieces[-1]["matched_stop"] == choice["matched_stop"]


def test_every_end_token_of_a_list_counts(node: tuple[str, FakeNode], folders: dict[str, str]) -> None:
    name, running = node
    ids = load_eos_token_ids(folders[name])
    for token_id in ids:
        body = {"input_ids": [400, 401, token_id, 402], "sampling_params": {"max_new_tokens": 9}}
        found = running.post(body).json()
        assert found["output_ids"] == [400, 401, token_id]
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": token_id}


def test_thoughts_are_told_from_content(node: tuple[str, FakeNode]) -> None:
    """Where the template opens a thought, unless it is told not to."""
    name, running = node
    message = ask(running, "All of it.")["message"]
    thought, said = message.get("reasoning_content") or "", message["content"] or ""
    assert "All of it." in (thought if FAMILIES[name].thinks else said)
    assert "All of it." not in (said if FAMILIES[name].thinks else thought)
    assert "All of it." in ask(running, "All of it.", **QUIET)["message"]["content"]


def test_calls_are_told_from_content(node: tuple[str, FakeNode]) -> None:
    """Also where the markers are special tokens."""
    name, running = node
    text = CALL_TEXTS[FAMILIES[name].calls]
    tools = [{"type": "function", "function": {"name": "add"}}]
    fields = {"tools": tools, "ignore_eos": True, "max_tokens": 80} | QUIET
    choice = ask(running, text, **fields)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls[0] == {"name": "add", "arguments": '{"a": 1}'}
    pieces = streamed(running, text, **fields)
    assert [call["function"] for piece in pieces for call in piece["delta"].get("tool_calls", [])] == calls
