"""The gateway of a pipeline: a process that schedules requests over the stages and speaks to clients."""
