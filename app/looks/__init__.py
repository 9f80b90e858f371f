"""How the windows look: colour tokens, theme, icons, and the small widgets that every page uses."""
