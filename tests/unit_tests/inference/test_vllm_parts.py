"""Our side of vLLM without vLLM: dialect, mailbox, token, spread over ranks, adopted weights, command lines."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions
from torchtitan.inference.engines.vllm.direct import Mailbox
from torchtitan.inference.engines.vllm.engine import ENGINE
from torchtitan.inference.serving import middleware as engine_server
from torchtitan.inference.serving.middleware import TOKEN_ENV_VARIABLE, TokenMiddleware
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

# ForeignEngine


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r-7", [5, 6, 7], SamplingParameters(**{"max_tokens": 4, **sampling}))


def test_a_request_is_one_call_with_a_salt_of_its_own() -> None:
    call = ENGINE.generate(request(n=3, temperature=0.7, seed=5, stop_token_ids=[1], top_k=20))
    assert call.path == "/inference/v1/generate"
    assert call.body["token_ids"] == [5, 6, 7] and call.body["cache_salt"] == call.body["request_id"] == "r-7"
    sampling = call.body["sampling_params"]
    assert (sampling["n"], sampling["seed"], sampling["top_k"], sampling["stop_token_ids"]) == (3, 5, 20, [1])
    assert sampling["ignore_eos"] is True and sampling["logprobs"] == 0
    assert ENGINE.score([5, 6, 7]).body["sampling_params"]["prompt_logprobs"] == 0


# Mailbox

VERSION = StagedVersion("e1", 3, "d3", {"w": torch.zeros(2)})
# More than a test may take.
LONG_SECONDS = 1000.0


def offering(mailbox: Mailbox, **deadlines: float) -> tuple[threading.Thread, list[BaseException | None]]:
    ends: list[BaseException | None] = []

    def work() -> None:
        try:
            mailbox.offer(VERSION, deadlines.get("pickup", 10.0), deadlines.get("load", 10.0))
            ends.append(None)
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, ends


@pytest.mark.parametrize("error", [None, "half of it"])
def test_what_is_offered_is_taken_and_its_end_comes_back(error: str | None) -> None:
    mailbox = Mailbox()
    thread, ends = offering(mailbox)
    assert mailbox.take("e1", 3, "d3", 10.0) is VERSION
    assert thread.is_alive()
    assert mailbox.finish(error)
    thread.join(PATIENCE_S)
    assert ends == [None] if error is None else isinstance(ends[0], RuntimeError) and error in str(ends[0])


def test_what_nobody_takes_is_refused_and_cannot_be_taken_later() -> None:
    mailbox = Mailbox()
    thread, ends = offering(mailbox, pickup=0.05)
    thread.join(PATIENCE_S)
    assert isinstance(ends[0], WeightsRefused)
    with pytest.raises(LookupError, match="version 3"):
        mailbox.take("e1", 3, "d3", 0.05)


def test_what_is_refused_is_not_waited_for() -> None:
    mailbox = Mailbox()
    mailbox.refuse(VERSION, "it does not fit")
    with pytest.raises(LookupError, match="does not fit"):
        mailbox.take("e1", 3, "d3", LONG_SECONDS)
    # The same version may fit another time.
    thread, ends = offering(mailbox)
    assert mailbox.take("e1", 3, "d3", 10.0) is VERSION
    mailbox.finish(None)
    thread.join(PATIENCE_S)
    assert ends == [None]


def test_another_version_is_not_taken() -> None:
    mailbox = Mailbox()
    thread, ends = offering(mailbox, pickup=0.5)
    for wanted in (("e2", 3, "d3"), ("e1", 4, "d3"), ("e1", 3, "d4")):
        with pytest.raises(LookupError):
            mailbox.take(*wanted, 0.02)
    thread.join(PATIENCE_S)
    assert isinstance(ends[0], WeightsRefused)


def test_a_load_that_does_not_end_is_no_refusal() -> None:
    mailbox = Mailbox()
    thread, ends = offering(mailbox, load=0.1)
    mailbox.take("e1", 3, "d3", 10.0)
    thread.join(PATIENCE_S)
    assert isinstance(ends[0], RuntimeError) and not isinstance(ends[0], WeightsRefused)
    assert not mailbox.finish(None)  # too late: no caller waits


def test_a_load_that_ends_late_is_not_the_end_of_the_next_offer() -> None:
    mailbox = Mailbox()
    thread, _ = offering(mailbox, load=0.05)
    mailbox.take("e1", 3, "d3", 10.0)
    thread.join(PATIENCE_S)
    thread, ends = offering(mailbox)
    while mailbox._staged is None:
        time.sleep(0.001)
    assert not mailbox.finish(None), "what was taken was given up, and what is offered was not taken"
    mailbox.take("e1", 3, "d3", 10.0)
    time.sleep(0.05)
    assert thread.is_alive(), "it is not loaded yet"
    assert mailbox.finish(None)
    thread.join(PATIENCE_S)
    assert ends == [None]


@pytest.mark.parametrize("taken", [False, True])
def test_closing_tells_who_waits(taken: bool) -> None:
    mailbox = Mailbox()
    thread, ends = offering(mailbox)
    if taken:
        mailbox.take("e1", 3, "d3", 10.0)
    mailbox.close("it ends")
    thread.join(PATIENCE_S)
    assert "it ends" in str(ends[0]) and isinstance(ends[0], WeightsRefused) is not taken
    with pytest.raises(WeightsRefused):
        mailbox.offer(VERSION, 10.0, 10.0)


# Token


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> TokenMiddleware:
    monkeypatch.setenv(TOKEN_ENV_VARIABLE, "MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "secret")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "let in"})

    return TokenMiddleware(application)


@pytest.mark.parametrize(
    ("kind", "headers", "answer"),
    [
        ("http", [(b"authorization", b"Bearer secret")], "let in"),
        ("http", [], "http.response.start"),
        ("http", [(b"authorization", b"Bearer secreT")], "http.response.start"),
        ("http", [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer x")], "http.response.start"),
        ("websocket", [(b"authorization", b"Bearer secret")], "let in"),
        ("websocket", [], "websocket.close"),
        ("lifespan", [], "let in"),
    ],
)
def test_only_who_knows_the_token_gets_in(
    guarded: TokenMiddleware, kind: str, headers: list[tuple[bytes, bytes]], answer: str
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(guarded({"type": kind, "headers": headers}, receive, send))
    assert sent[0]["type"] == answer
    assert sent[0].get("status", 401) == 401


def test_a_server_without_a_token_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV_VARIABLE, "NOT_SET")
    with pytest.raises(KeyError):
        TokenMiddleware(lambda *_: None)  # type: ignore[arg-type, return-value]


# Loads that are done again


class Linear(torch.nn.Module):
    """As vLLM's: its weight's loader is a method of its own, and what computes is a packed copy."""

    tp_size = 1

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 4), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.quant_method = Unquantized()

    def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        raise AssertionError("nothing was to be copied")


class Unquantized:
    def process_weights_after_loading(self, layer: Linear) -> None:
        layer.cpu_linear = layer.weight.data_ptr()  # type: ignore[assignment]
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def materialize_layer(layer: torch.nn.Module, info: Any) -> None:
    info.materialized = True


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchtitan.inference.engines.vllm.loading with modules of a vLLM, as far as it knows them."""
    layers, reload = "vllm.model_executor.layers", "vllm.model_executor.model_loader.reload"
    names = ("ReplicatedLinear", "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
    layerwise = SimpleNamespace(
        _get_original_loader=lambda weight: weight.weight_loader,
        get_layerwise_info=None,
        materialize_layer=materialize_layer,
    )
    other = type("Other", (), {})
    modules = {
        "vllm.config": SimpleNamespace(ModelConfig=other),
        "vllm.distributed": SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0),
        f"{layers}.attention": SimpleNamespace(is_deferred_attention_layer=lambda _module: False),
        f"{layers}.linear": SimpleNamespace(
            **dict.fromkeys(names, Linear), RowParallelLinear=other, UnquantizedLinearMethod=Unquantized
        ),
        f"{layers}.vocab_parallel_embedding": SimpleNamespace(
            ParallelLMHead=other, UnquantizedEmbeddingMethod=other, VocabParallelEmbedding=other
        ),
        reload: SimpleNamespace(layerwise=layerwise, finalize_layerwise_reload=None, initialize_layerwise_reload=None),
        f"{reload}.layerwise": layerwise,
        f"{reload}.meta": SimpleNamespace(materialize_meta_tensor=torch.empty_like),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace()),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "torchtitan.inference.engines.vllm.loading", raising=False)
    yield importlib.import_module("torchtitan.inference.engines.vllm.loading")
    sys.modules.pop("torchtitan.inference.engines.vllm.loading")


def noted(loading: Any, layer: Linear, weights: dict[str, torch.Tensor], method: Any = None) -> Any:
    """What is noted where the layer's weight consists of these rows; afterwards it has been packed."""
    recorder, bind = loading.LoadRecorder(), inspect.signature(layer.weight.weight_loader).bind  # type: ignore[attr-defined]
    pieces = [(name, bind(layer.weight, piece, name)) for name, piece in recorder.named(weights.items())]
    info = SimpleNamespace(loaded_weights=[("weight", call) for _, call in pieces])
    with loading.recording(recorder):
        loading.layerwise.materialize_layer(layer, info)
    assert info.materialized and loading.layerwise.materialize_layer is materialize_layer
    layer.quant_method = method or Unquantized()
    Unquantized().process_weights_after_loading(layer)
    return recorder


AREA = torch.arange(32.0).view(8, 4)
ROWS = {"k": AREA[4:6], "v": AREA[6:], "q": AREA[:4]}


def test_a_layer_takes_what_lies_as_it_wants_it(loading: Any) -> None:
    layer = Linear(8)
    recorder, model = noted(loading, layer, ROWS), torch.nn.Sequential(layer)
    live = layer.weight
    assert recorder.cover(model, ROWS)
    recorder.replay(model, torch.float32, ROWS)
    assert layer.cpu_linear == AREA.data_ptr() and layer.weight is live and not live.numel()


def use_other_layers_loader(layer: Linear) -> None:
    layer.weight.weight_loader = Linear(8).weight_loader  # type: ignore[attr-defined]


def be_split(layer: Linear) -> None:
    layer.tp_size = 2


def have_more_rows(layer: Linear) -> None:
    layer.weight.data = torch.zeros(16, 4)


def have_another_type(layer: Linear) -> None:
    layer.weight.data = torch.zeros(8, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [use_other_layers_loader, be_split, have_more_rows, have_another_type])
def test_other_layers_are_loaded_by_their_loaders(change: Any, loading: Any) -> None:
    layer = Linear(8)
    change(layer)
    recorder = noted(loading, layer, ROWS)
    with pytest.raises(AssertionError, match="nothing was to be copied"):
        recorder.replay(torch.nn.Sequential(layer), torch.float32, ROWS)


def test_what_is_not_simple_is_left_to_vllm(loading: Any) -> None:
    """Other names than were noted, a parameter that was not, and a layer that does more than pack."""
    plain, packing = Linear(8), Linear(8)
    recorder = noted(loading, plain, ROWS)
    assert not recorder.cover(plain, {**ROWS, "more": AREA}) and not recorder.cover(plain, {"q": AREA})
    assert not recorder.cover(torch.nn.Sequential(plain, Linear(8)), ROWS)
    assert not noted(loading, packing, ROWS, SimpleNamespace()).cover(packing, ROWS)
    assert not loading.LoadRecorder().cover(torch.nn.Sequential(), {})


# Command lines


def options(**changes: Any) -> EngineOptions:
    values: dict[str, Any] = {
        "name": "actor-0", "model": "/m", "python": "/p", "route": "direct", "port_file": Path("/f"),
        "token_env": "T", "parent_pid": 7, "tensor_parallel_size": 2, "arguments": ("--max-model-len", "9"),
    }  # fmt: skip
    return EngineOptions(**{**values, **changes})


def test_what_is_passed_through_comes_last() -> None:
    command, environment = ENGINE.command(options(memory_gb=0.5))
    assert command[:3] == ["/p", "-m", "torchtitan.inference.engines.vllm.serve"] and command[-2:] == [
        "--max-model-len",
        "9",
    ]
    vllm_options = command[command.index("--") + 1 :]
    assert vllm_options[vllm_options.index("--tensor-parallel-size") + 1] == "2"
    assert vllm_options[vllm_options.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    backends = {"direct": ['{"backend": "torchtitan"}'], "agent": []}
    for route, backend in backends.items():
        line = ENGINE.command(options(route=route))[0]
        assert [
            argument for argument, name in zip(line[1:], line, strict=False) if name == "--weight-transfer-config"
        ] == backend
    assert all(isinstance(value, str) for value in environment.values())


def test_serve_separates_its_options_from_vllms(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("T", "secret")
    arguments, vllm_options = engine_server.parse_arguments("vllm", "", ["--token-env", "T", "--", "--port", "1"])
    assert vllm_options == ["--port", "1"] and arguments.port == 0
    monkeypatch.delenv("T")
    with pytest.raises(SystemExit):
        engine_server.parse_arguments("vllm", "", ["--token-env", "T"])
    assert "not set" in capsys.readouterr().err


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    with engine_server.reserve("127.0.0.1", 0) as holding:
        yield holding


def test_a_reserved_port_is_vllms_and_nobody_elses(reserved: socket.socket) -> None:
    address = reserved.getsockname()
    with socket.socket() as server, socket.socket() as stranger:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        with pytest.raises(OSError):
            stranger.bind(address)
        with socket.create_connection(address, 5):
            pass


def test_the_entry_point_names_a_function() -> None:
    import tomli

    project = tomli.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["torchtitan"].split(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_what_runs_inside_vllm_imports_little() -> None:
    """Our modules there need nothing that vLLM's environment may lack."""
    import subprocess

    code = (
        "import sys, torchtitan.inference.engines.vllm.direct, "
        "torchtitan.inference.serving.middleware, torchtitan.inference.engines.vllm.serve, "
        "torchtitan.weight_sync.actor.actor, "
        "torchtitan.inference.serving.weight_verification, torchtitan.utils.machine\n"
        # This one registers our backend, and looks before each step, as soon as it is imported.
        "from unittest import mock\n"
        "changed = ['vllm.distributed.weight_transfer.factory', 'vllm.v1.worker.worker_base']\n"
        "with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in changed}):\n"
        "    import torchtitan.inference.engines.vllm.extension\n"
        "    for name in changed: del sys.modules[name]\n"
        "    imported = list(sys.modules)\n"
        "ours = {m.split('.')[0] for m in imported}\n"
        "print(sorted(ours & {'transformers', 'aiohttp', 'rich', 'vllm'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]", os.linesep + done.stdout
