"""Loads into a real vLLM that could leave it with other weights than it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import BF16_SPREAD, FP32_TOLERANCE, LAYERS, log_probs
from tests.engines.vllm_traps import PROBE, SCORED, cases

# What a load that went wrong moves log-probs by in the mean, far above what rounding may.
WRONG = 0.1


Results = dict[str, Any]


@pytest.fixture(scope="module")
def results_of_types(vllm_python: Path, engine_model: Callable[..., Path]) -> list[Results]:
    """Of tests/engines/vllm_traps.py, all in float32 and some in bfloat16: case -> log-probs, or an error; and what
    transformers says of the old and the new model."""
    asked: list[tuple[str, list[str]]] = [("float32", []), ("bfloat16", ["in_place", "loaded", "found"])]
    models = [[engine_model(tied=True, dtype=dtype, seed=seed) for seed in (0, 1)] for dtype, _ in asked]
    found = cases(
        vllm_python, [(str(old), str(new), only) for (old, new), (_, only) in zip(models, asked, strict=True)]
    )
    for results, pair, (dtype, _) in zip(found, models, asked, strict=True):
        results["old"], results["new"] = (log_probs(model, PROBE, dtype)[-SCORED:] for model in pair)
    return found


@pytest.fixture
def results(results_of_types: list[Results]) -> Results:
    return results_of_types[0]


def difference(results: Results, case: str, weights: str = "new") -> float:
    """Mean difference of a case's log-probs from transformers'."""
    assert isinstance(results[case], list), results[case]
    return sum(abs(a - b) for a, b in zip(results[case], results[weights], strict=True)) / SCORED


def test_what_is_loaded_is_served(results: Results) -> None:
    assert difference(results, "first", "old") < FP32_TOLERANCE
    assert difference(results, "loaded") < FP32_TOLERANCE and difference(results, "loaded_again") < FP32_TOLERANCE
    assert difference(results, "loaded", "old") > WRONG


def test_a_layer_that_nobody_packs_anew_is_an_error(results: Results) -> None:
    for case in ("stale_head", "stale_head_again"):
        assert results[case] == "IncompleteVersion: 1 layers got no weights: lm_head"


def test_old_packed_weights_are_freed_before_new_ones_are_made(results: Results) -> None:
    """Both at a time would be one model more in memory."""
    # All linear layers and the head; the embedding is only looked up.
    assert len(results["packed_before"]) == 4 * LAYERS + 1
    assert results["packed_while_loading"] == [] and results["packed_after"] == results["packed_before"]
    assert difference(results, "one_model_at_a_time") < FP32_TOLERANCE


def test_an_element_that_is_not_as_it_was_sent_is_found(results_of_types: list[Results]) -> None:
    """Also in what is computed with in a packed copy, where log-probs would hardly tell."""
    for results in results_of_types:
        assert results["found"].pop("") == []
        for name, found in results["found"].items():
            assert len(found) == 1 and name in found[0].split(", ")


def check_in_place(results: Results, tolerance: float) -> None:
    """All that is packed; that memory may change once they are loaded."""
    assert results["in_place_layers"] == results["layers_without_weight"]
    assert difference(results, "in_place") < tolerance and difference(results, "in_place", "old") > WRONG + tolerance
    assert results["in_place"] == results["loaded"], "the layers hold the same either way"


def test_weights_are_packed_from_where_they_were_staged(results: Results) -> None:
    assert results["in_place_layers"] == 4 * LAYERS, "four matrices of each layer"
    check_in_place(results, FP32_TOLERANCE)


def test_weights_in_bfloat16_are_packed_from_where_they_were_staged(results_of_types: list[Results]) -> None:
    # Where oneDNN packs nothing in bfloat16 for a processor, vLLM computes with torch's products: without AVX-512.
    assert results_of_types[1]["in_place_layers"] == 4 * LAYERS or not torch.cpu._is_avx512_supported()
    # Twice the root mean square, since the mean is of a few tokens: less than what is wrong.
    check_in_place(results_of_types[1], 2 * BF16_SPREAD)


def test_a_load_that_broke_off_is_given_up_before_the_next(results: Results) -> None:
    assert difference(results, "after_a_failure") < FP32_TOLERANCE


def test_a_version_with_something_missing_is_an_error(results: Results) -> None:
    assert "IncompleteVersion: 2 parameters " in results["incomplete"] and "layers.1.mlp" in results["incomplete"]
