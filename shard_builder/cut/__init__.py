"""Finds the layers of a model in its graph and makes the models of its stages."""
