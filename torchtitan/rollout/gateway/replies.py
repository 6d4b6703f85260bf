"""What the gateway replies where a call has no stream: JSON, and errors in the form of their API."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from aiohttp import web

from torchtitan.rollout.gateway.calls import WrongCall
from torchtitan.rollout.gateway.dialects.dialect import Dialect, compact_json
from torchtitan.rollout.gateway.exchange import TURNS_USED_UP, NoAnswer

logger = logging.getLogger(__name__)

SESSION_ENDED = "session_ended"


def json_reply(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=compact_json(data), status=status, content_type="application/json")


def error_of(error: Exception, sampled: bool = False) -> tuple[str, int, str | None]:
    """Return (message, status, code) of what ended a call. sampled: its answer was there already, so that whatever went
    wrong is not the program's fault."""
    if isinstance(error, WrongCall):
        return str(error), error.status, error.code
    if isinstance(error, NoAnswer):
        return f"the policy could not answer: {error}", 503, None
    if isinstance(error, RecursionError) and not sampled:
        return "the body is nested too deeply", 400, None
    if isinstance(error, web.HTTPException):
        return error.text or error.reason, error.status, None
    logger.error("a call failed: %s", "".join(traceback.format_exception(error)))
    return f"an error of the gateway, which its log describes: {type(error).__name__}", 500, None


def refused(dialect: Dialect, error: WrongCall) -> web.Response:
    response = json_reply(dialect.error(str(error), error.status, error.code), error.status)
    if error.code == TURNS_USED_UP:
        # Libraries repeat a call that gets 429, unless they are told not to: an episode gets no further answers.
        response.headers["x-should-retry"] = "false"
    return response


def ended() -> WrongCall:
    return WrongCall("this session has ended: its episode is over", SESSION_ENDED, 410)
