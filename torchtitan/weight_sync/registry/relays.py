"""Who relays versions to whom. How fast an actor is the shard servers see, and its host is where its connection comes
from: what it says of itself chooses no source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from torchtitan.weight_sync.registry.snapshots import Snapshots
from torchtitan.weight_sync.registry.state import ActorRecord
from torchtitan.weight_sync.wire.handshake import ACTOR, PEER, role_key
from torchtitan.weight_sync.wire.runtime import Message

# In small runs several versions are published before shard servers tell what has moved.
REMEMBERED_SNAPSHOTS = 64

logger = logging.getLogger("torchtitan.weight_sync.registry.relays")


def relay_sources(
    actors: Mapping[str, ActorRecord], slow: Container[str], fanout: int, token: str
) -> dict[str, Message]:
    """Map each actor that pulls from another one to its source and the key for it. Those that pull from the trainer are
    left out, as is everybody who has not yet taken a version from there: nobody knows how fast it is. Whoever cannot
    begin with a new version at once has nothing to pass on: one that applies another version, is pinned or late. The
    fastest actor of each host gets versions over the network, and the others of its host from it.

    slow: who is left out besides.
    fanout: how many hosts pull from the trainer, and from each other host; also how many actors pull from each actor
    of their host; 0: no actor relays. token: actors' keys are derived from it, and from those the keys of their peers
    (see bucket_server.Relay).
    """
    hosts: dict[str, list[str]] = {}
    for name, actor in sorted(actors.items(), key=lambda item: (item[1].speed_class, item[0])):
        knows = fanout and actor.address and actor.took_s is not None and not actor.disputes and name not in slow
        if knows and actor.is_ready and actor.channel is not None:
            hosts.setdefault(actor.channel.peer_host, []).append(name)
    found: dict[str, Message] = {}
    # In each row, the first one is where versions come from: the trainer (""), or the host's fastest actor.
    for row in (["", *(host[0] for host in hosts.values())], *hosts.values()):
        for number, child in enumerate(row[1:]):
            if parent := row[number // fanout]:
                key = role_key(role_key(token, ACTOR, parent), PEER, child)
                found[child] = {"name": parent, "address": actors[parent].address, "key": key, "fanout": fanout}
    return found


class Relays:
    """Chooses the sources of each version, and whom it chooses no more. actors, snapshots: the registry's; write(event,
    fields) writes a line of the journal."""

    def __init__(
        self,
        actors: dict[str, ActorRecord],
        snapshots: Snapshots,
        fanout: int,
        token: str,
        write: Callable[[str, Message], None],
    ):
        self._actors, self._snapshots, self._fanout, self._token = actors, snapshots, fanout, token
        self._write = write
        self._announced_at: dict[int, float] = {}
        """By serial, of the last snapshots"""

    def announce(self, serial: int, now: float) -> dict[str, Message]:
        """Return the source of each actor for the version that is announced now; whoever is missing pulls from the
        trainer."""
        if self._announced_at:
            self._judge(max(self._announced_at))
        self._announced_at[serial] = now
        if len(self._announced_at) > REMEMBERED_SNAPSHOTS:
            del self._announced_at[min(self._announced_at)]
        try:
            # Whoever still pulls an older version begins with this one later.
            slow = {*self._snapshots.lost, *self._snapshots.pulls}
            found = relay_sources(self._actors, slow, self._fanout, self._token)
        except Exception:
            # Whatever is wrong with an actor: the newest version is announced to all.
            logger.exception("no actor relays snapshot %d", serial)
            found = {}
        for name, actor in self._actors.items():
            actor.source, actor.left_source = found.get(name, {}).get("name", ""), False
        return found

    def moved(self, rows: Iterable[Sequence[Any]], now: float) -> None:
        """Take what a shard server says has gone to actors, see the message "moved"."""
        for name, serial, count in rows:
            self._snapshots.moved(name, serial, count, now)
            actor = self._actors.get(name)
            if actor is None or serial not in self._announced_at:
                continue
            before = actor.got.get(serial, 0)
            actor.got = {known: seen for known, seen in actor.got.items() if known in self._announced_at}
            actor.got[serial] = before + count
            if before < self._snapshots.version_bytes <= before + count:
                actor.took_s = now - self._announced_at[serial]
            # Another actor was to send it.
            actor.left_source |= bool(actor.source) and serial == self._snapshots.newest

    def lost(self, name: str) -> None:
        """An actor is gone, which is nobody's fault: those that it was to send the version have to get it elsewhere."""
        for child in self._actors.values():
            if child.source == name:
                child.source, child.left_source = "", True

    def _judge(self, serial: int) -> None:
        """Of an actor that has left its source for snapshot `serial` and this source one is wrong: from now on both
        pull from the trainer, and neither relays. A source that has left its own had nothing to pass on. Neither had a
        source that did not begin with that snapshot, which takes a version from the trainer before it relays again."""
        left = {name: actor.source for name, actor in self._actors.items() if actor.left_source}
        for name, source in left.items():
            if source not in self._actors or source in left:
                continue
            about = self._actors[source]
            if not about.is_ready or not (about.got.get(serial) or self._snapshots.holds.get(source) == serial):
                about.took_s = None
            else:
                version = self._actors[name].version
                self._write("relay_left", {"actor": name, "version": version, "reason": f"by {source}"})
                self._actors[name].disputes = about.disputes = True
