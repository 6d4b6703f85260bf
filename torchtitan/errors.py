"""The one exception that stands for a mistake a person can correct, and exit codes."""

# A rank that ends with this has met what may be over at the next start: another rank that is gone, say.
BROKEN_OFF = 75


class UserError(Exception):
    """A mistake of the user's or of the environment: printed as one message, without a traceback.

    The message says what is wrong, where, and what to do. Entry points turn it into ``exit_code``.
    """

    exit_code = 1


class ConfigError(UserError):
    """One or several problems in the configuration, reported together. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        count = len(self.problems)
        head = "configuration problem" if count == 1 else f"{count} configuration problems"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))
