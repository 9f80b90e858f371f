"""The Fleet page: which PCs are there, what they are made of, and how they are."""
