"""Conversion between text and token ids, with the tokenizer files of a Hugging Face checkpoint directory.

The `tokenizers` library reads tokenizer.json. No torch here.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import read_json
from torchtitan.rollout.conversation.chat_templates import ChatTemplates
from torchtitan.rollout.conversation.marks import any_of, plain, shield, shielded
from torchtitan.rollout.conversation.messages import ASSISTANT, INSTRUCTING, TOOL, Messages
from torchtitan.rollout.conversation.results import split_turns
from torchtitan.rollout.conversation.template_checks import CALL_ID, TemplateChecks
from torchtitan.rollout.conversation.token_bytes import TokenBytes

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# Added tokens that are not marked as special but structure a conversation, as DeepSeek's <｜User｜>.
CONTROL = re.compile(r"<[|｜].*[|｜]>")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file."""
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which is stored as its text or as {"content": text, …}."""
    return value.get("content") if isinstance(value, dict) else value


def _ids(tokenizer: FastTokenizer, text: str) -> list[int]:
    """Encode text; a lone surrogate, which JSON allows but tokenizers reject, becomes a question mark."""
    # Of the methods only those for batches release the interpreter's lock; a long text takes seconds.
    (encoding,) = tokenizer.encode_batch_fast([text.encode("utf-8", "replace").decode()], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _unknown_id(model: dict[str, Any]) -> int | None:
    if model.get("byte_fallback"):
        return None
    found: int | None = model["vocab"].get(model.get("unk_token")) if "unk_id" not in model else model["unk_id"]
    return found


class Tokenizer:
    """The tokenizer of a checkpoint directory, with its chat template and the run's values for it."""

    def __init__(self, directory: str | Path, template_values: Mapping[str, Any] | None = None):
        """template_values: variables of the chat template by name, such as Qwen3's enable_thinking.

        Raises UserError if files are missing or broken, or if the template does not read such a variable.
        """
        # Texts are encoded one by one; with threads of its own, the library would warn wherever a process is started.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"no tokenizer.json in {self.directory}: model.hf_assets_path must be a checkpoint directory with "
                "tokenizer files (a directory with only tokenizer.model can be converted by loading and saving it "
                "with transformers.AutoTokenizer)"
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path} cannot be read as a tokenizer: {error}") from error
        # A saved tokenizer may have padding or truncation settings from training; both would silently alter prompts.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.added_tokens = {str(added_token.content): token for token, added_token in added}
        special = {
            token: str(added_token.content)
            for token, added_token in added
            if added_token.special or CONTROL.fullmatch(added_token.content)
        }
        self.special_token_ids = frozenset(special)
        """Tokens that no text from outside may contain"""
        self._special = any_of(special.values())
        self._shielded = shielded(self._special)
        self.unseen_texts = frozenset(str(added_token.content) for _, added_token in added if added_token.special)
        """Of added tokens that `decode` leaves out"""
        # The same tokenizer without the tokens that were added to its model.
        definition = _read_json(path)
        self._without_added = FastTokenizer.from_str(json.dumps(definition | {"added_tokens": []}))
        self._token_bytes = TokenBytes(
            definition, {token: text for text, token in self.added_tokens.items()}, self._tokenizer.id_to_token
        )
        self.unknown_id = _unknown_id(definition["model"])
        """The token of text that the vocabulary does not hold; None where there is always another way to write it"""
        self._without_added.no_padding()
        self._without_added.no_truncation()
        settings = _read_json(self.directory / "tokenizer_config.json")
        named = _read_json(self.directory / "special_tokens_map.json")
        self.special_tokens: dict[str, str] = {}
        for name in SPECIAL_TOKEN_NAMES:
            text = _token_text(settings.get(name)) or _token_text(named.get(name))
            if text:
                self.special_tokens[name] = text
        self.eos_token_ids = self._find_eos_token_ids()
        self._text_start = self._find_text_start()
        self.templates = ChatTemplates(self.directory, settings)
        self._template_values = dict(template_values or {})
        known = self.templates.variables if self._template_values else set()
        if unknown := sorted(self._template_values.keys() - known):
            raise UserError(
                f"rollout.chat_template_kwargs names {', '.join(unknown)}, which the chat template of {self.directory} "
                f"does not read; it reads {', '.join(sorted(known)) or 'nothing'}"
            )

    @functools.cached_property
    def vocab_size(self) -> int:
        """Highest token id + 1; a model's embedding may have more rows."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    @property
    def template_source(self) -> str:
        """The chat template of conversations with tools; empty if there is none. Raises UserError if there are only
        others."""
        return self.templates.choose(tools=True).source if self.templates else ""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        return _ids(self._tokenizer, text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text that begins a sequence and may have shielded parts. A beginning token (BOS) is
        prepended if the tokenizer does so and the text does not already begin with it."""
        ids = self.encode_shielded(text)
        return ids if ids[: len(self._text_start)] == self._text_start else self._text_start + ids

    def shield(self, text: str) -> str:
        """Mark text so that encode_shielded encodes spelled-out special tokens (`<|im_end|>`) as plain text. Such
        tokens may come only from a template, never from a tool's output. Other added tokens (`<think>`) stay tokens."""
        return shield(text, self._special)

    def encode_shielded(self, text: str) -> list[int]:
        """Return the token ids of a text with shielded parts."""
        ids: list[int] = []
        for number, part in enumerate(self._shielded.split(text) if self._shielded else [text]):
            # A template may cut a text inside a shield.
            ids += _ids(self._without_added if number % 2 else self._tokenizer, plain(part))
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of token ids; unknown ids (padding rows of an embedding) give no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; joined, they are the text of all, special tokens included."""
        found = [self._token_bytes.find(token) for token in ids]
        # Some tokenizers write a space before the first word, which decoding leaves out.
        if found and found[0].startswith(b" ") and not self.decode(ids[:1], skip_special=False).startswith(" "):
            found[0] = found[0][1:]
        return found

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, tools: Messages = ()) -> str:
        """Render [{"role": …, "content": …}, …] as prompt text with the chat template.

        tools: JSON schemas of the functions that the assistant may call.
        """
        template = self.templates.choose(tools=bool(tools))
        values = {"add_generation_prompt": add_generation_prompt, "tools": list(tools) or None}
        try:
            return template.render(messages, {**values, **self.special_tokens, **self._template_values})
        except Exception as error:  # a template runs code and may raise anything
            raise UserError(
                f"the chat template of {self.directory} failed: {error}; the messages were {list(messages)!s:.500}"
            ) from error

    def apply_chat_template(self, messages: Messages, tools: Messages = ()) -> list[int]:
        """Return the token ids of a chat that the policy continues; its contents may have shielded parts."""
        return self.encode_shielded(self.render_chat(messages, tools=tools))

    def _find_text_start(self) -> list[int]:
        """Return the tokens that tokenizer.json prepends to a text; as in transformers, add_bos_token is ignored."""
        encoding = self._tokenizer.encode("x", add_special_tokens=True)
        front = itertools.takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return [token_id for token_id, _ in front]

    def _find_eos_token_ids(self) -> list[int]:
        """Return the end tokens from generation_config.json, config.json and the tokenizer, in this order."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            settings = _read_json(self.directory / name)
            value = settings.get("eos_token_id")  # may be 0
            if value is None:  # a composite may say it of its text model only
                value = (settings.get("text_config") or {}).get("eos_token_id")
            if isinstance(value, list):
                found += value
            elif value is not None:
                found.append(value)
        if "eos_token" in self.special_tokens:
            token_id = self._tokenizer.token_to_id(self.special_tokens["eos_token"])
            found += [] if token_id is None else [token_id]
        return list(dict.fromkeys(found))


class ChatRenderer:
    """Renders messages as tokens with the tokenizer's own chat template; each message is rendered once.

    A conversation that continues is not rendered again. Rendering the policy's turns could give other tokens than those
    it sampled (a tokenizer is not a bijection, and templates drop and rewrite text), so their log-probs would not
    match. Only the new messages become tokens, which are appended to the existing ones.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Sequence[int] = ()):
        """stop_token_ids: tokens that end a turn besides the tokenizer's own end tokens (rollout.stop_token_ids)."""
        self.tokenizer = self._tokenizer = tokenizer
        # A placeholder for the policy's turn, which is not rendered; it is random, so that no message contains it.
        self._mark = f"said{secrets.token_hex(8)}"
        self._placeholder: dict[str, Any] = {"role": "assistant", "content": self._mark}
        self.stop_token_ids = list(dict.fromkeys([*stop_token_ids, *tokenizer.eos_token_ids]))
        """All tokens that end a turn"""
        self._checks = TemplateChecks(tokenizer, self._mark)

    def render_prompt(self, messages: Messages, tools: Messages) -> list[int]:
        """Return the prompt of a new conversation. Raises UserError if the template refuses it."""
        messages = self.readable(messages, tools)
        self.refuse_unseen(messages, tools)
        return self._tokenizer.apply_chat_template(self._shielded(messages), tools=self._shield(list(tools)))

    def following(self, held: Sequence[int], messages: Messages, tools: Messages = ()) -> list[int]:
        """Return what the template writes after `held`, which ends with a turn of the policy, for the given messages.

        If the policy was cut off before the end of its turn, the end is included. Raises UserError if the template
        rewrites earlier text, so that the part for the messages cannot be separated.
        """
        messages = self.readable(messages, tools, begins=False)
        self.refuse_unseen(messages, tools)
        calls = [
            self._call(self._shield(message.get("name", self._mark)), message.get("tool_call_id", ""))
            for message in messages
            if message.get("role") == "tool"
        ]
        turn = {**self._placeholder, "tool_calls": calls} if calls else self._placeholder
        before, tools = [{"role": "user", "content": "?"}, turn], self._shield(list(tools))
        try:
            held_text = self._tokenizer.render_chat(before, False, tools)
        except UserError:
            # A template may refuse more than one call in a turn, as Llama 3's does; any number of results may follow.
            del calls[1:]
            held_text = self._tokenizer.render_chat(before, False, tools)
        whole_text = self._tokenizer.render_chat([*before, *self._shielded(messages)], True, tools)
        # Earlier messages may be rendered differently if others follow them.
        _, found, behind = held_text.rpartition(self._mark)
        _, found_again, text = whole_text.rpartition(self._mark)
        turn_end_ids, continued_ids = self._tokenizer.encode(behind), self._tokenizer.encode_shielded(text)
        end, ended = self._first_stop(turn_end_ids), held[-1] in self.stop_token_ids
        keeps_prefix = True
        if end is None:
            begin = 0
            if calls:  # what the template writes behind a call belongs to it, so the policy has written it
                keeps_prefix = text.startswith(behind)
                continued_ids = self._tokenizer.encode_shielded(text[len(behind) :])
        else:
            begin = 0
            if ended:
                begin = end + 1
            elif calls:
                begin = end
            keeps_prefix = continued_ids[:begin] == turn_end_ids[:begin]
        if not found or not found_again or not keeps_prefix:
            raise UserError(
                f"the chat template of {self._tokenizer.directory} writes a turn differently once others follow it, so "
                "a conversation cannot continue from sampled tokens: use a template that keeps its prefixes"
            )
        if (end is None or not ended) and held[-1] in self._tokenizer.special_token_ids:
            # What begins the next message may also end the turn before it, as GLM-4.5's <|user|>.
            begin += continued_ids[begin : begin + 1] == [held[-1]]
        return continued_ids[begin:]

    def answered(
        self, messages: Messages, answer: dict[str, Any], tools: Messages = ()
    ) -> tuple[list[int], list[int]] | None:
        """Return (the prompt that `messages` make, the tokens of an answer to it up to the first one that ends a turn).

        If the template writes no such token into the turn, it is the one that begins the next message or, without
        one, the checkpoint's first end token. Returns None if the answer does not begin where the prompt ends.
        """
        messages = self.readable(messages, tools)
        tokenizer, talk = self._tokenizer, [*messages, answer]
        self.refuse_unseen(talk, tools)
        before, with_answer = tokenizer.render_chat(messages, tools=tools), tokenizer.render_chat(talk, False, tools)
        if not with_answer.startswith(before):
            return None
        prompt_ids, answer_ids = tokenizer.encode_shielded(before), tokenizer.encode_shielded(with_answer)
        # Some tokenizers begin a text with a space, so the answer is read behind its prompt if no token spans both.
        joined = answer_ids[: len(prompt_ids)] == prompt_ids
        answer_ids = answer_ids[len(prompt_ids) :] if joined else tokenizer.encode_shielded(with_answer[len(before) :])
        if (end := self._first_stop(answer_ids)) is None:
            role = "tool" if answer.get("tool_calls") else "user"
            try:
                longer = tokenizer.render_chat([*talk, {"role": role, "content": "?"}], True, tools)
            except UserError:
                longer = ""
            next_ids = tokenizer.encode(longer[len(with_answer) :])[:1] if longer.startswith(with_answer) else []
            answer_ids += next_ids if self._first_stop(next_ids) == 0 else tokenizer.eos_token_ids[:1]
        return prompt_ids, answer_ids if end is None else answer_ids[: end + 1]

    def readable(self, messages: Messages, tools: Messages = (), begins: bool = True) -> list[dict[str, Any]]:
        """Return the messages in a form that the template writes, so that the policy reads all of them.

        Where the template does not tell developers from the system, they are the system. Where it leaves out, or
        refuses, the system's messages behind the first one, those that follow it at once become a part of it, and later
        ones messages of a user. Where it does so with a turn's second call, each call is a turn. begins: whether the
        first message is the first of the conversation.

        Raises UserError for any other role that it leaves out.
        """
        if not self._tokenizer.has_chat_template:
            return list(messages)  # rendering says that there is none
        tools, checks = self._shield(list(tools)), self._checks
        found: list[dict[str, Any]] = []
        first: list[dict[str, Any]] = []
        """The system's messages that the conversation begins with"""
        for message in messages:
            role = message["role"]
            if role == "developer" and "developer" not in self._tokenizer.template_source:
                role = "system"
            if role in INSTRUCTING and begins and not found:
                first.append({**message, "role": role})
                continue
            if role in INSTRUCTING and not checks.writes_role(role, tools):
                role = "user"
            elif role not in (*INSTRUCTING, "user", ASSISTANT, TOOL) and not checks.writes_role(role, tools):
                raise UserError(
                    f"the chat template of {self._tokenizer.directory} leaves out messages of the role {role!r}, so "
                    "the policy would not read them: send them as a role that it writes, such as user"
                )
            found.append({**message, "role": role})
        if not all(checks.writes_role(message["role"], tools, True) for message in first[1:]):
            first = [{**first[0], "content": "\n\n".join(message["content"] for message in first)}]
        found = [*first, *found]
        several = any(len(message.get("tool_calls", ())) > 1 for message in found)
        return split_turns(found) if several and not checks.writes_several_calls(tools) else found

    def refuse_unseen(self, messages: Messages, tools: Messages) -> None:
        """Raise UserError if the template does not write the tools, or calls and results of tools in the messages."""
        directory, tools = self._tokenizer.directory, self._shield(list(tools))
        if not self._tokenizer.has_chat_template:
            return  # rendering says that
        if tools and "tools" not in self._tokenizer.templates.choose(tools=True).variables:
            raise UserError(
                f"the chat template of {directory} never reads `tools`, so the policy would not see any: take a "
                "template that writes them (chat_template.jinja in the checkpoint directory)"
            )
        results = [message for message in messages if message.get("role") == TOOL]
        if results and (problem := self._checks.hidden_result(tools)):
            raise UserError(
                f"the chat template of {directory} does not write the result of a tool ({problem}): take a template "
                "that does (chat_template.jinja in the checkpoint directory)"
            )
        if not all(message.get("name") for message in results) and self._checks.names_results(tools):
            raise UserError(
                f"the chat template of {directory} writes the function's name beside the result of a tool, and there "
                "is a result whose call is not among the messages before it, by the call's id"
            )
        for message in messages:
            if message.get("tool_calls") and self._checks.leaves_out_calls(tools, bool(message["content"])):
                raise UserError(
                    f"the chat template of {directory} does not write the calls of an earlier answer, so the policy "
                    "would read results of calls that it has never seen: take a template that writes `tool_calls` "
                    "(chat_template.jinja in the checkpoint directory)"
                )

    def refuse_environment(self, tools: Messages) -> None:
        """Raise UserError if a conversation with an environment that has these tools, or none, cannot continue.

        A result has the id of its call and the function's name, as environments give them and `settle_results` finds
        them for agents.
        """
        answer = {"role": "user", "content": "1"}
        if tools:
            answer |= {"role": "tool", "name": tools[0]["function"]["name"], "tool_call_id": CALL_ID}
        self.following(self.stop_token_ids[:1] or [-1], [answer], tools)

    def warn_of_branches(self) -> None:
        """Log a warning if an agent's conversations cannot continue, so that each call begins a branch."""
        parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
        example_tool = {
            "type": "function",
            "function": {"name": "look", "description": "Look", "parameters": parameters},
        }
        for what, tools in (("result of a tool", [example_tool]), ("message of a user", [])):
            try:
                self.refuse_environment(tools)
            except UserError as error:
                logger.warning("an agent's call with a new %s begins a branch, or is refused: %s", what, error)

    def warn_of_ends(self) -> None:
        """Log a warning if the template ends turns with a token that does not stop sampling."""
        begin, answer = {"role": "user", "content": "?"}, self._placeholder
        try:
            alone = self._tokenizer.render_chat([begin, answer], False)
            followed = self._tokenizer.render_chat([begin, answer, begin])
        except UserError:
            return  # rendering the prompts says why
        behind = [self._tokenizer.encode(text.partition(self._mark)[2]) for text in (alone, followed)]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*behind, strict=False))
        ends = [token for token, _ in same]
        special = [token for token in ends if token in self._tokenizer.special_token_ids]
        if special and self._first_stop(ends) is None:
            logger.warning(
                "the chat template of %s ends turns with %r, which does not stop sampling: answers go on behind it, "
                "and demonstrations end with another token (set rollout.stop_token_ids = [%d])",
                self._tokenizer.directory, self._tokenizer.decode(special[:1], skip_special=False), special[0],
            )  # fmt: skip

    def _call(self, name: str, call_id: str) -> dict[str, Any]:
        return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {"x": self._mark}}}

    def _first_stop(self, ids: Sequence[int]) -> int | None:
        return next((place for place, token in enumerate(ids) if token in self.stop_token_ids), None)

    def following_text(self, messages: Messages) -> list[int]:
        """Like `following`, but without a template: encode the bare texts."""
        return self._tokenizer.encode_shielded("".join(self._shield(message["content"]) for message in messages))

    def _shielded(self, messages: Messages) -> list[dict[str, Any]]:
        return [message if message["role"] in INSTRUCTING else self._shield_values(message) for message in messages]

    def _shield_values(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._shield(value) for key, value in message.items()}

    def _shield(self, value: Any) -> Any:
        """Shield all texts in a value."""
        if isinstance(value, str):
            return self._tokenizer.shield(value)
        if isinstance(value, list):
            return [self._shield(item) for item in value]
        if isinstance(value, dict):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        return value
