"""The Deploy page: shards arriving, and what runs."""
