"""The rules that the device plugins set for fusing attention with its cache, read in a graph."""
