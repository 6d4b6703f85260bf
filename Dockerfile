# The trainer and one engine, for NVIDIA GPUs; runs as a user without rights. See docs/gpu.md.
#
#   docker build --build-arg ENGINE=vllm --tag torchtitan-grpo .
#   docker run --gpus all --shm-size 16g --volume /data/models:/models:ro --volume /data/runs:/runs \
#       --env CONFIG_FILE=train_configs/qwen3_0.6b_gsm8k_vllm.toml --env EXTRAS=data torchtitan-grpo \
#       --model.hf_assets_path /models/Qwen3-0.6B --job.dump_folder /runs
#
# /dev/shm (--shm-size): NCCL between ranks of one machine, and of an engine on several GPUs one version of the weights.
#   BASE            the base image; with its digest (IMAGE@sha256:…) every build has the same one. torch and the engines
#                   bring their own CUDA libraries, the host its driver
#   TORCH_BACKEND   torch's build: cu130 needs a driver of 580 or newer, cu128 and cu126 are for older ones
#   ENGINE          vllm, sglang or empty
ARG BASE=nvidia/cuda:12.8.1-base-ubuntu24.04
FROM ${BASE}

ARG TORCH_BACKEND=cu128
ARG ENGINE=vllm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A C compiler: torch.compile and Triton build their launchers with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev libnuma1 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home trainer

WORKDIR /opt/torchtitan
# Python compiles everything while the image is built: the user of the container may not write there.
ENV PYTHONDONTWRITEBYTECODE=1 TORCHTITAN_ENGINES=/opt/engines
COPY pyproject.toml README.md LICENSE ./
COPY torchtitan ./torchtitan
COPY train_configs ./train_configs
COPY scripts ./scripts
COPY benchmarks ./benchmarks
COPY tests ./tests
COPY run_grpo.sh ./
RUN LOCKED=1 TORCH_BACKEND="$TORCH_BACKEND" scripts/setup_env.sh data,test \
    && if [ -n "$ENGINE" ]; then scripts/install_engine.sh "$ENGINE"; fi \
    && mkdir outputs /runs \
    && chown trainer outputs /runs

USER 10001
VOLUME ["/runs"]
ENTRYPOINT ["tini", "--", "./run_grpo.sh"]
