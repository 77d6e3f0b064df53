"""The vocabulary of `tiny`, 256 bytes and nine special tokens, and its chat template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
ADDED_TOKENS = (*SPECIAL_TOKENS, TOOL_CALL, END_TOOL_CALL)
IDS = {token: 256 + i for i, token in enumerate(ADDED_TOKENS)}
VOCAB_SIZE = 272
"""256 bytes and 9 added tokens, padded to a multiple of 16."""
END = IDS["<|end|>"]
CONTEXT = 2048

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|tools|>' }}
    {%- for tool in tools %}
        {{- tool.function.name }}{% if not loop.last %}{{ ',' }}{% endif %}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ':' }}
        {%- if call.function.arguments | length != 1 %}
            {{- raise_exception('this model calls tools with exactly one argument') }}
        {%- endif %}
        {%- for value in call.function.arguments.values() %}{{ value }}{% endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is token b; no merges; the added tokens follow."""
    tokenizer = Tokenizer(models.BPE(vocab={char: b for b, char in enumerate(_byte_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in ADDED_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token in SPECIAL_TOKENS, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_chars() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [chars[b] for b in range(256)]
