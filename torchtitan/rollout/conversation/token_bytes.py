"""The bytes of single tokens. Text will not do: a character may be spread over several tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokenizers write for them: printable ones stand for
    themselves, the others for what lies behind the first 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return alphabet


class TokenBytes:
    """Finds the bytes of a token.

    Args:
        settings: the content of tokenizer.json.
        added: texts of added tokens, which stand for themselves.
        piece_of: returns how the vocabulary writes a token; None if it has no such token.
    """

    def __init__(self, settings: Mapping[str, Any], added: Mapping[int, str], piece_of: Callable[[int], str | None]):
        self._added, self._piece_of = added, piece_of
        decoders = list(_decoders(settings.get("decoder")))
        kinds = {decoder.get("type") for decoder in decoders}
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._spaces = list(filter(None, map(_text_for_space, decoders)))

    def find(self, token: int) -> bytes:
        """Return a token's bytes; none for a token that the vocabulary does not hold."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._piece_of(token)
        if piece is None:
            return b""
        if self._alphabet is not None and all(character in self._alphabet for character in piece):
            return bytes(self._alphabet[character] for character in piece)
        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for space in self._spaces:
            piece = piece.replace(space, " ")
        return piece.encode()


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield a decoder of tokenizer.json and those that it consists of."""
    if isinstance(decoder, dict):
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _decoders(part)


def _text_for_space(decoder: Mapping[str, Any]) -> str:
    """Return what a decoder replaces with a space; empty if it replaces nothing."""
    if decoder.get("type") == "Metaspace":
        return str(decoder.get("replacement", "▁"))
    pattern = decoder.get("pattern")
    if decoder.get("type") == "Replace" and decoder.get("content") == " " and isinstance(pattern, dict):
        return str(pattern.get("String", ""))
    return ""
