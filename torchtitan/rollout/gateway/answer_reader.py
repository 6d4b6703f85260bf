"""Reads the calls of tools in the policy's answers, with the format or the parser that the run names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torchtitan.inference.types import Completion
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_detection import detect_format
from torchtitan.rollout.conversation.tool_formats.own import OwnFormat
from torchtitan.rollout.conversation.tool_formats.registry import AUTO, FORMATS
from torchtitan.rollout.gateway.calls import Call, Choice, cut, make_choice
from torchtitan.rollout.gateway.parser_process import ParserProcess

Result = TypeVar("Result")


class AnswerReader:
    """Reads answers at once; where a parser of the user's own does, in a thread, so that other calls go on meanwhile.

    Both methods raise ParserUnavailable if there is no process for such a parser.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str):
        """tool_parser: see environment.tool_parser."""
        self._tokenizer, self._tool_parser = tokenizer, tool_parser
        self._parser: ParserProcess | None = None
        self._thread = ThreadPoolExecutor(1, "reads-answers")

    async def start(self) -> None:
        """Raises UserError if a parser of the user's own cannot be loaded, ParserUnavailable if its process does not
        start."""
        form = FORMATS.get(self._tool_parser)
        if self._tool_parser != AUTO and (form is None or isinstance(form, OwnFormat)):
            self._parser = ParserProcess(self._tool_parser)
            await self._in_thread(self._parser.start)
            FORMATS[self._tool_parser] = OwnFormat(self._tool_parser, self._parser.parse)
        self._format = detect_format(self._tool_parser, self._tokenizer)

    async def cut(self, completion: Completion, call: Call, prompt_ids: Sequence[int]) -> tuple[Completion, int]:
        """See calls.cut."""
        return await self._in_thread(lambda: cut(completion, call, self._tokenizer, self._format, prompt_ids))

    async def choice(self, completion: Completion, call: Call, name: str, prompt_ids: Sequence[int]) -> Choice:
        """See calls.make_choice."""
        return await self._in_thread(
            lambda: make_choice(completion, call, self._tokenizer, name, self._format, prompt_ids)
        )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        if self._parser is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """End the parser's process, whatever it reads. The next run of this process finds the formats as they were."""
        if self._parser is not None:
            self._parser.stop()
            await self._in_thread(self._parser.close)
            # Only now: what still reads would find no calls, instead of no parser.
            FORMATS.pop(self._tool_parser, None)
        self._thread.shutdown(wait=False)
