"""The body of a program's request: JSON as the libraries of many languages write it."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import zlib
from typing import Any

from aiohttp import web

from torchtitan.rollout.conversation.tool_formats.format import finite_number, refuse_constant
from torchtitan.rollout.gateway.calls import WrongCall
from torchtitan.utils.typed_json import Object, WrongForm, decode, without_collection

# Parsing so many bytes holds up the gateway's other calls for a quarter of a second at most.
MAX_BODY_BYTES = 16 * 1024 * 1024
# Content-Encoding -> what zlib calls its form; some programs write deflate without a header.
ENCODINGS = {"gzip": (31,), "x-gzip": (31,), "deflate": (15, -15)}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: web.Request, timeout_s: float) -> dict[str, Any]:
    """Return the object in a request's body. Raises WrongCall."""
    try:
        data = await asyncio.wait_for(request.read(), timeout_s)
    except TimeoutError:
        raise WrongCall(f"the body took longer than {timeout_s:g} s", status=408) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    body = data if encoding in ("", "identity") else _decompressed(data, encoding)
    try:
        return decode(Object, body, len(body))
    except WrongForm as error:
        if (lenient := _lenient(body)) is None:
            raise WrongCall(f"the body is not JSON, or not an object: {error}") from None
        return lenient


def _decompressed(data: bytes, encoding: str) -> bytes:
    if encoding not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        raise WrongCall(f"Content-Encoding {encoding!r} is not read here: send {known} or none", status=415)
    for form in ENCODINGS[encoding]:
        reader = zlib.decompressobj(form)
        try:
            body = reader.decompress(data, MAX_BODY_BYTES + 1)
        except zlib.error:
            continue
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if reader.eof:
            return body
    raise WrongCall(f"the body is not {encoding}, as its Content-Encoding says")


def _too_large() -> WrongCall:
    return WrongCall(f"the body is larger than {MAX_BODY_BYTES} bytes", "request_too_large", 413)


def _lenient(body: bytes) -> dict[str, Any] | None:
    """Return an object that only `json` reads, with a byte order mark or half of a surrogate pair; None if it is none.

    JSON.stringify and json.dumps write such a half where a text was cut inside an emoji.
    """
    if not body.startswith(codecs.BOM_UTF8) and SURROGATE.search(body) is None:
        return None
    try:
        with without_collection():
            text = body.decode("utf-8-sig")
            data = json.loads(text, parse_constant=refuse_constant, parse_float=finite_number)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
