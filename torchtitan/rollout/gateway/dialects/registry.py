"""The dialects that the gateway serves. A new one is a class in a file of its own and an entry here."""

from __future__ import annotations

from torchtitan.rollout.gateway.dialects.anthropic_messages import AnthropicMessages
from torchtitan.rollout.gateway.dialects.chat_completions import ChatCompletions
from torchtitan.rollout.gateway.dialects.dialect import Dialect
from torchtitan.rollout.gateway.dialects.responses import OpenAIResponses

OPENAI = ChatCompletions()
"""The dialect of errors on routes that belong to no dialect"""
DIALECTS: tuple[Dialect, ...] = (OPENAI, AnthropicMessages(), OpenAIResponses())
