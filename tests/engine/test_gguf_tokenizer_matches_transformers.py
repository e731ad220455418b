"""The tokenizer and template read from the GGUF file against transformers, on the default model.

transformers takes vocabulary, merges and control tokens from the file but drops its pre-tokenizer
(`smollm`: each digit is cut off before words are). A run of blanks before a digit then encodes otherwise
than in training, and so does a blank before a numeral that is no ASCII digit. So the oracle runs twice: as
it is, on texts without these, and with the pre-tokenizer of training put in, on all texts.
"""

import copy
import re
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer, TokenizersBackend

from keepwarm.gateway.text.assets import load_text_assets
from keepwarm.gateway.text.conversation import Conversation, Message, Role
from keepwarm.gateway.text.events import TextDelta
from keepwarm.gateway.text.model import TextModel
from keepwarm.supply.models import ensure_default_model

TEXTS = [
    "",
    "Hello, world! It's 2026-01-31; they've paid 1,234.50 dollars.",
    "   leading and trailing   ",
    "a  12   345\t6\n  7\n\n\n8 ",
    "def f(x):\n    if x > 10:\n        return x ** 2  # comment\n\n\n\treturn None\r\n",
    '{"name": "search", "arguments": {"q": "caf\u00e9", "n": [1, 2.5e-3, null]}}',
    "Gr\u00fc\u00dfe aus K\u00f6ln \u2014 \u00abdit-il\u00bb\u2026 na\u00efve co\u00f6perate e\u0301",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u4e2d\u6587\u4e5f\u53ef\u4ee5\u3002\ud55c\uad6d\uc5b4\ub3c4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0645\u0631\u062d\u0628\u0627"
    " \u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ea\U0001f1fa \u2764\ufe0f",
    "\u0661\u0662\u0663 \u00bd \u00b2 \u2167 \u3007",
    "\x00\x01\x7f \u00a0\u2003\u2028\ufeff\u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep><repo_name>x",
    "<|im_start|><|im_start|> <|im_end|>  <|im_end",
    "https://example.org/a_b?c=%20#d  C:\\x\\y  ~!@#$%^&*()_+",
    "x" * 500 + " " * 100 + "9" * 100,
    "The quick brown fox jumps over the lazy dog. " * 40,
]
CHATS = [
    [("user", "hi")],
    [("system", "Be brief."), ("user", "1  2"), ("assistant", "ok\n"), ("user", "\nthanks ")],
]


@pytest.fixture(scope="module")
def path() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def model(path: Path) -> TextModel:
    return TextModel(load_text_assets(path))


@pytest.fixture(scope="module")
def oracle(path: Path) -> TokenizersBackend:
    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert isinstance(loaded, TokenizersBackend)
    return loaded


@pytest.fixture(scope="module")
def trained_oracle(oracle: TokenizersBackend) -> TokenizersBackend:
    trained = copy.deepcopy(oracle)
    trained.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    return trained


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encoding_and_decoding(
    model: TextModel,
    oracle: TokenizersBackend,
    trained_oracle: TokenizersBackend,
    text: str,
) -> None:
    ids = model.encode(text)
    assert list(ids) == trained_oracle.encode(text, add_special_tokens=False)
    if not re.search(r"\s\s\d", text) and all(c.isascii() for c in text if c.isnumeric()):
        assert list(ids) == oracle.encode(text, add_special_tokens=False)
    assert b"".join(map(model.token_bytes, ids)) == text.encode()
    shown = oracle.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert model.decode(ids) == shown
    reader = model.start_turn()
    events = [event for token_id in ids for event in reader.feed([token_id])] + reader.finish()
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == shown


def test_vocabulary_and_end_token(model: TextModel, oracle: TokenizersBackend) -> None:
    assert model.vocab_size == len(oracle)
    assert model.eos_token_ids[0] == oracle.eos_token_id
    for token_id in range(model.vocab_size):
        assert model.token_text(token_id) == oracle.decode([token_id], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats(
    model: TextModel,
    trained_oracle: TokenizersBackend,
    chat: list[tuple[str, str]],
    add_generation_prompt: bool,
) -> None:
    conversation = Conversation(
        tuple(Message(Role(role), text) for role, text in chat), add_generation_prompt=add_generation_prompt
    )
    messages = [{"role": role, "content": text} for role, text in chat]
    rendered = trained_oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert model.render(conversation) == rendered
    assert list(model.encode_conversation(conversation)) == trained_oracle.encode(
        rendered, add_special_tokens=False
    )
