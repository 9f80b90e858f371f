"""One stage of a pipeline: a process that runs one shard of the model."""
