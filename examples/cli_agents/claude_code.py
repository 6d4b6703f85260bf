"""An episode of Claude Code, unmodified: train_configs/claude_code_cpu.toml runs this as its agent.

The gateway's address and key are in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY already.
"""

from examples.cli_agents import task

# One tool and a short prompt of our own: with all its tools, Claude Code's first request has some 20,000 tokens.
INSTRUCTIONS = "You write files with the tool Write. Give absolute paths."


def main():
    with task.episode() as (row, folder):
        prompt = f"{row['prompt']} The folder is {folder / 'work'}."
        command = [
            task.program("claude"), "--print", prompt, "--model", "policy", "--tools", "Write",
            "--system-prompt", INSTRUCTIONS, "--dangerously-skip-permissions", "--disable-slash-commands",
        ]  # fmt: skip
        # IS_SANDBOX: as root it refuses to work without asking for permissions anywhere else.
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}
        answer = task.run(command, folder, **quiet)
        print(task.reward(row, folder, answer))


if __name__ == "__main__":
    main()
