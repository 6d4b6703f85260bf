"""How each engine's server writes what its descriptor reads, for the contract in test_engines.py.

The forms are those of the servers' own classes (see test_engine_contracts.py for vLLM's and SGLang's versions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from torchtitan.inference.types import Completion, VersionSpan, make_label

Likeliest = list[list[tuple[float, int]]]
"""Log-prob and id of the likeliest tokens in each place"""


class StandIn:
    """What stands in for the server of one engine. It holds weights of no version until it is ordered to load some."""

    engine: ClassVar[str]
    """The name of the engine's folder"""
    truncates: ClassVar[bool] = True
    """Whether it samples with top-p and says which tokens that kept"""
    gives_likeliest: ClassVar[bool] = True
    """Whether a teacher of it returns the likeliest tokens of each place"""

    def __init__(self) -> None:
        self.label = "default"
        """What it says that it holds"""

    def sampled(self, prompt: list[int], samples: Sequence[Completion]) -> Any:
        """The answer with these samples."""
        raise NotImplementedError

    def scored(self, token_ids: list[int], log_probs: list[float], span: VersionSpan) -> Any:
        """The answer with the log-probs of all tokens but the first, computed under the version of `span`."""
        raise NotImplementedError

    def taught(self, token_ids: list[int], log_probs: list[float], likeliest: Likeliest) -> Any:
        """A teacher's answer, with the likeliest tokens of each place unless there are none."""
        raise NotImplementedError

    def order(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The answer to an agent's order, which is obeyed. Raises KeyError for any other request."""
        raise KeyError(path)


def labelled(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """Spans as servers give them that say a label for each."""
    return [{"version": make_label(span.epoch, span.version), "start": span.start, "end": span.end} for span in spans]


class EmbeddedStandIn(StandIn):
    engine = "embedded"

    def sampled(self, prompt: list[int], samples: Sequence[Completion]) -> Any:
        return {"completions": [sample.to_json() for sample in samples]}

    def scored(self, token_ids: list[int], log_probs: list[float], span: VersionSpan) -> Any:
        return {"log_probs": log_probs, "epoch": span.epoch, "version": span.version}

    def taught(self, token_ids: list[int], log_probs: list[float], likeliest: Likeliest) -> Any:
        top = [[[token for _, token in row], [log_prob for log_prob, _ in row]] for row in likeliest]
        return {"log_probs": log_probs, "epoch": "", "version": 0, "top": top or None}


class VLLMStandIn(StandIn):
    engine = "vllm"

    def sampled(self, prompt: list[int], samples: Sequence[Completion]) -> Any:
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return {"choices": choices[::-1]}  # they come as they are finished

    def _choice(self, index: int, sample: Completion) -> dict[str, Any]:
        rows = zip(sample.token_ids, sample.log_probs, strict=True)
        return {
            "index": index,
            "finish_reason": sample.finish_reason,
            "token_ids": sample.token_ids,
            "logprobs": {"content": [{"token_id": token, "logprob": log_prob, "rank": 1} for token, log_prob in rows]},
            "weight_versions": labelled(sample.spans),
            "sampling_mask": sample.kept_token_ids,
            "routed_experts": None,
        }

    def scored(self, token_ids: list[int], log_probs: list[float], span: VersionSpan) -> Any:
        choice = {"index": 0, "finish_reason": "length", "token_ids": [4], "weight_versions": labelled([span])}
        return {"choices": [choice], "prompt_logprobs": self._rows(token_ids, log_probs, [])}

    def taught(self, token_ids: list[int], log_probs: list[float], likeliest: Likeliest) -> Any:
        return {"choices": [{"prompt_logprobs": self._rows(token_ids, log_probs, likeliest)}]}

    def _rows(self, token_ids: list[int], log_probs: list[float], likeliest: Likeliest) -> list[Any]:
        rows: list[Any] = [None]
        for place, (token, log_prob) in enumerate(zip(token_ids[1:], log_probs, strict=True)):
            row = {str(other): {"logprob": value} for value, other in (likeliest[place] if likeliest else [])}
            rows.append(row | {str(token): {"logprob": log_prob, "rank": 1, "decoded_token": None}})
        return rows

    def order(self, method: str, path: str, body: dict[str, Any]) -> Any:
        path = urlsplit(path).path
        if path == "/update_weight_version":
            self.label = body["new_version"]
        answers: dict[str, Any] = {
            "/version": {"version": "0.33.0"},
            "/openapi.json": {
                "paths": {path: {} for path in ("/inference/v1/generate", "/pause", "/update_weights", "/weight_info")}
            },
            "/get_world_size": {"world_size": 1},
            "/health": "",
            "/weight_info": {"weight_version": self.label},
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/reset_prefix_cache": {"success": True},
            "/collective_rpc": {"results": [None]},
            "/update_weight_version": {"success": True},
        }
        return answers[path]


class SGLangStandIn(StandIn):
    engine = "sglang"

    def sampled(self, prompt: list[int], samples: Sequence[Completion]) -> Any:
        return [self._sample(sample) for sample in samples]

    def _sample(self, sample: Completion) -> dict[str, Any]:
        # Log-probs of the untruncated distribution come beside those that the tokens were sampled with.
        truncated = sample.kept_token_ids is not None
        rows = zip(sample.log_probs, sample.token_ids, strict=True)
        about = {
            "finish_reason": {"type": sample.finish_reason},
            "output_token_logprobs": [[log_prob - truncated, token, None] for log_prob, token in rows],
            "weight_version": make_label("e1", 4),
            "weight_versions": labelled(sample.spans),
        }
        if truncated:
            about |= {
                "output_token_sampling_mask": sample.kept_token_ids,
                "output_token_sampling_logprobs": sample.log_probs,
            }
        return {"output_ids": sample.token_ids, "meta_info": about}

    def scored(self, token_ids: list[int], log_probs: list[float], span: VersionSpan) -> Any:
        about = {"input_token_logprobs": self._rows(token_ids, log_probs), "weight_versions": labelled([span])}
        return {"output_ids": [4], "meta_info": about}

    def taught(self, token_ids: list[int], log_probs: list[float], likeliest: Likeliest) -> Any:
        top = [None, *([[log_prob, token, None] for log_prob, token in row] for row in likeliest)]
        about = {"input_token_logprobs": self._rows(token_ids, log_probs), "weight_version": "default"}
        return {"output_ids": [4], "meta_info": about | ({"input_top_logprobs": top} if likeliest else {})}

    def _rows(self, token_ids: list[int], log_probs: list[float]) -> list[list[Any]]:
        rows = zip([None, *log_probs], token_ids, strict=True)
        return [[log_prob, token, None] for log_prob, token in rows]

    def order(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights_from_disk":
            self.label = body["weight_version"]
        answers: dict[str, Any] = {
            "/server_info": {"version": "0.5.23", "tp_size": 1, "disable_overlap_schedule": True},
            "/model_info": {"weight_version": self.label},
            "/pause_generation": {"status": "ok"},
            "/continue_generation": {"status": "ok"},
            "/abort_request": None,
            "/update_weights_from_disk": {"success": True, "message": ""},
        }
        return answers[urlsplit(path).path]


STAND_INS: list[type[StandIn]] = [EmbeddedStandIn, VLLMStandIn, SGLangStandIn]
"""All of those that are servers"""
