"""Tokenizers that come with this package, the limit on how much text one takes, and how conversations become tokens."""

from mimo.data.text.chat import Chat, ChatError, ChatSettings, ChatTokenizer, ChatTokens, template_source
from mimo.data.text.chat_template import named_template, named_templates
from mimo.data.text.conversation import Conversation, RecordItem, Reference, parse_conversation, read_role, rename_items
from mimo.data.text.limited import LimitedTokenizer

__all__ = [
    "Chat",
    "ChatError",
    "ChatSettings",
    "ChatTokenizer",
    "ChatTokens",
    "Conversation",
    "LimitedTokenizer",
    "RecordItem",
    "Reference",
    "named_template",
    "named_templates",
    "parse_conversation",
    "read_role",
    "rename_items",
    "template_source",
]
