"""What an actor has to be to sample for a run, whoever has started it, and how actors join a run and leave it by
themselves (inference.discover).

One definition holds for all: demands() is what a run needs, offers() what an actor says of itself. The registry
compares the two for a guest, and the pool for every actor that it meets, before it is connected to the weights.

    python -m torchtitan.inference.engines.embedded --model DIR --host 10.0.0.7 --join 10.0.0.1:5000

Such a guest keeps a connection to the registry of the run. What it offers is compared with what the run needs before it
is let in. The registry tells the pool, which connects it to the weights and sends it requests, as one of
inference.servers. On SIGTERM the guest asks for no more requests, and ends when the run has all its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torchtitan
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import Facts, base_url
from torchtitan.models.shape.checkpoint_files import fingerprint
from torchtitan.models.shape.checkpoint_shape import model_facts, read_args
from torchtitan.utils.addresses import reachable_host
from torchtitan.weight_sync.wire import runtime as wire
from torchtitan.weight_sync.wire.clients import RegistryClient
from torchtitan.weight_sync.wire.handshake import GUEST, Identity
from torchtitan.weight_sync.wire.runtime import Channel, Message, Runtime
from torchtitan.weight_sync.wire.sockets import SocketRuntime

logger = logging.getLogger(__name__)

LOOK_S = 0.5
# A guest that is refused, or whose run has not begun, tries again so often.
RETRY_S = 2.0
GOODBYE_S = 1.0

# A longer value is compared by its digest.
MAX_FACT_CHARACTERS = 100
# The log-probs of tokens under the very distribution that they were sampled from.
PROCESSED = "processed"


def shape_facts(directory: str) -> Facts:
    """Return what config.json says of how the model computes: a digest of all of it, and by name what people look for
    when the digest differs. Raises UserError."""
    args = read_args(directory)
    digest = hashlib.blake2b(json.dumps(model_facts(args), sort_keys=True).encode(), digest_size=16).hexdigest()
    named = {
        "vocabulary": args.vocab_size,
        "layers": args.num_hidden_layers,
        "hidden-size": args.hidden_size,
        "attention-heads": args.num_attention_heads,
        "key-value-heads": args.num_key_value_heads,
        "rope-theta": args.rope_theta,
        "end-tokens": sorted(args.eos_token_ids),
    }
    return {**{name: fact_text(value) for name, value in named.items()}, "model": digest}


def overridden_facts(overrides: Mapping[str, Any]) -> Facts:
    """Return the facts of shape_facts() that keys of config.json change which an engine was told to take otherwise."""
    flat = {**overrides, **(overrides.get("text_config") or {})}
    flat |= flat.get("rope_parameters") or {}
    keys = {
        "vocab_size": "vocabulary", "num_hidden_layers": "layers", "hidden_size": "hidden-size",
        "num_attention_heads": "attention-heads", "num_key_value_heads": "key-value-heads", "rope_theta": "rope-theta",
    }  # fmt: skip
    return {name: fact_text(flat[key]) for key, name in keys.items() if key in flat}


def fact_text(value: Any) -> str:
    """Return a value that has to be the same on both sides: 10000 and 10000.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value)
    if len(text) > MAX_FACT_CHARACTERS:
        return f"digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return text


def demands(config: JobConfig) -> Facts:
    """Return what an actor of this run has to offer: a text is what it has to be, a number what it has to be at least.
    Raises UserError."""
    inference, model = config.inference, config.model.hf_assets_path
    wanted: Facts = {
        "engine": inference.backend,
        "package": torchtitan.__version__,
        **shape_facts(model),
        "dtype": inference.dtype,
        "log-probs": PROCESSED,
        "in-flight-kv": inference.in_flight_kv,
        "update-mode": inference.update_mode,
        "max-sequences": inference.max_sequences,
        "max-length": config.training.seq_len,
        "exact": int(inference.engine.exact),
        "verify-every": int(config.verification == "digest"),
    }
    # Adapters are merged into the actor's own weights. The actors that a run starts read the very files of the run, and
    # for others all of them are read.
    if config.lora.rank and (inference.servers or inference.discover):
        wanted["weights"] = fingerprint(model)
    return wanted


def offers(arguments: argparse.Namespace, engine: str, with_weights: bool = True) -> Facts:
    """Return what an actor with this command line offers. with_weights: also a digest of the weights in its checkpoint,
    all of which are read for it. Raises UserError."""
    facts: Facts = {
        "engine": engine,
        "package": torchtitan.__version__,
        **shape_facts(arguments.model),
        "log-probs": PROCESSED,
        "dtype": arguments.dtype,
        "in-flight-kv": arguments.in_flight_kv,
        "update-mode": arguments.update_mode,
        "max-sequences": arguments.max_sequences,
        "max-length": arguments.max_length or read_args(arguments.model).max_position_embeddings,
        "exact": int(getattr(arguments, "exact", False)),
        "verify-every": int(arguments.verify_every > 0),
    }
    return facts | ({"weights": _weights_of(arguments.model)} if with_weights else {})


@functools.lru_cache(maxsize=1)
def _weights_of(directory: str) -> str:
    """The fingerprint of the checkpoint that an actor has begun with. Each run and each return asks for it, and a large
    one takes minutes to read."""
    return fingerprint(directory)


class GuestClient(RegistryClient):
    """The connection by which a guest says that it is there. failure: why it has given up."""

    retry_s = RETRY_S

    def __init__(
        self, runtime: Runtime, registry: str, name: str, token: str, url: str, offered: Facts, join_for_s: float
    ):
        identity, about = Identity.of(token, GUEST, name), {"url": url, "offers": offered}
        self._named = registry
        super().__init__(runtime, registry, identity, about, self._joined, lambda _message: None, join_for_s)
        self._leaves = False
        self.gone = threading.Event()
        """The registry knows that the guest leaves, or there is none"""

    def leave(self) -> None:
        """Say that all requests are answered; `gone` is set when the registry knows."""
        self._leaves = True
        if self.connected:
            self.tell({"type": "leave"})
        else:
            self.gone.set()

    def _joined(self) -> None:
        logger.info("%s has joined the run whose registry is at %s", self._identity.name, self.address)

    def _dial(self) -> None:
        # Anew each time: the name may lead to another machine by now.
        try:
            self.address = numeric(self._named)
        except UserError as error:
            self._failed(str(error))
        else:
            super()._dial()

    def _opened(self, channel: Channel, fields: Message) -> None:
        # By now, another run may have this address.
        self._term = 0
        super()._opened(channel, fields)

    def _lost(self, reason: str) -> None:
        if self._leaves:
            self.gone.set()
        else:
            super()._lost(reason)


def numeric(address: str) -> str:
    """Return an address (host:port) whose name is resolved. Raises UserError."""
    host, port = wire.parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise UserError(f"--join {address}: {host} cannot be resolved here: {error}") from error
    return wire.format_address(str(found[0]), port)


class Guest:
    """Joins a run from a thread of its own. arguments: the actor's command line (actor_main); offered: what the actor
    says of itself; port: at which it is served. Raises UserError if the registry's name cannot be resolved."""

    def __init__(self, arguments: argparse.Namespace, offered: Facts, port: int, token: str):
        self._leave_within_s = arguments.leave_within
        self._runtime = SocketRuntime()
        url = base_url(reachable_host(arguments.host, wire.parse_address(numeric(arguments.join))[0]), port)
        self._client = GuestClient(
            self._runtime, arguments.join, arguments.join_as, token, url, offered, arguments.join_for
        )
        self._runtime.start("guest", self._client.start)

    @property
    def failure(self) -> str:
        """Why the guest is no actor of a run, and will not be; empty otherwise."""
        return self._client.failure or self._runtime.failure

    async def stay(self, stopped: asyncio.Event, server: Any) -> None:
        """Return when `stopped` is set and the run can do without this actor (see ActorServer.leave). Raises UserError
        if there is no run for --join-for seconds."""
        while not stopped.is_set():
            if self.failure:
                raise UserError(f"{self.failure} (--join-for)")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), LOOK_S)
        await server.leave(self._leave_within_s, lambda: self._client.connected)
        self._runtime.post(self._client.leave)
        await asyncio.to_thread(self._client.gone.wait, GOODBYE_S)
        await asyncio.to_thread(self._runtime.end, GOODBYE_S)
