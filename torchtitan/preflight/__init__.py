"""Before a run starts: its configuration checked as a whole, and the plan of what it will do."""
