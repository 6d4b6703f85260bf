"""The simulator of the weight synchronisation: parts against arithmetic by hand, the whole against what must hold."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deterministic.machine import Machine, Violation
from tests.deterministic.network import Network, fair_rates
from tests.simulator import __main__ as sync_simulator
from tests.simulator.__main__ import figures_of, simulate
from tests.simulator.measured import values_from_run
from tests.simulator.rollouts import Engine, Group
from tests.simulator.scenario import Scenario, slowest_of
from tests.simulator.world import World
from torchtitan.errors import UserError
from torchtitan.weight_sync.actor.puller import Puller
from torchtitan.weight_sync.actor.shard_connection import ShardServerConnection
from torchtitan.weight_sync.memory.manifest import BucketKey
from torchtitan.weight_sync.registry.trainer_view import STATUS_SECONDS

SMALL: dict[str, Any] = {
    "hours": 0.05,
    "ranks": 4,
    "actors": 3,
    "train_s": 1.0,
    "gigabytes": 1.0,
    "groups_per_batch": 8,
    "group_size": 4,
    "completion_tokens": 50.0,
    "max_completion_tokens": 200,
    "prompt_tokens": 10.0,
}
FAULTS: dict[str, Any] = {
    "crashes_per_hour": 40.0,
    "restart_s": 5.0,
    "freezes_per_hour": 60.0,
    "freeze_s": 12.0,
    "corruption_probability": 0.1,
}
EVEN = {"step_jitter": 0.0, "latency_jitter_s": 0.0}
# Nothing but training takes time.
IDEAL = EVEN | {
    "latency_s": 0.0,
    "gigabytes": 1e-9,
    "snapshot_s": 0.0,
    "prepare_s": 0.0,
    "pause_s": 0.0,
    "tokens_per_s": 1e6,
    "sequence_tokens_per_s": 1e6,
}


def small(**values: Any) -> Scenario:
    return Scenario.of(SMALL | {name.replace("__", "."): value for name, value in values.items()})


# Parts


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.0, 100.0), min_size=2, max_size=6),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 50.0) | st.just(math.inf)),
        min_size=1,
        max_size=12,
    ),
)
def test_rates_are_max_min_fair(capacity: list[float], flows: list[tuple[int, int, float]]) -> None:
    """No link is overloaded, and every flow has its limit, or a full link on which nobody is faster: the definition."""
    ends = np.array([flow[:2] for flow in flows]) % len(capacity)
    limits = np.array([flow[2] for flow in flows])
    rates = fair_rates(np.array(capacity), ends[:, 0], ends[:, 1], limits)
    flowing = list(zip(rates, ends, strict=True))
    load = [sum(rate * (way == link).sum() for rate, way in flowing) for link in range(len(capacity))]
    for link, bytes_per_s in enumerate(capacity):
        assert load[link] <= bytes_per_s * (1 + 1e-6) + 1e-9
    for flow, rate in enumerate(rates):
        assert rate <= limits[flow] * (1 + 1e-6)
        assert rate >= limits[flow] * (1 - 1e-6) or any(
            load[link] >= capacity[link] * (1 - 1e-6) - 1e-9
            and all(other <= rate * (1 + 1e-6) + 1e-9 for other, way in flowing if link in way)
            for link in ends[flow]
        )


def test_a_frozen_link_leaves_its_share_to_others() -> None:
    clock = Machine(0)
    network = Network(clock)
    sender, receivers = network.add_link(100.0), [network.add_link(1000.0) for _ in range(2)]
    ends: list[str] = []
    network.start(sender, receivers[0], 200.0, lambda: ends.append(f"frozen {clock.now:.1f}"))
    network.start(sender, receivers[1], 200.0, lambda: ends.append(f"other {clock.now:.1f}"))
    clock.at(1.0, None, lambda: network.set_capacity(receivers[0], 0.0))
    clock.at(5.0, None, lambda: network.set_capacity(receivers[0], 1000.0))
    clock.run(20.0)
    # Each has 50 bytes after a second; the other's 150 more take 1.5 s alone, the frozen one's 150 begin at 5 s.
    assert ends == ["other 2.5", "frozen 6.5"]


def test_sequences_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 and 40 tokens at 10/s together: 4 s for the first (5/s each), then 20 left at 8/s; a pause comes on top."""
    monkeypatch.setattr("tests.simulator.rollouts.END_MERGE_SHARE", 0.0)
    clock = Machine(0)
    done: list[tuple[int, float, int]] = []
    scenario = Scenario(tokens_per_s=10.0, sequence_tokens_per_s=8.0, max_sequences=2)
    engine = Engine(clock, scenario, 1.0, lambda work: done.append((work.index, clock.now, work.oldest)))
    engine.version = 3
    for index, length in ((0, 20), (1, 40), (2, 8)):
        engine.add(Group(index, [length], True, 0))
    assert engine.load == 3

    def serve_4() -> None:
        engine.version = 4

    clock.at(1.0, None, lambda: engine.halt("apply"))
    clock.at(1.5, None, serve_4)
    clock.at(2.0, None, lambda: engine.halt("apply", False))
    clock.run(60.0)
    engine.account()
    # The third begins when the first ends (5 s): 5/s each, done at 6.6 s; the second then has 12 left at 8/s.
    assert done == [(0, pytest.approx(5.0), 3), (2, pytest.approx(6.6), 4), (1, pytest.approx(8.1), 3)]
    assert engine.tokens == pytest.approx(68)
    assert engine.busy_s == pytest.approx(7.1)


# The whole


@pytest.mark.slow
def test_the_same_seed_gives_the_same_output_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--{name}={value}" for name, value in (SMALL | FAULTS | {"hours": 0.02}).items()]
    outputs = []
    for seed in ("1", "1", "2"):
        assert sync_simulator.main([*arguments, "--json", f"--seed={seed}"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["figures"] != json.loads(outputs[2])["figures"]
    # Nor does it depend on the process' own hashes.
    other = subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments, "--json", "--seed=1"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        timeout=840,
    )
    assert other.stdout == outputs[0]


def test_the_slowest_of_many_ranks_is_drawn_at_once() -> None:
    """The mean of many maxima, drawn at once or one by one."""
    random = Random(0)
    at_once = statistics.mean(slowest_of(12, random.random()) for _ in range(4000))
    one_by_one = statistics.mean(max(random.gauss(0, 1) for _ in range(12)) for _ in range(4000))
    assert at_once == pytest.approx(one_by_one, rel=0.03)


rates = st.sampled_from([0.0, 1.0])


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    faulty=rates,
    asynchronous=st.booleans(),
    values=st.fixed_dictionaries(
        {
            "hours": st.just(0.025),
            "actors": st.integers(1, 5),
            "slow_actors": st.integers(0, 1),
            "slow_actor_factor": st.sampled_from([3.0, 30.0]),
            "gigabytes": st.sampled_from([0.01, 2.0, 20.0]),
            "max_staleness": st.integers(0, 3),
            "usable_share": st.sampled_from([1.0, 0.5]),
            "weight_sync.num_slots": st.integers(3, 4),
            "weight_sync.tcp.relay": st.booleans(),
            "weight_sync.tcp.delta": st.booleans(),
            "weight_sync.tcp.connections": st.sampled_from([1, 3]),
        }
    ),
)
def test_whatever_happens_tokens_are_conserved_and_the_protocol_holds(
    seed: int, faulty: float, asynchronous: bool, values: dict[str, Any]
) -> None:
    """World.simulate raises where an actor applies torn bytes, serves what was not published, or goes back."""
    faults = {name: value * faulty for name, value in FAULTS.items() if not name.endswith("_s")}
    scenario = Scenario.of(SMALL | values | faults | {"seed": seed, "restart_s": 5.0, "freeze_s": 8.0})
    world = World(scenario, asynchronous)
    world.simulate()
    figures, held = figures_of(world), sum(work.tokens for work in world.rollouts.ready.values())
    used = figures["tokens_trained"] + figures["tokens_too_old"] + figures["tokens_unusable"] + held
    # Sequences that end almost together are ended at once, some of them half a token early.
    assert used <= figures["tokens_generated"] * 1.02 + 10
    assert figures["versions_published"] <= world.trainer.version + 1
    # With 20 GB copy and checksums take longer than a step.
    assert figures["versions_skipped"] == 0 or scenario.gigabytes == 20.0
    assert figures["actor_utilisation"] <= 1 + 1e-9
    assert all(int(behind) <= scenario.max_staleness for behind in figures["staleness_shares"])
    parts = figures["train_s"] + figures["data_wait_s"] + figures["snapshot_s"] + figures["sync_stall_s"]
    assert parts == pytest.approx(figures["step_s"], rel=1e-6)
    if asynchronous:
        assert figures["sync_stall_s"] == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_costs_every_mode_is_ideal(asynchronous: bool) -> None:
    figures = simulate(small(**IDEAL), asynchronous)
    # Blocking, the trainer hears of it with the registry's next status.
    assert figures["step_s"] == pytest.approx(1.0 + (0 if asynchronous else STATUS_SECONDS), abs=2.5e-3)
    assert figures["versions_skipped"] == figures["versions_superseded"] == 0


@pytest.mark.slow
def test_frozen_actors_stall_only_the_blocking_mode() -> None:
    """Enough others generate; a step takes what it takes without any freeze."""
    values = {**EVEN, "gigabytes": 0.1, "max_staleness": 3, "actors": 4, "tokens_per_s": 20000.0}
    values |= {"sequence_tokens_per_s": 1000.0, "hours": 0.1}
    frozen = {**values, "freezes_per_hour": 30.0, "freeze_s": 60.0}
    calm, icy = simulate(small(**values)), simulate(small(**frozen))
    assert icy["actor_freezes"] >= 3 and icy["actors_lost"]
    assert icy["sync_stall_max_s"] == 0
    assert icy["train_s"] == pytest.approx(calm["train_s"], rel=1e-9)
    blocking = simulate(small(**frozen), asynchronous=False)
    # Until nothing has been heard of the frozen one for SILENCE_SECONDS.
    assert 2 < blocking["sync_stall_max_s"] < 5


def test_the_blocking_stall_grows_with_the_transfer() -> None:
    """All actors receive at once, each behind its own link: copy and checksum of a shard, transfer, apply, status."""
    sizes = (1.0, 4.0, 16.0)
    stalls = [simulate(small(**EVEN, gigabytes=size), False)["sync_stall_s"] for size in sizes]
    expected = [size / 4 / 20 + size / 4 / 5 + size / 2.5 + 0.2 + STATUS_SECONDS for size in sizes]
    assert stalls == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("ranks", "actors", "connections", "seconds"),
    [
        (1, 1, 1, 0.25),
        (1, 1, 2, 0.125),
        # From here on, the network's 12.5 GB/s are less than what the threads move.
        (1, 1, 4, 0.08),
        (1, 1, 8, 0.08),
        # One thread of the actor serves all ranks, unless each connection has its own.
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.08),
        # A rank's only thread sends to all actors.
        (1, 3, 1, 0.75),
        (1, 3, 2, 0.125),
    ],
)
def test_several_connections_are_faster_until_the_network_bounds_them(
    ranks: int, actors: int, connections: int, seconds: float
) -> None:
    """A gigabyte behind 100 Gbit/s, of which a thread moves 4 GB/s."""
    links = {"actor_gigabytes_per_s": 12.5, "rank_gigabytes_per_s": 50.0, "thread_s_per_gigabyte": 0.25}
    sizes = {"ranks": ranks, "actors": actors, "weight_sync.tcp.connections": connections, "hours": 0.01}
    figures = simulate(small(**EVEN, **links, **sizes))
    assert figures["transfer_p50_s"] == pytest.approx(seconds, abs=0.005)


def test_a_slow_actor_takes_what_it_can() -> None:
    figures = simulate(small(**EVEN, slow_actors=1, slow_actor_factor=10.0, gigabytes=2.0, hours=0.1))
    assert figures["sync_stall_s"] == 0
    assert figures["versions_superseded"] > 20
    assert not figures["actors_lost"], "a slow link is slow, not dead"
    # It is 8 seconds at a version, of which there is one a second.
    assert figures["versions_skipped"] == 0


def test_skipped_versions_are_published_while_there_is_no_data() -> None:
    """A copy into a slot takes longer than a step: what is skipped goes out while there is no data."""
    values = {"snapshot_gigabytes_per_s": 0.1, "max_staleness": 2, "hours": 0.1}
    figures = simulate(small(**EVEN, **values))
    assert figures["versions_skipped"] > 0
    assert figures["versions_published"] > figures["steps"] + 1 - figures["versions_skipped"]
    assert figures["steps"] > 20, "training starves behind skipped versions"


@pytest.mark.slow
def test_relay_bounds_the_trainers_egress_and_delta_shrinks_it() -> None:
    values = {**EVEN, "actors": 12, "train_s": 20.0, "hours": 0.2}
    plain = simulate(small(**values))
    relayed = simulate(small(**values, weight_sync__tcp__relay=True))
    delta = simulate(small(**values, weight_sync__tcp__delta=True))
    assert plain["trainer_egress_versions"] == pytest.approx(12, rel=0.05)
    # All get the first one from the trainer, which then knows how fast they are.
    steps = relayed["versions_published"]
    assert relayed["trainer_egress_versions"] == pytest.approx((12 + 2 * (steps - 1)) / steps, rel=0.05)
    assert relayed["versions_superseded"] == 0
    steps = delta["versions_published"]
    assert delta["trainer_egress_versions"] == pytest.approx(12 * (1 + 0.1 * (steps - 1)) / steps, rel=0.05)


def test_a_broken_protocol_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors take damaged buckets for whole ones."""
    settle = Puller._verify

    def believe(self: Puller, source: ShardServerConnection, key: BucketKey, _found: str, asked: Any) -> None:
        assert self.transfer is not None
        settle(self, source, key, self.transfer.expected(key), asked)

    monkeypatch.setattr(Puller, "_verify", believe)
    with pytest.raises(Violation, match="torn"):
        simulate(small(corruption_probability=0.5))


# Runs, the command line


MEASURED = {
    "step_mean_s": 0.528,
    "step_median_s": 0.496,
    "step_spread": 0.31,
    "data_wait_s": 0.011,
    "staleness": 0.990,
    "transfer_s": 0.0032,
    "tokens_per_s": 8341.0,
    "blocking_stall_s": 0.018,
}
"""Two debug runs of 100 steps, asynchronous and blocking, on two busy cores: see docs/sync_simulator.md"""


def write_run(folder: Path) -> None:
    """A run folder with the debug run's figures: 2 actors, 512 samples of 4 tokens, 1.2 MB, max_staleness 1."""
    for part in ("weight_sync", "timeline"):
        (folder / part).mkdir(parents=True)
    (folder / "config.toml").write_text(
        "[training]\nglobal_batch_size = 512\n[grpo]\ngroup_size = 8\ndrop_zero_variance = false\n"
        "[rollout]\nmax_completion_tokens = 8\nmax_staleness = 1\n[weight_sync]\nnum_slots = 3\n"
    )
    rows = []
    for number in range(43):
        sigmas = statistics.NormalDist().inv_cdf((number * 17 % 43 + 0.5) / 43)
        step = MEASURED["step_median_s"] * math.exp(MEASURED["step_spread"] * sigmas)
        rows.append(
            {
                "step": number + 1,
                "time/step_s": step,
                "time/train_s": step - 0.02,
                "time/data_wait_s": MEASURED["data_wait_s"],
                "time/snapshot_s": 0.0003,
                "time/sync_stall_s": 0.0001,
                "completion/length_mean": 4.0,
                "completion/length_max": 8.0,
                "tokens_per_s": 5120 / step,
            }
        )
    journal: list[dict[str, Any]] = [{"event": "join", "actor": f"actor-{number}"} for number in range(2)]
    figures = {"transfer_s": MEASURED["transfer_s"], "apply_s": 0.0009, "pause_s": 0.0004}
    received = {"bytes_full": 1193984, "bytes_delta": 0, "bytes_relayed": 0}
    journal += [{"event": "delivery", "actor": "actor-0", "outcome": "applied", "figures": figures | received}]
    activity = [{"what": "generate", "begin": 10.0, "end": 12.0, "tokens": 2 * MEASURED["tokens_per_s"]}]
    for path, lines in (
        ("metrics.jsonl", rows),
        ("weight_sync/registry.jsonl", journal),
        ("timeline/actor-0.jsonl", activity),
    ):
        (folder / path).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_shape_of_a_measured_run(tmp_path: Path) -> None:
    """Step, data wait and staleness within 10 % (of the step, where they are small), transfer and stall within 30 %."""
    write_run(tmp_path)
    scenario = Scenario.of(values_from_run(tmp_path) | {"hours": 0.05})
    figures = simulate(scenario)
    assert figures["step_s"] == pytest.approx(MEASURED["step_mean_s"], rel=0.1)
    assert figures["data_wait_s"] == pytest.approx(MEASURED["data_wait_s"], abs=0.1 * MEASURED["step_mean_s"])
    assert figures["staleness_mean"] == pytest.approx(MEASURED["staleness"], rel=0.1)
    assert figures["sync_stall_s"] == 0
    assert figures["transfer_p50_s"] == pytest.approx(MEASURED["transfer_s"], rel=0.3)
    assert simulate(scenario, asynchronous=False)["sync_stall_s"] == pytest.approx(
        MEASURED["blocking_stall_s"], rel=0.3
    )


def test_without_notes_of_the_engines_their_speed_is_what_the_fastest_steps_needed(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "timeline" / "actor-0.jsonl").unlink()
    # Of 43 steps less three, the third fastest: 1.65 sigmas.
    needed = 512 * 4 / (MEASURED["step_median_s"] * math.exp(-1.65 * MEASURED["step_spread"])) / 2
    assert values_from_run(tmp_path)["tokens_per_s"] == pytest.approx(needed, rel=0.1)


def test_a_folder_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs config\.toml"):
        values_from_run(tmp_path)


def test_flags_win_over_files_over_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    file = tmp_path / "scenario.toml"
    file.write_text("actors = 5\nhours = 0.001\ntrain_s = 0.5\n[weight_sync]\nnum_slots = 4\n")
    arguments = [str(file), "--from-run", str(tmp_path / "run"), "--train_s", "0.25", "--weight_sync.tcp.relay", "true"]
    assert sync_simulator.main([*arguments, "--json", "--mode", "async"]) == 0
    answer = json.loads(capsys.readouterr().out)
    scenario, sync = answer["scenario"], answer["scenario"]["weight_sync"]
    assert [scenario[key] for key in ("train_s", "actors", "gigabytes")] == [0.25, 5, 1193984 / 1e9]
    assert (sync["num_slots"], sync["tcp"]["relay"]) == (4, True)
    assert list(answer["figures"]) == ["async"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank = 3", "nearest: ranks"),
        ('train_s = "long"', "should be a valid number"),
        ("ranks = 0", "ranks = 0: must be at least 1"),
        ("[weight_sync]\nnum_slots = 1", "weight_sync.num_slots = 1: must be at least 3"),
        ("ranks = ", "is not valid TOML"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    assert sync_simulator.main([str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
