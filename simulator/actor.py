"""One simulated actor: the real puller, an engine, links, and the faults that may happen to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

from deterministic.parts import Actor, Shape
from simulator.engine import Engine
from torchtitan.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from simulator.world import World


class SimulatedActor(Actor):
    """Pulls, applies, generates; freezes, dies and comes back."""

    def __init__(self, world: World, shape: Shape, number: int):
        super().__init__(world, shape, [world.ranks], number, f"actor-{number}")
        scenario, network = world.scenario, world.network
        slowness = scenario.slow_actor_factor if number < scenario.slow_actors else 1.0
        self.engine = Engine(world, scenario, slowness, world.rollouts.finished)
        world.rollouts.engines.append(self.engine)
        self.crashes = self.freezes = 0
        self._network, self._scenario, self._rollouts = network, scenario, world.rollouts
        self._random = Random(f"{scenario.seed}/{self.name} faults")
        self._bytes_per_s = scenario.actor_gigabytes_per_s * 1e9 / slowness
        self.ingress, self.egress = network.add_link(self._bytes_per_s), network.add_link(self._bytes_per_s)

    def come_up(self) -> None:
        """The process begins. Faults are drawn from here on."""
        self.start(self._bytes_per_s)
        self.engine.halt("dead", False)
        self.engine.up = True
        self._plan(self._scenario.crashes_per_hour, self._crash)
        self._plan(self._scenario.freezes_per_hour, self._freeze)

    def _plan(self, per_hour: float, fault: Callable[[], None]) -> None:
        if per_hour:
            self._if_alive(self._random.expovariate(per_hour / 3600), fault)

    def _if_alive(self, seconds: float, callback: Callable[[], None]) -> None:
        """In so many seconds, unless this process has ended by then; also where it is frozen."""
        process = self.process
        self.machine.at(seconds, None, lambda: callback() if process.alive else None)

    def _crash(self) -> None:
        self.crashes += 1
        self._set_frozen(False)
        self.process.kill()
        self.engine.halt("dead")
        self.engine.halt("apply", False)
        self.engine.version = None
        self._lose_engine()
        self.machine.at(self._scenario.restart_s, None, self.come_up)

    def _lose_engine(self) -> None:
        """Its requests have to be redone elsewhere."""
        self.engine.up = False
        self._rollouts.redo(self.engine.abandon())

    def _freeze(self) -> None:
        self.freezes += 1
        self._set_frozen(True)
        self.process.freeze()
        self._if_alive(self._scenario.health_timeout_s, lambda: self._lose_engine() if self.process.frozen else None)
        self._if_alive(self._random.expovariate(1 / self._scenario.freeze_s), self._thaw)

    def _set_frozen(self, frozen: bool) -> None:
        self.engine.halt("frozen", frozen)
        for link in (self.ingress, self.egress):
            self._network.set_capacity(link, 0.0 if frozen else self._bytes_per_s)

    def _thaw(self) -> None:
        self._set_frozen(False)
        self.process.thaw()
        self.engine.up = True
        self._rollouts.dispatch()
        self._plan(self._scenario.freezes_per_hour, self._freeze)

    def begin_apply(self, finish: Callable[[], None]) -> None:
        """A version is staged: pause the engine when it is prepared, then call `finish`, which applies."""

        def pause() -> None:
            self.engine.halt("apply")
            self.machine.at(self._scenario.pause_s, self.process, finish)

        self.machine.at(self._scenario.prepare_s, self.process, pause)

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See puller.Engine."""
        self.engine.account()
        self.engine.version = manifest.version
        self.engine.halt("apply", False)
        self._rollouts.dispatch()
        return super().apply(manifest)
