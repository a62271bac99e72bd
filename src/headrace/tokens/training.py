"""Trains the small byte-level BPE of a from-scratch model, with GLM-5's chat tokens.

Every byte is in the alphabet, so any text can be encoded; digits stand alone, so that a tiny model
copies numbers digit by digit; the special tokens have the first ids, in a fixed order. The same
tokens serve both chat formats: GLM-5's own, and the compact one of the smallest models.
"""

from collections.abc import Iterable
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.errors import UserError
from headrace.tokens.tokenizer import TextTokenizer

PAD = "<|pad|>"
END_OF_TEXT = "<|endoftext|>"

SPECIAL_TOKENS = (
    PAD,
    END_OF_TEXT,
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""GLM-5's chat tokens and padding; ids are positions here."""

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = """\
{{- '<sop>' -}}
{%- set first = messages[0].role in ['system', 'developer'] -%}
{%- if first or tools -%}
  {{- '<|system|>' -}}
  {%- if first -%}{{- messages[0].content -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n' if first and messages[0].content else '' -}}{{- 'tools: ' -}}
    {%- for tool in tools -%}
      {{- (tool.function or tool).name -}}{{- ', ' if not loop.last else '' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endif -%}
{%- set ns = namespace(stop='') -%}
{%- for m in messages -%}
  {%- if loop.first and first -%}
  {%- elif m.role == 'assistant' -%}
    {{- '<|assistant|>' -}}{{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
      {%- set f = call.function or call -%}
      {{- '<tool_call>' + f.name -}}
      {%- for k, v in f.arguments.items() -%}
        {{- '<arg_key>' + k + '</arg_key><arg_value>' -}}
        {{- v if v is string else v | tojson -}}{{- '</arg_value>' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
    {%- set ns.stop = '<|observation|>' if m.tool_calls else '<|user|>' -%}
    {{- ns.stop -}}
  {%- else -%}
    {%- set opener = {'system': '<|system|>', 'developer': '<|system|>',
                      'user': '<|user|>', 'tool': '<|observation|>'}[m.role] -%}
    {{- '' if opener == ns.stop else opener -}}{{- m.content or '' -}}
  {%- endif -%}
  {%- if m.role != 'assistant' -%}{%- set ns.stop = '' -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""The compact format in jinja, for users of transformers (string contents, arguments as objects).

`headrace.tokens.compact` is the reference; a test holds the two together.
"""


GLM5_CHAT_TEMPLATE = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the ' -}}
  {{- 'user query.\\n\\nYou are provided with function signatures within <tools></tools> ' -}}
  {{- 'XML tags:\\n<tools>\\n' -}}
  {%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
  {{- '</tools>\\n\\nFor each function call, output the function name and arguments within the ' -}}
  {{- 'following XML format:\\n<tool_call>{function-name}' -}}
  {%- for i in ['1', '2'] -%}
    {{- '<arg_key>{arg-key-' + i + '}</arg_key><arg_value>{arg-value-' + i + '}</arg_value>' -}}
  {%- endfor -%}
  {{- '...</tool_call>' -}}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set keep_all = clear_thinking is defined and not clear_thinking -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set shown = m.reasoning_content and (keep_all or loop.index0 > last.user) -%}
    {{- '<|assistant|>' -}}
    {{- '<think>' + m.reasoning_content.strip() if shown else '' -}}{{- '</think>' -}}
    {{- (m.content or '').strip() -}}
    {%- for call in m.tool_calls or [] -%}
      {%- set f = call.function or call -%}
      {{- '<tool_call>' + f.name -}}
      {%- for k, v in f.arguments.items() -%}
        {{- '<arg_key>' + k + '</arg_key><arg_value>' -}}
        {{- v if v is string else v | tojson -}}{{- '</arg_value>' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}
    {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|observation|>' -}}
    {{- '<tool_response>' -}}{{- m.content or '' -}}{{- '</tool_response>' -}}
  {%- else -%}
    {{- '<|user|>' if m.role == 'user' else '<|system|>' -}}{{- m.content or '' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
  {{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' -}}
{%- endif -%}
"""
"""GLM-5's format in jinja, for users of transformers (string contents, arguments as objects).

The "glm-5" renderer of the `renderers` library is the reference; a test holds the two together.
"""

ChatFormat = Literal["compact", "glm-5"]

_TEMPLATES: dict[ChatFormat, str] = {"compact": CHAT_TEMPLATE, "glm-5": GLM5_CHAT_TEMPLATE}


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, chat_format: ChatFormat = "compact"
) -> TextTokenizer:
    """Train a byte-level BPE on `texts`.

    Args:
        texts: plain training text, without special tokens.
        vocab_size: number of ids, special tokens and the 256 bytes included. Fewer result when
            `texts` hold fewer merges.
        chat_format: format of its chat template, and the renderer that "auto" finds for it.

    Returns:
        A tokenizer whose `save` writes a directory that `load_tokenizer` and transformers read.
        Equal inputs give equal tokenizers.

    Raises:
        UserError: vocab_size has no room for bytes and special tokens, or unknown chat_format.
    """
    if chat_format not in _TEMPLATES:
        raise UserError(
            f"tokenizer chat_format {chat_format!r} is unknown; use one of {', '.join(_TEMPLATES)}"
        )
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"tokenizer vocab_size {vocab_size} is too small; "
            f"the bytes and chat tokens alone need {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    # Attributes of the Rust class that its type stubs declare read-only.
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    setattr(tokenizer, "pre_tokenizer", split)  # noqa: B010
    setattr(tokenizer, "decoder", decoders.ByteLevel())  # noqa: B010
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "headrace_renderer": chat_format,
        "chat_template": _TEMPLATES[chat_format],
    }
    return TextTokenizer(tokenizer, name_or_path="trained", config=config)
