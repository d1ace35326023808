"""An OpenAI-compatible endpoint that trains the agent behind it: its calls become a trajectory."""
