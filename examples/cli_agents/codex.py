"""An episode of Codex, unmodified: train_configs/codex_cpu.toml runs this as its agent.

The gateway's address and key are in OPENAI_BASE_URL and OPENAI_API_KEY already.
"""

import os

from examples.cli_agents import task

INSTRUCTIONS = "You write files with the tool exec_command.\n"


def main():
    with task.episode() as (row, folder):
        instructions = folder / "instructions.md"
        instructions.write_text(INSTRUCTIONS)
        settings = {
            "model_provider": "gateway",
            "model_providers.gateway.name": "gateway",
            "model_providers.gateway.base_url": os.environ["OPENAI_BASE_URL"],
            "model_providers.gateway.env_key": "OPENAI_API_KEY",
            "model_providers.gateway.wire_api": "responses",
            "model_instructions_file": str(instructions),
            "web_search": "disabled",
        }
        command = [task.program("codex"), "exec", "--skip-git-repo-check", "--model", "policy"]
        for name, value in settings.items():
            command += ["--config", f"{name}={value}"]
        # The worker isolates the episode; Codex' own sandbox does not work inside of another.
        command += ["--dangerously-bypass-approvals-and-sandbox", row["prompt"]]
        answer = task.run(command, folder)
        print(task.reward(row, folder, answer))


if __name__ == "__main__":
    main()
