"""Programs with a loop of their own, which ask the policy through the gateway: functions, commands, verifiers."""
