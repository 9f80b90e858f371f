"""The agent's face: an icon that tells the PC's owner what the PC does for the fleet, and lets them pause it."""
