"""The benchmarks of the weight synchronisation: one command, a scenario each.

    python -m benchmarks.weight_sync                     the scenarios
    python -m benchmarks.weight_sync stall --json        one of them
    python -m benchmarks.weight_sync stall --help        what it measures, and its options

A scenario is a module of `scenarios/`: its docstring says what it measures, OPTIONS what can be chosen, BARS what the
figures have to reach, and measure(run) returns them (`harness.py`). What scenarios share lies beside them: a trainer's
side and actors without an engine (`job.py`), small models that train (`small_models.py`), a rank's snapshots by
themselves (`snapshots.py`), processes (`processes.py`), whole training runs (`training_runs.py`), vLLM's servers
(`vllm_server.py`).
"""
