"""The Chat page: talking to a deployed model."""
