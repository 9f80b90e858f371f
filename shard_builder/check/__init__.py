"""Runs shards against the whole model and says what that found."""
