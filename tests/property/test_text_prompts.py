"""Laws of rendering and encoding a conversation."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from keepwarm.gateway.text.conversation import Conversation, Message, Role, ToolCall, ToolSpec
from keepwarm.gateway.text.model import TextModel
from keepwarm.testing.text import CHATML, SPECIAL_TOKENS, byte_text_assets

# As CHATML, with a default system text: where a system message appears changes what stands first.
WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
GLUED = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
MODELS = {
    source: TextModel(byte_text_assets(), chat_template=source) for source in (CHATML, WITH_DEFAULT, GLUED)
}
RAW = Tokenizer.from_str(byte_text_assets().tokenizer_json)

_parts = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|", "|>", "im_end", "<|im_", "end|>", "<", ">", "\n", "  ", "hi", "🙂"]
)
_texts = st.lists(_parts | st.text(max_size=4), max_size=6).map("".join)
_calls = st.builds(
    ToolCall,
    st.just("1"),
    _texts,
    st.sampled_from(['{"a":1}', "", "{oops", '{"z":[1.0,"é"],"a":{}}']) | _texts,
)


def _message(role: Role) -> st.SearchStrategy[Message]:
    calls = st.lists(_calls, max_size=2).map(tuple) if role is Role.ASSISTANT else st.just(())
    return st.builds(Message, st.just(role), _texts, tool_calls=calls)


_messages = st.lists(st.sampled_from(Role).flatmap(_message), min_size=1, max_size=6).map(tuple)
_tools = st.lists(
    st.builds(ToolSpec, _texts, _texts, st.dictionaries(_texts, _texts, max_size=2)), max_size=2
).map(tuple)


@given(st.sampled_from([CHATML, WITH_DEFAULT]), _messages, _tools, st.data())
@settings(deadline=None)
def test_a_growing_conversation_grows_at_its_end(
    source: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], data: st.DataObject
) -> None:
    model = MODELS[source]
    num_before = data.draw(st.integers(1, len(messages)))
    whole = Conversation(messages, tools=tools)
    before = replace(whole, messages=messages[:num_before], add_generation_prompt=False)
    assert model.render(whole).startswith(model.render(before))
    ids = model.encode_conversation(before)
    assert model.encode_conversation(whole)[: len(ids)] == ids


@given(st.sampled_from(sorted(MODELS)), _messages, _tools)
@settings(deadline=None, max_examples=300)
def test_contents_never_become_control_tokens_and_nothing_else_changes(
    source: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
) -> None:
    model = MODELS[source]
    conversation = Conversation(messages, tools=tools)
    ids = model.encode_conversation(conversation)
    text = model.render(conversation)
    assert "".join(map(model.token_text, ids)).replace("\ufffd", "") == text.replace("\ufffd", "") or (
        b"".join(map(model.token_bytes, ids)) == text.encode()
    )
    blank = Conversation(
        tuple(Message(m.role, "") for m in messages), tools=(ToolSpec("t", "", {}),) if tools else ()
    )
    num_own = {
        i: model.encode_conversation(blank).count(i) for i in map(RAW.token_to_id, SPECIAL_TOKENS) if i
    }
    assert {i: ids.count(i) for i in num_own} == num_own
    if sum(num_own.values()) == sum(text.count(special) for special in SPECIAL_TOKENS):
        assert list(ids) == RAW.encode(text, add_special_tokens=False).ids


@given(_texts)
@settings(deadline=None)
def test_pieces_of_a_content_are_the_content(text: str) -> None:
    guard = MODELS[CHATML]._guard
    assert "".join(piece for piece, _ in guard.pieces(text)) == text
