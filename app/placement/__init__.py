"""The Placement page: which layers of a model go to which PC."""
