"""Other forms of a shard, for paged attention and for an NPU, and their checks."""
