"""Owns the text side of one served model: conversation to tokens, tokens to turn events.

The only door of this folder: both API dialects use `TextModel` and the nouns exported here, and never a
template, tokenizer or parser directly. Holds no state per request; threads may share it.
Built by `compose` from `assets.TextAssets`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from keepwarm.core.errors import InvalidRequest
from keepwarm.gateway.text.assets import TextAssets
from keepwarm.gateway.text.conversation import Conversation, Role, ToolSpec
from keepwarm.gateway.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    TurnEvent,
)
from keepwarm.gateway.text.guard import ContentGuard
from keepwarm.gateway.text.parsers.base import CallIds
from keepwarm.gateway.text.parsers.plain import PlainParser
from keepwarm.gateway.text.parsers.registry import choose_tool_format
from keepwarm.gateway.text.parsers.registry import tool_format as tool_format_named
from keepwarm.gateway.text.template import DATE_KWARG, ChatTemplate
from keepwarm.gateway.text.tokenizer import TextTokenizer, valid_text
from keepwarm.gateway.text.tool_prompt import (
    TemplateAbilities,
    TemplateMessage,
    learn_abilities,
    template_input,
)
from keepwarm.gateway.text.turn import TurnReader

__all__ = [
    "ReasoningDelta",
    "TextDelta",
    "TextModel",
    "ToolCallArguments",
    "ToolCallEnded",
    "ToolCallStarted",
    "TurnEvent",
    "TurnReader",
    "new_call_id",
]


def new_call_id() -> str:
    """A unique call id of letters and digits only: some clients strip every other character."""
    return "call" + secrets.token_hex(12)


class TextModel:
    """One per served model."""

    def __init__(
        self,
        assets: TextAssets,
        *,
        tool_format: str | None = None,
        chat_template: str | None = None,
        current_date: str | None = None,
        call_ids: CallIds = new_call_id,
    ) -> None:
        """
        tool_format: name from `parsers.registry`; None chooses by the template.
        chat_template: Jinja source that replaces the model's own.
        current_date: ISO date for templates that print one; a conversation's own `current_date` wins.
        call_ids: gives the id of each tool call; letters and digits only.

        Raises `ModelFileError` for a broken tokenizer or template, `ConfigurationError` for an
        unknown format.
        """
        self._assets = assets
        self._tokenizer = TextTokenizer(assets.tokenizer_json)
        self._date = current_date
        self._call_ids = call_ids
        source = assets.chat_template if chat_template is None else chat_template
        self._template: ChatTemplate | None = None
        self._abilities = TemplateAbilities()
        if source is not None:
            self._template = ChatTemplate(source, bos_token=assets.bos_token, eos_token=assets.eos_token)
            self._abilities = learn_abilities(self._template)
        self._format = (
            choose_tool_format(source, renders_tools=self._abilities.tools)
            if tool_format is None
            else tool_format_named(tool_format)
        )
        self._guard = ContentGuard(tuple(self._tokenizer.special_ids))
        markers = {i for text, i in self._tokenizer.special_ids.items() if text in self._format.markers}
        self._hidden_ids = (set(self._tokenizer.special_ids.values()) | set(assets.eos_token_ids)) - markers

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._assets.eos_token_ids

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def tool_format(self) -> str:
        """The name of the format in which tool calls are expected."""
        return self._format.name

    def render(self, conversation: Conversation) -> str:
        """The prompt as text. Raises `InvalidRequest(param="messages")` when the template refuses it."""
        messages, tools = self._template_input(conversation)
        return valid_text(self._run_template(conversation, messages, tools, conversation.template_kwargs))

    def encode_conversation(self, conversation: Conversation) -> tuple[int, ...]:
        """The prompt as token ids. Control tokens come from the template only, never from a message."""
        messages, tools = self._template_input(conversation)
        replacements = self._guard.start()
        # Roles are ours, and templates compare them, so they stay as they are.
        guarded = [
            {**cast(TemplateMessage, replacements.replace(message)), "role": message["role"]}
            for message in messages
        ]
        guarded_tools = cast(list[TemplateMessage], replacements.replace(tools))
        kwargs = cast(Mapping[str, object], replacements.replace(conversation.template_kwargs))
        if not replacements:
            rendered = self._run_template(conversation, messages, tools, conversation.template_kwargs)
            return self._tokenizer.encode(rendered)
        rendered = self._run_template(conversation, guarded, guarded_tools, kwargs)
        aliases = self._tokenizer.aliases
        return self._tokenizer.encode_aliased(
            replacements.restore(rendered, lambda text: self._guard.alias_specials(text, aliases))
        )

    def encode(self, text: str, *, add_special: bool = False) -> tuple[int, ...]:
        """A raw prompt as token ids; texts of control tokens in it are control tokens.

        `add_special` puts the begin token in front where the model wants one.
        """
        ids = self._tokenizer.encode(text, add_special=add_special)
        bos_id = self._tokenizer.special_ids.get(self._assets.bos_token or "")
        if add_special and self._assets.add_bos and bos_id is not None and ids[:1] != (bos_id,):
            return (bos_id, *ids)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, control tokens left out."""
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def start_turn(
        self, *, stop: Sequence[str] = (), tools: Sequence[ToolSpec] = (), parse_tools: bool = True
    ) -> TurnReader:
        """A reader for one generated choice.

        Calls are sought only when tools were offered: a client that offered none could not answer one. The
        name in a call is the model's; it may be none of the offered ones.
        """
        wanted = parse_tools and bool(tools)
        parser = self._format.make_parser(self._call_ids) if wanted else PlainParser()
        return TurnReader(shown_bytes=self._shown_bytes, stop=stop, parser=parser)

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden_ids else self._tokenizer.token_bytes(token_id)

    def _template_input(
        self, conversation: Conversation
    ) -> tuple[list[TemplateMessage], list[TemplateMessage]]:
        if not conversation.messages:
            raise InvalidRequest("the conversation has no messages; send at least one.", param="messages")
        return template_input(conversation, self._abilities, teach=self._format.teachable)

    def _run_template(
        self,
        conversation: Conversation,
        messages: list[TemplateMessage],
        tools: list[TemplateMessage],
        kwargs: Mapping[str, object],
    ) -> str:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template, so it takes no messages. Send a plain prompt to the "
                "completions endpoint, or start the server with a chat template.",
                param="messages",
            )
        if self._date is not None:
            kwargs = {DATE_KWARG: self._date, **kwargs}
        render: Callable[..., str] = self._template.render
        if not conversation.continue_last:
            add = conversation.add_generation_prompt
            return render(messages, tools=tools, add_generation_prompt=add, kwargs=kwargs)
        last = conversation.messages[-1]
        if last.role is not Role.ASSISTANT or last.tool_calls:
            raise InvalidRequest(
                "only a last assistant message without tool calls can be continued.", param="messages"
            )
        # A mark behind the text shows where the template's own closing words begin.
        mark = "7" + "".join(secrets.choice("012345689") for _ in range(31))
        marked = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}]
        rendered = render(marked, tools=tools, add_generation_prompt=False, kwargs=kwargs)
        prompt, found, _ = rendered.partition(mark)
        if not found:
            raise InvalidRequest(
                "the model's chat template does not show the last message, so it cannot be continued.",
                param="messages",
            )
        return prompt
