"""The program that starts agents: `launcher.py`, one file that runs in the agent's own interpreter."""
