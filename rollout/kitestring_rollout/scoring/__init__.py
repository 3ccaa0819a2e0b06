"""Scoring: what an attempt is worth, decided apart from the agent, from its output and the hidden part of its task."""

from kitestring_rollout.scoring.score import REWARD, Score, ScoringInput, resolve_reward, score, score_attempt
from kitestring_rollout.scoring.service import ScorerService

__all__ = ["REWARD", "Score", "ScorerService", "ScoringInput", "resolve_reward", "score", "score_attempt"]
